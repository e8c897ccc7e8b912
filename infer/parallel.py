"""Tensor parallelism as a value: which shard this process holds and how to combine shards.

All collectives are functional: they return new tensors and leave their arguments alone, so they can
be compiled, and captured in CUDA Graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from infer.config import EngineConfig
    from infer.lockstep import Outside
    from infer.watch import Beat


class Link(Protocol):
    """What binds the ranks of a group: one leads, the others do what it does.

    Without a link every rank is driven by its own program, which must be the same on all of them.
    """

    @property
    def leads(self) -> bool:
        """Whether this rank's program decides what all ranks do."""

    def touch(self) -> None:
        """Note progress inside a guarded block."""

    def check(self) -> None:
        """Raise EngineError if the group has failed; for loops that wait for a device."""

    def guard(self, what: str) -> AbstractContextManager[None]:
        """A block that all ranks run together, against a deadline; an error in it ends them all.

        Raises:
            EngineError: another rank failed; the message names it and the cause.
        """

    def loading(self, tp: TP, options: Mapping[str, Any]) -> AbstractContextManager[TP]:
        """A block in which all ranks load a model; no deadline. Gives the model's place."""

    def opening(self, config: EngineConfig) -> AbstractContextManager[Outside | None]:
        """A block in which all ranks make an engine; no deadline.

        Gives what the leading rank keeps for its followers, None on a follower.
        """

    def launching(self, outside: Outside, step: int, host: Any) -> None:
        """Tell the followers to launch a step after what happened outside since the last."""

    def collecting(self, outside: Outside, step: int) -> None:
        """Tell the followers to collect a step."""

    def reports(self) -> tuple[Beat, ...]:
        """Memory and time of every rank this one hears of."""

    def close(self) -> None:
        """End the followers. Idempotent."""


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """Memory of every rank's GPU that all ranks can read: for sums too small for NCCL."""

    buffer: Tensor  # u8[num_bytes], this rank's
    pads: tuple[Tensor, ...]  # i32 flags of every rank, by which kernels wait for each other

    def holds(self, x: Tensor) -> bool:
        """Whether ``x`` is small, and of a kind that the one-shot sum takes."""
        num_bytes = x.numel() * x.itemsize
        plain = x.dtype in (torch.bfloat16, torch.float32) and x.is_contiguous()
        return plain and 0 < num_bytes <= self.buffer.numel() and num_bytes % 16 == 0


@dataclass(frozen=True, slots=True)
class TP:
    """This process's place in its tensor-parallel group. ``TP()`` is a single device."""

    rank: int = 0
    size: int = 1
    group: Any = None  # torch.distributed process group, None when size is 1
    scratch: Scratch | None = None
    link: Link | None = None


# --- collectives ----------------------------------------------------------------------------------


def all_reduce(x: Tensor, tp: TP) -> Tensor:
    """Sum ``x`` over the ranks of ``tp``; the tensor itself when there is one rank."""
    if tp.size == 1:
        return x
    _touch(tp)
    if tp.scratch is not None and tp.scratch.holds(x):
        # Every rank reads all others' numbers at once: one kernel, a third of NCCL's latency.
        own = tp.scratch.buffer[: x.numel() * x.itemsize].view(x.dtype).view(x.shape)
        summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            own, x, "sum", tp.group.group_name
        )
        return summed
    ops = torch.ops._c10d_functional
    total: Tensor = ops.wait_tensor(ops.all_reduce(x, "sum", tp.group.group_name))
    return total


def all_gather(x: Tensor, tp: TP) -> Tensor:
    """``x`` of every rank in order: ``[size, *x.shape]``."""
    if tp.size == 1:
        return x.unsqueeze(0)
    _touch(tp)
    ops = torch.ops._c10d_functional
    flat = x.contiguous().view(-1)
    every: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(flat, tp.size, tp.group.group_name))
    return every.view(tp.size, *x.shape)


def lowest(value: int, tp: TP, device: torch.device) -> int:
    """The smallest ``value`` of any rank, for numbers that all must agree on."""
    if tp.size == 1:
        return value
    return int(all_gather(torch.tensor(value, device=device), tp).min())


def _touch(tp: TP) -> None:
    if tp.link is not None and not torch.compiler.is_compiling():
        tp.link.touch()


# --- keeping in step ------------------------------------------------------------------------------


def guarded(tp: TP, what: str) -> AbstractContextManager[None]:
    """``tp.link.guard``, or nothing when no link watches the ranks."""
    return nullcontext() if tp.link is None else tp.link.guard(what)


def loading(tp: TP, options: Mapping[str, Any]) -> AbstractContextManager[TP]:
    """``tp.link.loading``, or nothing when there is no link."""
    return nullcontext(tp) if tp.link is None else tp.link.loading(tp, options)


def opening(tp: TP, config: EngineConfig) -> AbstractContextManager[Outside | None]:
    """``tp.link.opening``, or nothing when there is no link."""
    return nullcontext() if tp.link is None else tp.link.opening(config)
