"""Faults planted through the engine's seams: ``infer verify`` must notice every one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from infer import engine
from infer.hostbatch import HostBatch, build
from infer.models import decoder
from infer.ops import LayerShape, torch_attention, torch_packed
from infer.plan import Plan
from infer.prefix import Draft
from infer.sequences import Sequences
from infer.verify.result import Row
from infer.verify.run import verify
from tests.verify.subjects import subject

Patch = pytest.MonkeyPatch


def rows(*only: str, tp: int = 1) -> dict[str, Row]:
    return {row.name: row for row in verify(subject(), only=only, tp=tp, half=False).rows}


def in_batches(patch: Patch, change: Callable[[HostBatch], HostBatch]) -> None:
    def built(plan: Plan, seqs: Sequences) -> HostBatch:
        return change(build(plan, seqs))

    patch.setattr(engine, "build", built)


def test_wrong_slot(monkeypatch: Patch) -> None:
    """The last token of every step is written over its predecessor."""

    def shifted(batch: HostBatch) -> HostBatch:
        slots = batch.slot_mapping.copy()
        slots[-1] = max(0, slots[-1] - 1)
        return replace(batch, slot_mapping=slots)

    in_batches(monkeypatch, shifted)
    found = rows("transformers", "kv-cache")
    assert found["transformers"].status == "fail"
    assert "exceeds" in found["transformers"].reasons[0]
    assert found["kv-cache"].status == "fail"


def test_wrong_slot_at_a_block_boundary_only(monkeypatch: Patch) -> None:
    """A fault that one position in sixteen has, while decoding alone."""

    def shifted(batch: HostBatch) -> HostBatch:
        slots, n = batch.slot_mapping.copy(), batch.num_decode
        first = np.flatnonzero(batch.positions[:n] % 16 == 0)
        slots[first] += 1
        return replace(batch, slot_mapping=slots)

    in_batches(monkeypatch, shifted)
    assert rows("kv-cache")["kv-cache"].status == "fail"


def on_torch(patch: Patch) -> None:
    """What the device's default backend does is planted in plain torch's stages."""
    patch.setattr("infer.initialize.choose", lambda *_, **__: ("torch", None))


def test_missing_causal_mask(monkeypatch: Patch) -> None:
    on_torch(monkeypatch)
    inner = torch_attention.prepare

    def unmasked(meta: Any, cos_sin: Tensor, k_cache: Tensor, shape: LayerShape) -> Any:
        step = inner(meta, cos_sin, k_cache, shape)
        counts = (meta.cu_seqlens_q[1:] - meta.cu_seqlens_q[:-1]).tolist()
        queries = iter([count for count in counts if count > 1])
        tiles = tuple(
            tile if tile.decode else replace(tile, mask=torch.zeros(next(queries), tile.num_keys))
            for tile in step.tiles
        )
        return replace(step, tiles=tiles)

    monkeypatch.setattr(torch_attention, "prepare", unmasked)
    found = rows("transformers", "kv-cache", "torch")
    assert all(row.status == "fail" for row in found.values())


def test_stale_prefix_hash(monkeypatch: Patch) -> None:
    """Blocks of an earlier prompt are found under their place, whatever they hold."""
    chains: list[Sequence[bytes]] = []

    def match(
        self: Draft, chain: Sequence[bytes], tokens: Any, size: int, salt: Any, limit: int
    ) -> tuple[list[Any], bool]:
        if not chains:
            chains.append(chain)
        found = []
        for own, stale in list(zip(chain, chains[0], strict=False))[:limit]:
            entry = self.by_digest.get(own) or self.by_digest.get(stale)
            if entry is None:
                break
            found.append(entry)
        return found, False

    monkeypatch.setattr(Draft, "match", match)
    found = rows("transformers", "prefix")
    assert found["transformers"].status == "pass", "nothing shares a prefix there"
    assert found["prefix"].status == "fail"
    reasons = " ".join(found["prefix"].reasons)
    assert "exceeds" in reasons, "the logits show it"
    assert "cached of a shared beginning is 96, it should be 64" in reasons, "and so do the counts"


def test_rope_off_by_one(monkeypatch: Patch) -> None:
    """Decoding counts positions from one. All positions off by one would be a rotation that
    attention cannot see, and no fault."""

    def shifted(batch: HostBatch) -> HostBatch:
        positions = batch.positions.copy()
        positions[: batch.num_decode] += 1
        return replace(batch, positions=positions)

    in_batches(monkeypatch, shifted)
    found = rows("transformers", "kv-cache")
    assert all(row.status == "fail" for row in found.values())


def test_wrong_kv_head_map(monkeypatch: Patch) -> None:
    """Query heads read the keys of the next KV head."""
    on_torch(monkeypatch)
    inner = torch_attention.attention

    def rolled(q: Tensor, k: Tensor, v: Tensor, step: Any, shape: LayerShape) -> Tensor:
        group = shape.num_heads // shape.num_kv_heads
        return inner(q.roll(group, dims=1), k, v, step, shape)

    for module in (torch_attention, torch_packed):
        monkeypatch.setattr(module, "attention", rolled)
    found = rows("transformers", "torch")
    assert all(row.status == "fail" for row in found.values())


def test_preemption_that_keeps_its_progress(monkeypatch: Patch) -> None:
    """A sequence that gave its blocks back and goes on as if it had them."""
    from infer import sequences

    inner = sequences.preempt

    def forgetful(seqs: Sequences, row: int) -> None:
        cached = int(seqs.num_cached_tokens[row])
        inner(seqs, row)
        seqs.token_ids[row][: cached // 2] = 0  # what it recomputes from is not what it was

    monkeypatch.setattr(sequences, "preempt", forgetful)
    found = rows("batched", "preempted")
    assert found["batched"].status == "pass"
    assert found["preempted"].status == "fail"


def test_a_mechanism_that_never_acts_is_no_evidence(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Draft, "match", lambda *_: ([], False))
    found = rows("prefix")["prefix"]
    assert found.status == "fail"
    assert found.errors is not None and found.errors.rel_l2 < 1e-5, "its logits are right"


def test_an_engine_that_breaks_down_has_failed(monkeypatch: Patch) -> None:
    def broken(seqs: Any, row: int) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("infer.sequences.preempt", broken)
    found = rows("preempted", "batched")
    assert found["preempted"].reasons == ("RuntimeError: out of luck",)
    assert found["batched"].status == "pass", "the others go on"


@pytest.mark.slow
def test_one_missed_all_reduce(monkeypatch: Patch) -> None:
    """One rank goes on with its own part of one sum, in one layer."""
    inner, calls = decoder.all_reduce, []

    def missed(x: Tensor, tp: Any) -> Tensor:
        total = inner(x, tp)
        calls.append(tp.size)
        return x if len(calls) % 5 == 2 else total  # the first of a step is the embedding's

    assert rows("tp", tp=2)["tp"].status == "pass"
    monkeypatch.setattr(decoder, "all_reduce", missed)
    row = rows("tp", tp=2)["tp"]
    assert 2 in calls
    assert row.status == "fail"
    assert "exceeds" in row.reasons[0]
