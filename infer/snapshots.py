"""A copy of an engine's whole state on the CPU, and an engine made from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from infer import blocks, prefix, sequences
from infer.blocks import Int32
from infer.config import EngineConfig
from infer.engine import check_current
from infer.errors import StateError
from infer.host import Host
from infer.initialize import init
from infer.model import Model
from infer.report import LogprobArrays
from infer.sequences import Sequences, Status
from infer.state import EngineState


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state at rest: host values of its own, and the KV of blocks that mean something."""

    host: Host
    config: EngineConfig
    kv_blocks: Int32 = field(repr=False)  # i32[N], block ids
    # K and V a layer, [N, block_size, num_kv_heads, head_dim], on the CPU
    kv: tuple[Tensor, ...] | None = field(repr=False)
    # Log-probabilities of the prompts that are computed in part, as the state keeps them.
    prompt_parts: Mapping[str, tuple[tuple[int, LogprobArrays], ...]]


def snapshot(state: EngineState, *, kv: bool = True) -> Snapshot:
    """Copy ``state``; it stays usable.

    With ``kv=False`` only host values are copied, cheap and small: the restored engine recomputes
    the KV of its running sequences, as after a preemption.

    Raises:
        StateError: a step is in flight (its tokens belong to no state yet), or the state was
            already advanced, or ranks follow it.
    """
    check_current(state)
    if state.outside is not None:
        raise StateError(_LED)
    if state.host.in_flight:
        raise StateError("a snapshot needs a state at rest; collect the launched steps first")
    if not kv:
        return Snapshot(_without_kv(state.host), state.config, np.empty(0, np.int32), None, {})
    pool = state.host.pool
    held = np.flatnonzero((pool.ref_count > 0) | pool.cached).astype(np.int32)
    index = torch.from_numpy(held).to(state.kv.k[0].device).long()
    with torch.inference_mode():
        pages = tuple(c.index_select(0, index).cpu() for c in (*state.kv.k, *state.kv.v))
    host = replace(state.host, seqs=_private(state.host.seqs))
    return Snapshot(host, state.config, held, pages, state.prompt_parts)


def restore(model: Model, snap: Snapshot) -> EngineState:
    """An engine that goes on from ``snap``: its next plans and tokens are the original's.

    A snapshot can be restored any number of times. The model must be the one it was taken with.
    """
    if model.tp.link is not None:
        raise StateError(_LED)
    state = init(model, snap.config)
    if snap.kv is not None:
        index = torch.from_numpy(snap.kv_blocks).to(model.device).long()
        with torch.inference_mode():
            for cache, pages in zip((*state.kv.k, *state.kv.v), snap.kv, strict=True):
                if cache.shape[1:] != pages.shape[1:]:
                    raise StateError(
                        f"the snapshot's KV pages are {tuple(pages.shape[1:])}, this model's "
                        f"{tuple(cache.shape[1:])}; restore it with the model it was taken with"
                    )
                cache.index_copy_(0, index, pages.to(model.device))
    seqs = _private(snap.host.seqs)
    busy = tuple(np.flatnonzero(seqs.status != Status.FREE).tolist())
    host = replace(snap.host, seqs=seqs, dirty=busy)
    return replace(state, host=host, prompt_parts=snap.prompt_parts)


_LED = (
    "a snapshot holds the KV of one rank, but other ranks follow this one; run the program on "
    "every rank, with torch.distributed initialized, and each takes and restores its own"
)


def _private(seqs: Sequences) -> Sequences:
    """Rows whose growing arrays belong to nobody else: a live state goes on writing its own."""
    own = sequences.copy(seqs)
    for row in np.flatnonzero(own.status != Status.FREE).tolist():
        own.token_ids[row] = own.token_ids[row].copy()
        own.block_table[row] = own.block_table[row].copy()
    return own


def _without_kv(host: Host) -> Host:
    """Every running sequence preempted and nothing indexed: no KV is needed."""
    seqs = _private(host.seqs)
    for row in np.flatnonzero(seqs.status == Status.RUNNING).tolist():
        sequences.preempt(seqs, row)
    num_blocks = host.pool.num_blocks
    return replace(host, seqs=seqs, pool=blocks.make(num_blocks), prefix=prefix.make(num_blocks))
