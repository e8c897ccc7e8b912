"""A host state is a value: what came after it does not change it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from infer import host as hosts
from infer.commit import commit
from infer.host import Host
from infer.schedule import schedule
from tests.host.simulation import Simulation, limits, photograph, request


def _history(depth: int) -> list[tuple[Host, Any]]:
    """Every state of a run with preemption, eviction, forks, aborts, n > 1 and shared prefixes."""
    bounds = limits(block_size=2, num_blocks=14, max_model_len=20, max_num_seqs=5)
    sim = Simulation(bounds, depth)
    kept: list[tuple[Host, Any]] = []

    def keep() -> None:
        kept.append((sim.host, photograph(sim.host)))

    for i in range(24):
        sim.submit(
            request(
                f"r{i}",
                [*range(1, 3 + i % 5), i % 3],
                max_tokens=3 + i % 9,
                n=1 + (i % 7 == 0),
            )
        )
        keep()
        for _ in range(2):
            sim.launch()
            keep()
            while len(sim.tickets) > (depth if sim.plans[-1].num_sequences else 0):
                sim.collect()
                keep()
        if i % 6 == 3:
            sim.abort(f"r{i - 1}")
        if i % 8 == 5 and depth == 0 and (sim.host.seqs.status == 0).any():
            running = [n for n in sim.live() if n in sim.host.seqs.rows_of]
            sim.fork(running[0], f"f{i}")
            keep()
    sim.run()
    assert any(p.preempted for p in sim.plans)
    assert sim.host.prefix.next_id > 14, "blocks were evicted"
    return kept


@pytest.mark.parametrize("depth", [0, 1])
def test_old_states_stay_what_they_were(depth: int) -> None:
    kept = _history(depth)
    assert len(kept) > 100
    for number, (host, taken) in enumerate(kept):
        assert photograph(host) == taken, f"state {number} changed"


def test_a_photograph_notices_a_change() -> None:
    """The comparison above can fail."""
    host, taken = next(
        (host, taken) for host, taken in _history(0) if np.count_nonzero(host.seqs.num_blocks) > 1
    )
    row = int(np.flatnonzero(host.seqs.num_blocks)[0])
    host.seqs.block_table[row][0] += 1
    assert photograph(host) != taken
    host.seqs.block_table[row][0] -= 1
    assert photograph(host) == taken
    host.seqs.token_ids[row][0] += 1
    assert photograph(host) != taken


def test_a_step_that_was_given_up_leaves_no_trace() -> None:
    """A launch that fails on the device: scheduling the same state again gives the same plan."""
    bounds = limits(block_size=2, num_blocks=12, max_model_len=20)
    host = hosts.submit(
        hosts.make(bounds), [request(f"r{i}", [1, 2, 3, i, i], 9) for i in range(6)], bounds
    )
    for _ in range(25):
        first, given_up = schedule(host, bounds)
        commit(given_up, bounds, first, np.zeros(first.sample_rows.size, np.int32))
        second, host = schedule(host, bounds)
        assert photograph(given_up)[:2] == photograph(host)[:2]
        assert list(first) == list(second)
        assert first.copies.tolist() == second.copies.tolist()
        assert first.table_blocks.tolist() == second.table_blocks.tolist()
        tokens = np.full(second.sample_rows.size, 7, np.int32)
        _, host = commit(host, bounds, second, tokens)
        hosts.check(host)
