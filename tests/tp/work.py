"""A workload that asks for everything, run through the step API."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import infer
from infer import EngineConfig, Model, Request, SamplingParams
from infer.state import EngineState, Ticket
from infer.types import FinishEvent, FinishReason, PromptLogprobsEvent, TokenEvent

VOCAB = 131
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.2, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.05, "top_k": 40, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 0.9, "logit_bias": {3: 4.0, 130: 6.0, 77: -100.0}, "frequency_penalty": 0.5},
    {"temperature": 0, "logprobs": 4, "prompt_logprobs": 3},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0, "min_tokens": 5, "stop_token_ids": (3, 4, 5, 6, 7, 8, 9)},
)


def requests(count: int, seed: int = 0, high: int = 60) -> list[Request]:
    """Requests of every kind in turn; many prompts begin alike."""
    rng = random.Random(seed)
    head = [rng.randrange(VOCAB) for _ in range(40)]
    made = []
    for i in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, high))]
        prompt = (head[: rng.choice((0, 20, 40))] + own)[:high]
        options = {"max_tokens": rng.randint(2, 14), "ignore_eos": True, "seed": 100 + i}
        params = SamplingParams(**{**options, **KINDS[i % len(KINDS)]})
        made.append(Request(request_id=f"r{i}", prompt_token_ids=tuple(prompt), params=params))
    return made


def config(**options: Any) -> EngineConfig:
    """A small engine."""
    defaults: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 8,
        "num_blocks": 128,
    }
    return EngineConfig(**{**defaults, **options})


@dataclass
class Told:
    """Everything an engine said, by request and choice."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finishes: dict[tuple[str, int], FinishEvent] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)

    def hear(self, event: Any) -> None:
        """Write one event down."""
        match event:
            case TokenEvent():
                self.tokens.setdefault((event.request_id, event.index), []).append(event.token_id)
                chosen = [event.logprob] if event.logprob is not None else []
                self.note(*chosen, *event.top_logprobs)
            case FinishEvent():
                self.finishes[event.request_id, event.index] = event
            case PromptLogprobsEvent():
                for own, top in event.logprobs:
                    self.note(own, *top)

    def note(self, *entries: Any) -> None:
        """Write log-probabilities down."""
        self.logprobs += [entry.logprob for entry in entries]
        self.top_ids += [entry.token_id for entry in entries]

    @property
    def reasons(self) -> set[FinishReason]:
        """Why requests ended."""
        return {finish.reason for finish in self.finishes.values()}


def run(
    model: Model,
    wanted: list[Request],
    options: EngineConfig,
    *,
    ahead: int = 0,
    aborts: dict[int, str] | None = None,
    forks: dict[int, tuple[str, str]] | None = None,
) -> tuple[EngineState, Told]:
    """Submit in three lots, step to the end; abort and fork at the given steps."""
    state, told = infer.init(model, options), Told()
    tickets: deque[Ticket] = deque()
    third = -(-len(wanted) // 3)
    lots = {0: wanted[:third], 3: wanted[third : 2 * third], 6: wanted[2 * third :]}
    while infer.has_work(state) or lots:
        number = state.host.step
        state = infer.submit(state, lots.pop(number, []))
        if aborts and number in aborts:
            state = infer.abort(state, aborts[number])
        if forks and number in forks and not tickets:
            state = infer.fork(state, *forks[number])
        state, ticket = infer.launch(model, state)
        tickets.append(ticket)
        keep = ahead if ticket.plan.num_sequences else 0
        while len(tickets) > keep:
            state, report = infer.collect(model, state, tickets.popleft())
            for event in report.events:
                told.hear(event)
    return state, told
