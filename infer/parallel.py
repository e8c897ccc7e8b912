"""Tensor parallelism as a value: which shard this process holds and how to combine shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TP:
    """This process's place in its tensor-parallel group. ``TP()`` is a single device."""

    rank: int = 0
    size: int = 1
    group: Any = None  # torch.distributed process group, None when size is 1


def all_reduce(x: Tensor, tp: TP) -> Tensor:
    """Sum ``x`` over the ranks of ``tp``; the tensor itself when there is one rank."""
    if tp.size == 1:
        return x
    from torch.distributed import _functional_collectives as funcol

    return funcol.all_reduce(x, "sum", tp.group)
