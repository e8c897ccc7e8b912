"""Random histories of a tiny engine, checked after every transition and against a reference."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from infer.errors import RequestError, StateError
from infer.types import Request, SamplingParams
from tests.host.histories import play
from tests.host.simulation import EOS, Simulation, limits, photograph

FAST = settings(
    max_examples=70,
    stateful_step_count=80,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),  # shrinking takes minutes; add Phase.shrink to study a finding
    report_multiple_bugs=False,
)
LONG = settings(FAST, max_examples=3000, derandomize=False)


class Machine(RuleBasedStateMachine):
    """Submit, abort, fork, launch and collect in any order an engine loop could."""

    invariants = True

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(6, 24),
        length=st.integers(6, 40),
        seqs=st.integers(1, 5),
        spare=st.integers(0, 12),
        caching=st.sampled_from([True, True, True, False]),
        depth=st.integers(0, 1),
        span=st.sampled_from([2, 512]),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        length: int,
        seqs: int,
        spare: int,
        caching: bool,
        depth: int,
        span: int,
    ) -> None:
        self.limits = limits(
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=min(length, num_blocks * block_size),
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + spare,
            prefix_caching=caching,
            priority_span=span,
        )
        self.sim = Simulation(self.limits, depth, invariants=self.invariants)
        self.count = 0
        self.photographs: list[tuple[Any, Any]] = []

    def new_id(self) -> str:
        self.count += 1
        return f"r{self.count}"

    @rule(
        data=st.data(),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.sampled_from([None, 7]),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (3, 40, 60), EOS]),
        stop=st.sampled_from([(), ("ab", "c"), ("gh",)]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from([None, None, "a", "b"]),
    )
    def submit(
        self,
        data: st.DataObject,
        n: int,
        temperature: float,
        seed: int | None,
        ignore_eos: bool,
        stop_token_ids: tuple[int, ...],
        stop: tuple[str, ...],
        priority: int,
        salt: str | None,
    ) -> None:
        """Prompts are prefixes of three texts, so that many of them share blocks."""
        room = self.limits.max_model_len
        length = data.draw(st.integers(1, room - 1), label="prompt length")
        text = data.draw(st.sampled_from([(1, 2, 3), (1, 2, 2), (5,)]), label="text")
        prompt = (*(text * room)[: length - 1], data.draw(st.sampled_from([1, 2, 5])))
        max_tokens = data.draw(st.none() | st.integers(1, room - length), label="max_tokens")
        min_tokens = 0 if stop else data.draw(st.sampled_from([0, 0, 2]), label="min_tokens")
        min_tokens = min(min_tokens, max_tokens or room - length)
        params = SamplingParams(
            n=min(n, self.limits.max_num_seqs),
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
            stop=stop,
        )
        self.sim.submit(
            Request(
                request_id=self.new_id(),
                prompt_token_ids=prompt,
                params=params,
                priority=priority,
                cache_salt=salt,
            )
        )

    @rule(length=st.integers(0, 3), more=st.integers(1, 5))
    def remember(self, length: int, more: int) -> None:
        """Keep this state to look at it again at the end.

        A request that could never run is refused and leaves no trace.
        """
        before = photograph(self.sim.host)
        self.photographs.append((self.sim.host, before))
        room = self.limits.max_model_len
        params = SamplingParams(max_tokens=length + more)
        with pytest.raises(RequestError, match="max_model_len"):
            self.sim.submit(
                Request(
                    request_id=self.new_id(),
                    prompt_token_ids=(1,) * (room - length),
                    params=params,
                )
            )
        assert photograph(self.sim.host) == before

    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        """Any request ever seen: waiting, running, finished."""
        if self.count:
            self.sim.abort(f"r{1 + pick % self.count}")

    @rule(pick=st.integers(0, 1000))
    def fork(self, pick: int) -> None:
        live = self.sim.live()
        if live:
            try:
                self.sim.fork(live[pick % len(live)], self.new_id())
            except (RequestError, StateError):
                return

    @precondition(lambda self: len(self.sim.tickets) <= self.sim.depth)
    @rule()
    def launch(self) -> None:
        self.sim.launch()

    @precondition(lambda self: self.sim.tickets)
    @rule()
    def collect(self) -> None:
        self.sim.collect()

    @rule(turns=st.integers(1, 5))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.sim.turn()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            while self.sim.tickets:
                self.sim.collect()
            self.sim.run()
            for host, taken in self.photographs:
                assert photograph(host) == taken, "an old state changed"


def run(machine: type[Machine], profile: settings) -> None:
    run_state_machine_as_test(machine, settings=profile)


def test_random_histories() -> None:
    run(Machine, FAST)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_histories() -> None:
    run(Machine, LONG)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_dense_histories() -> None:
    for seed in range(3000):
        play(seed)
