"""Steps of sequences that all decode take a shorter way, and give the very same values."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from infer import host as hosts
from infer import hostbatch
from infer.commit import Accepted
from infer.config import Limits
from infer.host import Host
from infer.hostbatch import build
from infer.plan import Plan
from tests.host import histories, simulation
from tests.host.simulation import EOS, Simulation, limits, photograph, request


def _value(part: Any) -> Any:
    if isinstance(part, np.ndarray):
        values = part.tolist()
        if part.dtype == np.object_:  # requests by identity, block tables by length and content
            values = [v.tolist() if isinstance(v, np.ndarray) else id(v) for v in values]
        return part.dtype, part.shape, values
    if isinstance(part, tuple):
        return tuple(_value(item) for item in part)
    return part


def _said(value: Plan | Accepted | hostbatch.HostBatch) -> dict[str, Any]:
    """Every field of a value but the memo."""
    return {
        f.name: _value(getattr(value, f.name))
        for f in fields(value)
        if f.name not in ("cohort", "tables")
    }


class Twice:
    """Every transition of a simulation twice: as it is, and without the memo. Counts the memo's."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_steps = self.num_short = 0
        self._schedule, self._commit = simulation.scheduling.schedule, simulation.commit
        self._build = simulation.build
        patch.setattr(simulation.scheduling, "schedule", self.schedule)
        patch.setattr(simulation, "commit", self.commit)
        patch.setattr(simulation, "build", self.build)

    def schedule(self, host: Host, bounds: Limits) -> tuple[Plan, Host]:
        long_plan, long_host = self._schedule(replace(host, cohort=None), bounds)
        plan, after = self._schedule(host, bounds)
        assert _said(plan) == _said(long_plan)
        assert list(plan) == list(long_plan)
        assert photograph(after) == photograph(long_host)
        self.num_steps += 1
        self.num_short += plan.cohort is not None and plan.cohort is host.cohort
        return plan, after

    def build(self, plan: Plan, seqs: Any) -> hostbatch.HostBatch:
        batch = self._build(plan, seqs)
        assert _said(batch) == _said(self._build(replace(plan, cohort=None), seqs))
        return batch

    def commit(
        self, host: Host, bounds: Limits, plan: Plan, tokens: Any, **options: Any
    ) -> tuple[Accepted, Host]:
        long_way = replace(plan, cohort=None)
        expected, long_host = self._commit(host, bounds, long_way, tokens, **options)
        accepted, after = self._commit(host, bounds, plan, tokens, **options)
        assert _said(accepted) == _said(expected)
        assert photograph(after) == photograph(long_host)
        return accepted, after


def test_histories_are_the_same_without_the_memo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preemption, eviction, forks, aborts, n > 1, priorities, both depths."""
    twice = Twice(monkeypatch)
    for seed in range(25):
        histories.play(seed, invariants=False)
    assert twice.num_short > 20, "the short way was taken"
    assert twice.num_steps - twice.num_short > 50


@pytest.mark.parametrize("depth", [0, 1])
def test_long_decodes_are_the_same_without_the_memo(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends of every kind in the middle of long decodes: length, eos, stop token, stop string."""
    twice = Twice(monkeypatch)
    sim = Simulation(limits(max_model_len=200, num_blocks=200), depth)
    for i in range(12):
        ends: dict[str, Any] = [
            {},
            {"ignore_eos": False},
            {"stop_token_ids": (5,)},
            {"stop": ("ab",)},
        ][i % 4]
        sim.submit(request(f"r{i}", [i, 1, 2], max_tokens=40 + 9 * i, **ends))
        for _ in range(7 * (i % 3)):
            sim.turn()
    sim.run()
    assert twice.num_short > twice.num_steps / 4


def _decoding(depth: int, num_seqs: int = 2, **options: Any) -> Simulation:
    """A simulation whose sequences all decode, in a cohort."""
    sim = Simulation(limits(max_model_len=200, num_blocks=100, **options), depth)
    sim.submit(*(request(f"r{i}", [1, 2, i], max_tokens=100) for i in range(num_seqs)))
    for _ in range(6):
        sim.turn()
    assert sim.host.cohort is not None and sim.host.cohort.holds(sim.host.seqs)
    return sim


@pytest.mark.parametrize("depth", [0, 1])
def test_a_cohort_lasts_until_something_changes(depth: int) -> None:
    sim = _decoding(depth)
    cohort = sim.host.cohort
    for _ in range(20):  # several new blocks for each
        assert sim.turn().cohort is cohort
    sim.submit(request("late", [4, 4], max_tokens=8))
    plans = [sim.turn() for _ in range(4)]
    assert [p.num_sequences for p in plans] == [3] * 4, "a free row is given at once"
    assert plans[-1].cohort is not None and plans[-1].cohort is not cohort
    sim.abort("r0")
    assert sim.turn().num_sequences == 2
    sim.run()


def test_a_full_engine_keeps_its_cohort_while_others_wait() -> None:
    sim = _decoding(1, num_seqs=4)  # as many as there are rows
    cohort = sim.host.cohort
    sim.submit(request("late", [4, 4]))
    assert all(sim.turn().cohort is cohort for _ in range(10))
    sim.abort("r1")
    assert sim.turn().admitted == ("late",)
    sim.run()


def test_a_state_without_blocks_left_is_decided_by_all_the_rules() -> None:
    """The pool runs dry in the middle of a cohort: collect first, then preempt."""
    sim = Simulation(limits(max_model_len=40, num_blocks=10, max_num_seqs=2), depth=1)
    sim.submit(*(request(f"r{i}", [1, 2, i], max_tokens=36) for i in range(2)))
    sim.run()
    assert any(plan.stalled for plan in sim.plans)
    assert any(plan.preempted for plan in sim.plans)


def test_two_launches_between_collects_register_every_block() -> None:
    """Whoever uses the step API may launch and collect in any rhythm."""
    sim = _decoding(0, num_seqs=1)
    for _ in range(12):
        sim.launch()
        sim.launch()
        sim.collect()
        sim.collect()
    row = sim.host.seqs.rows_of["r0"][0]
    assert sim.host.seqs.num_registered[row] == sim.host.seqs.num_cached_tokens[row] // 4
    sim.run()


def test_tokens_that_are_not_numbers_end_a_row_of_a_cohort() -> None:
    sim = _decoding(0)
    plan, host = simulation.scheduling.schedule(sim.host, sim.limits)
    assert plan.cohort is sim.host.cohort
    accepted, host = simulation.commit(
        host, sim.limits, plan, np.array([3, 3], np.int32), failed=np.array([False, True])
    )
    assert accepted.tokens.tolist() == [3] and accepted.finished[0].request_id == "r1"
    hosts.check(host)


def test_an_end_token_is_seen_in_a_cohort() -> None:
    sim = Simulation(limits(max_model_len=200, num_blocks=100))
    sim.submit(
        request("a", [1, 2], max_tokens=90, min_tokens=8, ignore_eos=False),
        request("b", (1, 3), max_tokens=90),
    )
    host = sim.host
    for step in range(12):
        plan, host = simulation.scheduling.schedule(host, sim.limits)
        build(plan, host.seqs)
        tokens = np.full(plan.sample_rows.size, EOS[0], np.int32)
        accepted, host = simulation.commit(host, sim.limits, plan, tokens)
        ended = [event.request_id for event in accepted.finished]
        assert ended == (["a"] if step == 8 else []), "b ignores them, a has a minimum"
