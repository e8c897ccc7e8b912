"""A runtime that keeps the logits of every position and hands out the tokens of fixed paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from infer.hostbatch import HostBatch
from infer.kv import KVCache
from infer.model import Model
from infer.plan import Plan
from infer.report import StepValues
from infer.rows import RowState
from infer.runtime import Pending, Runtime
from infer.sequences import Sequences
from infer.verify.paths import Path

Key = tuple[str, int]  # a path's name and a position


class Probe(Runtime):
    """Stands in for ``inner``, which does all the work.

    Args:
        whole: ask for the logits of every position a step computes, not only of those it samples
            from. Graphs, whose shapes are fixed, cannot.
    """

    def __init__(
        self, model: Model, inner: Runtime, paths: Mapping[str, Path], *, whole: bool
    ) -> None:
        super().__init__(
            model, inner.ops, executable=inner.executable(model), uploader=inner.uploader
        )
        self.asynchronous = inner.asynchronous
        self.generation = inner.generation
        self.logits: dict[Key, Tensor] = {}  # f32[vocab_size] after the token at that position
        self.sampled: dict[Key, int] = {}  # what the engine itself would have put there
        self.num_positions = 0
        self.num_graph_steps = 0
        self._inner = inner
        self._paths = paths
        self._whole = whole
        self._keys: list[Key] = []
        inner.on_logits = self._keep

    def release(self) -> None:
        """Let go of ``inner``, which may then be freed with all it holds."""
        self._inner.on_logits = None

    def take_counters(self) -> tuple[bool, int]:
        """See ``Runtime.take_counters``."""
        hit, recompiles = self._inner.take_counters()
        self.num_graph_steps += hit
        return hit, recompiles

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
        """Launch one step, and put the path's tokens where the sampled ones are."""
        self.num_positions += plan.num_tokens
        wanted = _every_row(batch) if self._whole else batch
        self._keys = _keys(plan, wanted)
        pending, kv, rows = self._inner.run(model, kv, rows, plan, wanted, seqs)
        keys = [
            (seqs.request[row].request_id, int(position))
            for row, position in zip(
                plan.sample_rows.tolist(), batch.sample_positions.tolist(), strict=True
            )
        ]
        forced = np.array([self._paths[name].tokens[at] for name, at in keys], np.int32)
        if forced.size:
            device = rows.last_token.device
            index = torch.from_numpy(plan.sample_rows).to(device).long()
            rows.last_token.index_copy_(0, index, torch.from_numpy(forced).to(device))
        return _Forced(pending, keys, forced, self.sampled), kv, rows

    def _keep(self, logits: Tensor) -> None:
        for i, key in enumerate(self._keys):
            self.logits[key] = logits[i].clone()


@dataclass(frozen=True, slots=True)
class _Forced:
    """A step's values with its tokens replaced; the engine's own are noted."""

    inner: Pending
    keys: list[Key]
    tokens: np.ndarray
    sampled: dict[Key, int]

    def wait(self) -> StepValues:
        """Block until the device has finished the step."""
        values = self.inner.wait()
        self.sampled.update(zip(self.keys, values.tokens.tolist(), strict=True))
        return replace(values, tokens=self.tokens)


def _every_row(batch: HostBatch) -> HostBatch:
    """The batch with logits of all its tokens; sampling rows still read their own."""
    return replace(
        batch,
        logits_rows=np.arange(batch.num_tokens, dtype=np.int32),
        sample_logits=batch.logits_rows[batch.sample_logits],
    )


def _keys(plan: Plan, batch: HostBatch) -> list[Key]:
    """Path and position of every logits row."""
    names = np.repeat(np.arange(plan.num_sequences), plan.num_scheduled)
    at = plan.num_cached[names] + np.arange(names.size) - batch.cu_seqlens_q[:-1][names]
    return [
        (plan.requests[names[token]].request_id, int(at[token]))
        for token in batch.logits_rows.tolist()
    ]
