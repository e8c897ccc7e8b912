"""The handle that turns a plan into device work; the one mutable thing a state carries."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from infer import rows as row_state
from infer.batch import AttentionMeta, Batch
from infer.errors import EngineError
from infer.hostbatch import HostBatch
from infer.kv import KVCache
from infer.model import Model
from infer.models import forward, logits
from infer.ops import Ops
from infer.ops.sample import SampleFlags, sample
from infer.plan import Plan
from infer.report import StepValues
from infer.rows import RowState
from infer.sequences import Need, Sequences


class Pending(Protocol):
    """Values that a device is still computing."""

    def wait(self) -> StepValues:
        """Block until they are there."""


class Ready:
    """Values that are there already."""

    def __init__(self, values: StepValues) -> None:
        self._values = values

    def wait(self) -> StepValues:
        """Return them."""
        return self._values


class Runtime:
    """Compiled functions and buffers for one (model, KV cache), and the newest generation."""

    def __init__(self, ops: Ops) -> None:
        self.generation = 0
        self.ops = ops

    def take_counters(self) -> tuple[bool, int]:
        """Whether the last step replayed a graph, and recompilations since the last call."""
        return False, 0

    @torch.inference_mode()
    def run(
        self,
        model: Model,
        kv: KVCache,
        rows: RowState,
        plan: Plan,
        batch: HostBatch,
        seqs: Sequences,
    ) -> tuple[Pending, KVCache, RowState]:
        """Launch one step. ``kv`` and ``rows`` are donated."""
        rows = row_state.introduce(rows, plan, seqs)
        kv = copy_blocks(kv, plan)
        if not plan.num_sequences:
            return Ready(EMPTY), kv, rows
        device_batch = upload(batch, rows.block_tables)
        hidden, kv = forward(
            model.config, model.tp, model.weights, kv, device_batch, rows.last_token, self.ops
        )
        if not batch.logits_rows.size:
            return Ready(EMPTY), kv, rows
        scores = logits(
            model.config, model.tp, model.weights, hidden, device_batch.logits_rows, self.ops
        )
        params = rows.sampling.select(device_batch.sample_rows)
        picked = sample(
            scores,
            device_batch.sample_logits,
            device_batch.sample_positions,
            params,
            sample_flags(plan),
        )
        rows.last_token.index_copy_(0, device_batch.sample_rows.long(), picked.tokens)
        values = StepValues(picked.tokens.cpu().numpy(), picked.nan.cpu().numpy())
        return Ready(values), kv, rows


EMPTY = StepValues(np.empty(0, np.int32), np.empty(0, np.bool_))


def sample_flags(plan: Plan) -> SampleFlags:
    """What holds for every sampling row of the step."""
    truncates = bool(plan.need & Need.TRUNCATION)
    return SampleFlags(
        greedy=not plan.need & Need.RANDOM, top_k=truncates, top_p=truncates, min_p=truncates
    )


def upload(batch: HostBatch, block_tables: Tensor) -> Batch:
    """The batch on the device of ``block_tables``; on a CPU nothing is copied."""
    device = block_tables.device

    def put(array: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return Batch(
        input_ids=put(batch.input_ids),
        src_rows=put(batch.src_rows),
        attention=AttentionMeta(
            positions=put(batch.positions),
            slot_mapping=put(batch.slot_mapping),
            seq_rows=put(batch.seq_rows),
            cu_seqlens_q=put(batch.cu_seqlens_q),
            context_lens=put(batch.context_lens),
            block_tables=block_tables,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            decode=batch.num_decode == batch.num_seqs,
        ),
        logits_rows=put(batch.logits_rows),
        sample_logits=put(batch.sample_logits),
        sample_rows=put(batch.sample_rows),
        sample_positions=put(batch.sample_positions),
    )


def copy_blocks(kv: KVCache, plan: Plan) -> KVCache:
    """Copy shared partial blocks before anything of the step is written. KV donated."""
    if plan.copies.size:
        pairs = torch.from_numpy(plan.copies).to(kv.k[0].device).long()
        for cache in (*kv.k, *kv.v):
            cache.index_copy_(0, pairs[:, 1], cache.index_select(0, pairs[:, 0]))
    return kv
