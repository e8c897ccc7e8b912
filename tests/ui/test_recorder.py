"""The recorder's timeline against the engine's own reports and reference counts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

import infer
from dashboard.lessons import Walk, tiny_model
from dashboard.recorder import StepRecorder
from dashboard.scenarios import PREEMPTION, PREFIX
from dashboard.views import Timeline, block_map


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def watched(lesson: Any, model: Any) -> tuple[StepRecorder, list[Any], list[Any]]:
    recorder = StepRecorder(num_steps=5)
    reports, states = [], []

    def watch(report: Any, state: Any) -> None:
        reports.append(report)
        states.append(state)
        recorder.record(report, state)

    walk = Walk.begin(lesson, model)
    while not walk.ended:
        walk.forward(watch)
    return recorder, reports, states


def test_timeline_is_what_the_reports_said(model: Any) -> None:
    recorder, reports, _ = watched(PREEMPTION, model)
    timeline = msgspec.json.decode(recorder.to_json(), type=Timeline)
    kept = reports[-5:]
    assert [s.step for s in timeline.steps] == [r.step for r in kept]
    for step, report in zip(timeline.steps, kept, strict=True):
        assert step.num_prefill == report.stats.num_prefill_tokens
        assert step.num_decode == report.stats.num_decode_tokens
        assert step.preempted == report.plan.preempted
        assert {b.request_id for b in step.bars} == {row.request_id for row in report.plan}
        assert sum(b.num_scheduled for b in step.bars) == report.plan.num_tokens
    assert timeline.detail is not None and timeline.detail.step == reports[-1].step


def test_detail_of_a_step_matches_what_the_model_was_given(model: Any) -> None:
    recorder = StepRecorder()
    batches = []
    config = infer.EngineConfig(
        block_size=16, num_blocks=16, max_num_seqs=4, max_num_batched_tokens=64,
        attention_backend="torch",
    )  # fmt: skip
    state = infer.init(model, config)
    run = state.runtime.run

    def spy(model: Any, kv: Any, rows: Any, plan: Any, batch: Any, *more: Any) -> Any:
        batches.append(batch)
        return run(model, kv, rows, plan, batch, *more)

    state.runtime.run = spy  # type: ignore[method-assign]
    prompts = (tuple(range(40)), tuple(range(100, 131)), (7, 8))
    state = infer.submit(state, [
        infer.Request(request_id=f"q{i}", prompt_token_ids=p,
                      params=infer.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        for i, p in enumerate(prompts)
    ])  # fmt: skip
    while infer.has_work(state):
        state, report = infer.step(model, state)
        recorder.record(report, state)
    assert len(batches) == len(recorder.timeline().steps) > 4
    for step, batch in zip(recorder.timeline().steps, batches, strict=True):
        detail = recorder.timeline(step.step).detail
        assert detail is not None
        positions = [p for row in detail.rows for p in row.positions]
        slots = [s for row in detail.rows for s in row.slot_mapping]
        assert positions == batch.positions[: len(positions)].tolist()
        assert slots == batch.slot_mapping[: len(slots)].tolist()
        assert list(detail.cu_seqlens_q) == batch.cu_seqlens_q[: len(detail.rows) + 1].tolist()
        lens = [row.context_len for row in detail.rows]
        assert lens == batch.context_lens[: len(lens)].tolist()


def test_block_map_counts_every_block(model: Any) -> None:
    _, _, states = watched(PREFIX, model)
    for state in states:
        pool = state.host.pool
        found = block_map(pool, state.host.seqs)
        assert found.used == int(np.count_nonzero(pool.ref_count))
        assert found.shared == int(np.count_nonzero(pool.ref_count > 1))
        assert (found.free, found.cached) == (pool.num_free, pool.num_reusable)
        assert found.free + found.cached + found.used == pool.num_blocks
        coarse = block_map(pool, state.host.seqs, max_cells=5)
        assert len(coarse.cells) <= 5
        assert sum(c.free + c.cached + c.used + c.shared for c in coarse.cells) == pool.num_blocks


def test_no_token_leaves_through_it(model: Any) -> None:
    secret = 987
    lesson = replace(PREFIX, arrivals=(replace(PREFIX.arrivals[0], prompt=(secret,) * 20),))
    recorder, reports, _ = watched(lesson, model)
    for report in reports[-5:]:
        text = recorder.to_json(report.step)
        assert "input_ids" in text  # the field is there, and empty
        values = json.loads(text)
        assert all(row["input_ids"] == [] for row in values["detail"]["rows"])
        assert secret not in leaves(values)  # as text it may be a part of some time


def leaves(value: Any) -> list[Any]:
    """What is in a JSON value, without its names."""
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, list) else [value]


def test_recording_costs_next_to_nothing(model: Any) -> None:
    _, reports, states = watched(PREFIX, model)
    recorder = StepRecorder()
    import timeit

    seconds = min(
        timeit.repeat(lambda: recorder.record(reports[0], states[0]), number=1000, repeat=5)
    )
    assert seconds / 1000 < 20e-6
