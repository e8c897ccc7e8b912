"""Random histories of the whole engine, checked after every step and against a naive generator."""

from __future__ import annotations

import dataclasses
import secrets
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import infer
from infer import EngineConfig, Model, Request, SamplingParams, device_step
from infer.errors import RequestError, StateError
from infer.host import check, mixed_seed
from infer.types import FinishEvent, FinishReason, Logprob, PromptLogprobsEvent, TokenEvent
from tests.engine.models import VOCAB
from tests.engine.models import model as plain_model
from tests.reliability.naive import Job, compare, ending, raw_logits

EOS = (3, 77)
BYTES = tuple(bytes([97 + i % 26]) for i in range(VOCAB))
QUICK = settings(
    max_examples=24,
    stateful_step_count=30,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),  # shrinking takes minutes; add Phase.shrink to study a finding
    report_multiple_bugs=False,
)
LONG = settings(QUICK, max_examples=400, stateful_step_count=50)


@cache
def model() -> Model:
    """The tiny model, with ends of sequence and bytes for stop strings."""
    ours = plain_model()
    defaults = dataclasses.replace(ours.defaults, eos_token_ids=EOS)
    words: Any = SimpleNamespace(token_bytes=BYTES)  # all that a step asks of a tokenizer
    return dataclasses.replace(ours, defaults=defaults, tokenizer=words)


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 0, 1, 5, 40, 1000]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3, 0.01]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
        "presence_penalty": st.sampled_from([0.0, 0.5, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -0.5]),
        "logit_bias": st.sampled_from([{5: 3.0, 9: -100.0}, {3: 2.5}, {0: 100.0}, {}]),
        "seed": st.sampled_from([0, 7, 2**62]),
        "n": st.sampled_from([1, 1, 2, 3]),
        "stop": st.sampled_from([("ab",), ("q", "xyz"), ("aa", "bb", "cc")]),
        "stop_token_ids": st.sampled_from([(5, 40, 60), (3,), tuple(range(0, VOCAB, 9))]),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([0, 1, 3]),
        "prompt_logprobs": st.sampled_from([0, 2]),
    },
)


class Injected(Exception):
    """What a step meets when a test wants it to."""


class Machine(RuleBasedStateMachine):
    """Everything an engine loop, a script or a fault could do to an engine, in any order."""

    counts: Counts | None = None

    @initialize(
        block_size=st.sampled_from([1, 3, 4, 16]),
        seqs=st.integers(1, 6),
        spare=st.sampled_from([0, 1, 5, 40]),
        length=st.integers(12, 48),
        pool=st.sampled_from([1.0, 1.3, 2.0, 5.0]),
        caching=st.sampled_from([True, True, False]),
        depth=st.integers(0, 1),
        seed=st.sampled_from([0, 9]),
    )
    def start(
        self,
        block_size: int,
        seqs: int,
        spare: int,
        length: int,
        pool: float,
        caching: bool,
        depth: int,
        seed: int,
    ) -> None:
        self.config = EngineConfig(
            block_size=block_size,
            num_blocks=int(pool * -(-length // block_size)),
            max_model_len=length,
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + spare,
            prefix_caching=caching,
            pipeline_depth=depth,
            seed=seed,
        )
        self.state = infer.init(model(), self.config)
        self.depth, self.length, self.block_size = depth, length, block_size
        self.tickets: list[Any] = []
        self.jobs: dict[tuple[str, int], Job] = {}
        self.arrivals = 0
        self.tokens: dict[tuple[str, int], list[TokenEvent]] = {}
        self.ends: dict[tuple[str, int], FinishEvent] = {}
        self.prompts: dict[str, PromptLogprobsEvent] = {}
        self.aborted: set[str] = set()
        self.poisoned: set[tuple[str, int]] = set()
        self.ties = 0

    # --- requests ---

    @rule(data=st.data(), many=st.lists(PARAMS, min_size=1, max_size=4))
    def submit(self, data: st.DataObject, many: list[dict[str, Any]]) -> None:
        """Several requests at once. Lengths lie around block boundaries."""
        made = [self.made(data, options, self.arrivals + i) for i, options in enumerate(many)]
        self.state = infer.submit(self.state, made)
        for request in made:
            seed = request.params.seed
            if seed is None:
                seed = mixed_seed(self.config.seed, self.arrivals)
            for choice in range(request.params.n):
                job = Job(request.prompt_token_ids, request.params, seed, choice)
                self.jobs[request.request_id, choice] = job
            self.arrivals += 1

    def made(self, data: st.DataObject, options: dict[str, Any], number: int) -> Request:
        """A request whose prompt is the beginning of one of three texts, or nearly."""
        blocks = data.draw(st.integers(0, self.length // self.block_size))
        length = blocks * self.block_size + data.draw(st.sampled_from([-1, 0, 1, 2]))
        length = min(max(1, length), self.length - 1)
        text = data.draw(st.sampled_from([(11, 12, 13, 14, 15), (11, 12, 99), (50,)]))
        prompt = (*(text * length)[: length - 1], data.draw(st.sampled_from([11, 12, 50])))
        room = self.length - length
        limit = data.draw(st.none() | st.integers(1, min(room, 14)))
        least = data.draw(st.sampled_from([0, 0, 0, 2, 4]))
        options = {
            **options,
            "max_tokens": limit,
            "min_tokens": min(least, limit or room),
            "n": min(options.get("n", 1), self.config.max_num_seqs or 1),
        }
        return Request(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            params=SamplingParams(**options),
            priority=data.draw(st.sampled_from([0, 0, 0, 1, -1])),
            cache_salt=data.draw(st.sampled_from([None, None, None, "a"])),
        )

    @rule(over=st.integers(1, 5))
    def submit_too_much(self, over: int) -> None:
        params = SamplingParams(max_tokens=self.length - 1 + over)
        with pytest.raises(RequestError, match="max_model_len"):
            infer.submit(
                self.state, Request(request_id="never", prompt_token_ids=(1,), params=params)
            )

    @rule(pick=st.integers(0, 1000), really=st.booleans())
    def abort(self, pick: int, really: bool) -> None:
        if not really:
            return
        names = sorted({name for name, _ in self.jobs})
        if names:
            name = names[pick % len(names)]
            self.state = infer.abort(self.state, name)
            self.aborted.add(name)

    @rule(pick=st.integers(0, 1000))
    def fork(self, pick: int) -> None:
        seqs = self.state.host.seqs
        names = sorted(seqs.rows_of)
        if not names:
            return
        name, new = names[pick % len(names)], f"r{self.arrivals}"
        row = seqs.rows_of[name][0]
        source = self.jobs[name, int(seqs.choice[row])]
        known = (*source.begun, *self.said(name, int(seqs.choice[row])))
        try:
            self.state = infer.fork(self.state, name, new)
        except (RequestError, StateError):
            return
        params = dataclasses.replace(source.params, n=1)
        seed = mixed_seed(source.seed, self.arrivals)
        self.jobs[new, 0] = Job(source.prompt, params, seed, 0, known)
        self.arrivals += 1

    # --- steps ---

    @precondition(lambda self: len(self.tickets) <= self.depth)
    @rule()
    def launch(self) -> None:
        self.state, ticket = infer.launch(model(), self.state)
        self.tickets.append(ticket)
        if not ticket.plan.num_sequences:
            self.rest()

    @precondition(lambda self: self.tickets)
    @rule()
    def collect(self) -> None:
        self.state, report = infer.collect(model(), self.state, self.tickets.pop(0))
        for event in report.events:
            self.take(event)

    @rule(count=st.integers(1, 10))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if infer.has_work(self.state):
                self.launch()
                while len(self.tickets) > self.depth:
                    self.collect()
                check(self.state.host)

    @precondition(lambda self: len(self.tickets) <= self.depth)
    @rule(computed=st.booleans())
    def a_launch_fails(self, computed: bool) -> None:
        """Before anything was computed, or after the forward pass: the state stays good."""
        runtime = self.state.runtime
        compute = runtime.compute

        def failing(*arguments: Any) -> Any:
            if computed:
                step_forward(*arguments)
            raise Injected

        def step_forward(ours: Model, kv: Any, rows: Any, batch: Any, wants: Any) -> None:
            device_step.forward(ours, runtime.ops, kv, rows, batch)

        runtime.compute = failing  # type: ignore[method-assign]
        try:
            before = self.state
            self.launch()
            assert self.state is not before  # nothing to compute: it was not even reached
        except Injected:
            assert self.state is before
        finally:
            runtime.compute = compute  # type: ignore[method-assign]

    @rule(pick=st.integers(0, 1000), really=st.booleans())
    def logits_turn_nan(self, pick: int, really: bool) -> None:
        """One logits row of the next step: those who sample from it fail, nobody else."""
        if not really or len(self.tickets) > self.depth:
            return
        runtime = self.state.runtime
        chosen: list[int] = []

        def poison(scores: torch.Tensor) -> None:
            chosen.append(pick % scores.shape[0])
            scores[chosen[0]] = torch.nan

        runtime.on_logits = poison
        try:
            self.state, ticket = infer.launch(model(), self.state)
        finally:
            runtime.on_logits = None
        self.tickets.append(ticket)
        plan, seqs = ticket.plan, self.state.host.seqs
        for i in np.flatnonzero(plan.sample_seqs == chosen[0]).tolist() if chosen else ():
            row = int(plan.sample_rows[i])
            self.poisoned.add((seqs.request[row].request_id, int(seqs.choice[row])))
        if not plan.num_sequences:
            self.rest()

    @rule(kv=st.booleans())
    def snapshot_and_restore(self, kv: bool) -> None:
        """The engine goes on as another one; what it left behind is never touched again."""
        self.rest()
        snap = infer.snapshot(self.state, kv=kv)
        self.state = infer.restore(model(), snap)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "state"):
            check(self.state.host)

    # --- what it said ---

    def rest(self) -> None:
        while self.tickets:
            self.collect()

    def said(self, name: str, choice: int) -> list[int]:
        return [event.token_id for event in self.tokens.get((name, choice), [])]

    def take(self, event: object) -> None:
        match event:
            case TokenEvent(name, index):
                assert (name, index) not in self.ends, "a token after the end"
                self.tokens.setdefault((name, index), []).append(event)
            case FinishEvent(name, index):
                assert (name, index) not in self.ends, "two ends"
                self.ends[name, index] = event
            case PromptLogprobsEvent(name):
                assert name not in self.prompts
                self.prompts[name] = event

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        for _ in range(5000):
            if not infer.has_work(self.state):
                break
            self.launch()
            while len(self.tickets) > self.depth:
                self.collect()
        self.rest()
        assert not infer.has_work(self.state), "the engine does not come to an end"
        check(self.state.host)
        assert (self.state.host.pool.ref_count == 0).all(), "blocks are still held"
        assert self.ends.keys() == self.jobs.keys(), "requests were lost"
        for (name, choice), job in self.jobs.items():
            self.judge(name, choice, job)
        note(self)

    def judge(self, name: str, choice: int, job: Job) -> None:
        """One sequence, token for token, and its end."""
        got, end = self.said(name, choice), self.ends[name, choice]
        self.ties += compare(job, got, EOS)
        known = [*job.begun, *got]
        reason = ending(job, known, EOS, self.length, BYTES)
        if end.reason is FinishReason.ABORT:
            assert name in self.aborted
            assert reason is None
        elif end.reason is FinishReason.ERROR:
            assert (name, choice) in self.poisoned
            assert "not numbers" in (end.error or "")
            assert reason is None
        else:
            assert end.reason is reason, job
        assert end.num_prompt_tokens == len(job.prompt)
        assert end.num_generated_tokens == len(known)
        assert end.num_cached_tokens % self.block_size == 0
        self.judge_logprobs(name, choice, job)

    def judge_logprobs(self, name: str, choice: int, job: Job) -> None:
        events = self.tokens.get((name, choice), [])
        known = [*job.prompt, *job.begun, *self.said(name, choice)]
        wanted = job.params.logprobs
        if wanted is not None and events:
            raw = raw_logits(known).log_softmax(-1)
            first = len(job.prompt) + len(job.begun)
            for at, event in enumerate(events, first):
                assert event.logprob is not None
                near(raw[at - 1], event.logprob, event.top_logprobs, event.token_id, wanted)
        prompt = self.prompts.get(name)
        if prompt is not None and choice == 0 and not job.begun:
            wanted = job.params.prompt_logprobs
            assert wanted is not None
            assert len(prompt.logprobs) == len(job.prompt) - 1
            raw = raw_logits(job.prompt).log_softmax(-1)
            for at, (own, top) in enumerate(prompt.logprobs):
                near(raw[at], own, top, job.prompt[at + 1], wanted)


def near(raw: torch.Tensor, own: Logprob, top: tuple[Logprob, ...], token: int, count: int) -> None:
    assert own.token_id == token
    assert own.logprob == pytest.approx(float(raw[token]), abs=1e-3)
    assert len(top) == count
    assert [t.logprob for t in top] == pytest.approx(raw.topk(count).values.tolist(), abs=1e-3)


class Counts:
    """What all histories of a run came to."""

    def __init__(self) -> None:
        self.sequences = self.tokens = self.ties = self.preemptions = self.hits = 0
        self.reasons: dict[str, int] = {}

    def add(self, machine: Machine) -> None:
        self.sequences += len(machine.jobs)
        self.tokens += sum(map(len, machine.tokens.values()))
        self.ties += machine.ties
        for end in machine.ends.values():
            self.preemptions += end.num_preemptions
            self.hits += end.num_cached_tokens
            self.reasons[end.reason] = self.reasons.get(end.reason, 0) + 1


def note(machine: Machine) -> None:
    if machine.counts is not None:
        machine.counts.add(machine)


def run(profile: settings, counts: Counts, number: int) -> None:
    """Run histories and add them to ``counts``; ``number`` is their seed."""

    class Counted(Machine):
        pass

    Counted.counts = counts
    run_state_machine_as_test(seed(number)(Counted), settings=profile)
    print(f"seed {number}:", vars(counts))
    assert counts.ties <= counts.tokens // 1000


def met_all(counts: Counts) -> bool:
    """Whether there was something of all kinds; a run that met none of them would show nothing."""
    ends = counts.reasons.keys() >= {"stop", "length", "abort"}
    return ends and counts.preemptions > 0 and counts.hits > 0


def test_a_snapshot_in_the_middle_of_a_prompt_keeps_its_log_probabilities() -> None:
    """Found by the histories below: the part that was computed before was lost."""
    config = EngineConfig(
        block_size=4, num_blocks=16, max_model_len=40, max_num_seqs=1, max_num_batched_tokens=4
    )
    prompt = tuple(range(20, 45))
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    state = infer.init(model(), config)
    state = infer.submit(state, Request(request_id="a", prompt_token_ids=prompt, params=params))
    state, _ = infer.step(model(), state)
    raw = raw_logits(prompt).log_softmax(-1)
    for kv in (True, False):
        going = infer.restore(model(), infer.snapshot(state, kv=kv))
        found = []
        while infer.has_work(going):
            going, report = infer.step(model(), going)
            found += [e for e in report.events if isinstance(e, PromptLogprobsEvent)]
        (event,) = found
        assert len(event.logprobs) == len(prompt) - 1
        for at, (own, top) in enumerate(event.logprobs):
            near(raw[at], own, top, prompt[at + 1], 0)


def test_a_fork_in_the_middle_of_a_prompt_has_its_log_probabilities() -> None:
    """Found by the histories below: the fork told the second half only."""
    config = EngineConfig(
        block_size=4, num_blocks=32, max_model_len=40, max_num_seqs=2, max_num_batched_tokens=4
    )
    prompt = tuple(range(20, 45))
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    state = infer.init(model(), config)
    state = infer.submit(state, Request(request_id="a", prompt_token_ids=prompt, params=params))
    state, _ = infer.step(model(), state)
    state = infer.fork(state, "a", "b")
    found = {}
    while infer.has_work(state):
        state, report = infer.step(model(), state)
        found |= {e.request_id: e for e in report.events if isinstance(e, PromptLogprobsEvent)}
    assert found.keys() == {"a", "b"}
    raw = raw_logits(prompt).log_softmax(-1)
    for event in found.values():
        assert len(event.logprobs) == len(prompt) - 1
        for at, (own, top) in enumerate(event.logprobs):
            near(raw[at], own, top, prompt[at + 1], 0)


def test_random_histories() -> None:
    """Some histories, and more of them until they have met everything.

    What they draw depends on constants in whatever modules are loaded.
    """
    counts = Counts()
    for number in range(8):
        run(QUICK, counts, number)
        if met_all(counts):
            return
    pytest.fail(f"eight rounds of histories never met some kind of event: {vars(counts)}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_histories() -> None:
    counts = Counts()
    run(LONG, counts, secrets.randbits(32))
    assert counts.sequences > LONG.max_examples
    assert met_all(counts)
    assert "error" in counts.reasons  # logits that are not numbers
