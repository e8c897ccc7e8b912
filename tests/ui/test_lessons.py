"""The lessons against the tables of the guide they follow, and their way back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dashboard.lessons import Walk, tiny_model
from dashboard.scenarios import BOUNDARY, LESSONS, ONE_REQUEST, PREEMPTION, PREFIX, TWO_REQUESTS


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def run(walk: Walk) -> list[Any]:
    """Step to the end; the frames, the first one included."""
    frames = [walk.frame]
    while not walk.ended:
        walk.forward()
        frames.append(walk.frame)
    return frames


def test_one_request(model: Any) -> None:
    frames = run(Walk.begin(ONE_REQUEST, model))
    steps = [f.step.rows[0] for f in frames[1:]]
    assert [s.positions for s in steps] == [(0, 1, 2), (3,), (4,)]
    assert steps[0].input_ids == (100, 200, 300)
    # known, cached and outputs after each step
    after = [(f.sequences[0].num_known, f.sequences[0].num_cached) for f in frames]
    assert after == [(3, 0), (4, 3), (5, 4), (6, 0)]
    assert [len(f.sequences[0].tokens) for f in frames] == [0, 1, 2, 3]
    # a decode's input is the token before it
    assert [s.input_ids for s in steps[1:]] == [(t,) for t in frames[-1].sequences[0].tokens[:2]]
    assert frames[-1].sequences[0].status == "finished"
    assert [f.blocks.free for f in frames] == [8, 7, 7, 8]


def test_two_requests(model: Any) -> None:
    frames = run(Walk.begin(TWO_REQUESTS, model))
    assert len(frames) == 6  # five steps, not seven
    batches = [[(r.request_id, r.num_scheduled) for r in f.step.rows] for f in frames[1:]]
    assert batches == [
        [("R1", 3), ("R2", 4)],
        [("R1", 1), ("R2", 1)],
        [("R2", 1)],
        [("R2", 1)],
        [("R2", 1)],
    ]
    assert frames[1].step.cu_seqlens_q == (0, 3, 7)
    assert [f.blocks.free for f in frames] == [8, 6, 7, 7, 7, 8]
    assert [s.status for s in frames[2].sequences] == ["finished", "running"]


def test_block_boundary(model: Any) -> None:
    frames = run(Walk.begin(BOUNDARY, model))
    prefill, first, second = (f.step.rows[0] for f in frames[1:])
    (p0,) = prefill.block_table
    assert prefill.slot_mapping == tuple(range(p0 * 256, p0 * 256 + 256))
    assert (frames[1].sequences[0].num_known, frames[1].sequences[0].num_cached) == (257, 256)
    assert frames[1].sequences[0].block_table == (p0,)
    p1 = first.block_table[1]
    assert (first.positions, first.context_len, first.slot_mapping) == ((256,), 257, (p1 * 256,))
    assert (second.positions, second.context_len) == ((257,), 258)
    assert second.slot_mapping == (p1 * 256 + 1,)
    assert frames[3].sequences[0].num_known == 259
    assert frames[3].blocks.used == 0 and frames[3].blocks.cached == 1  # the full one


def test_shared_beginning(model: Any) -> None:
    frames = run(Walk.begin(PREFIX, model))
    one, two = frames[2].step.rows
    assert one.block_table[:2] == two.block_table[:2]
    assert (two.num_cached, two.num_scheduled) == (32, 3)
    assert frames[2].blocks.shared == 2
    assert (frames[-1].blocks.used, frames[-1].blocks.cached) == (0, 2)


def test_preemption_changes_no_token(model: Any) -> None:
    frames = run(Walk.begin(PREEMPTION, model))
    assert frames[4].step.preempted == ("R2",)
    assert frames[4].sequences[1].status == "preempted"
    assert frames[4].sequences[1].num_cached == 0
    alone = Walk.begin(replace(PREEMPTION, arrivals=PREEMPTION.arrivals[1:]), model)
    assert frames[-1].sequences[1].tokens == run(alone)[-1].sequences[0].tokens


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.key)
def test_back_and_forth(model: Any, lesson: Any) -> None:
    walk = Walk.begin(lesson, model)
    frames = run(walk)
    assert len(lesson.notes) == len(frames)  # something is said about every state
    for i in reversed(range(len(frames))):
        walk.go(i)
        assert walk.frame == frames[i]
    walk.go(1)
    while walk.at < len(frames) - 1:  # from a restored state, computed anew
        walk.forward()
        assert walk.frame == frames[walk.at]
    walk.forward()  # at the end, nothing
    assert walk.at == len(frames) - 1
