"""A tiny random model for engine tests, beside transformers' own of the same weights."""

from __future__ import annotations

import random
from functools import cache

import torch
from transformers import PreTrainedModel

import infer
from infer import EngineConfig, Model, Request, SamplingParams
from infer.state import EngineState, Ticket
from infer.types import FinishEvent, TokenEvent
from tests.model.reference import tiny_model

VOCAB = 131


@cache
def reference() -> PreTrainedModel:
    """transformers' model."""
    return tiny_model("qwen3")


@cache
def model() -> Model:
    """Ours, with the same tensors, in float32 on the CPU."""
    hf = reference()
    return infer.load(
        state_dict=hf.state_dict(), config=hf.config.to_dict(), dtype="float32", device="cpu"
    )


def engine(**options: object) -> EngineState:
    """A small engine; every option can be overridden."""
    defaults: dict[str, object] = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "num_blocks": 64,
    }
    return infer.init(model(), EngineConfig(**{**defaults, **options}))  # type: ignore[arg-type]


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 90) -> list[tuple[int, ...]]:
    """Random prompts; the first tokens of some are shared."""
    rng = random.Random(seed)
    head = [rng.randrange(VOCAB) for _ in range(40)]
    out = []
    for i in range(count):
        length = rng.randint(low, high)
        own = [rng.randrange(VOCAB) for _ in range(length)]
        out.append(tuple((head + own)[:length] if i % 2 else own))
    return out


def greedy(max_tokens: int = 12, **options: object) -> SamplingParams:
    """Greedy parameters that ignore the end of sequence."""
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        **options,  # type: ignore[arg-type]
    )


def requests(
    many: list[tuple[int, ...]], params: SamplingParams, prefix: str = "r"
) -> list[Request]:
    """One request a prompt."""
    return [
        Request(request_id=f"{prefix}{i}", prompt_token_ids=p, params=params)
        for i, p in enumerate(many)
    ]


def expected(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """Greedy tokens by transformers' generate."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = reference().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(t) for t in out[0, len(prompt) :]]


class Run:
    """Drives a state and keeps what it said."""

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finishes: dict[tuple[str, int], FinishEvent] = {}
        self.plans: list[object] = []
        self._tickets: tuple[Ticket, ...] = ()

    def take(self, report: object) -> None:
        """Remember a report's events."""
        self.plans.append(report.plan)  # type: ignore[attr-defined]
        for event in report.events:  # type: ignore[attr-defined]
            if isinstance(event, TokenEvent):
                self.tokens.setdefault((event.request_id, event.index), []).append(event.token_id)
            elif isinstance(event, FinishEvent):
                assert (event.request_id, event.index) not in self.finishes
                self.finishes[event.request_id, event.index] = event

    def step(self) -> None:
        """One step at depth 0."""
        self.state, report = infer.step(model(), self.state)
        self.take(report)

    def finish(self, *, ahead: int = 0, limit: int = 2000) -> Run:
        """Step to the end, launching ``ahead`` steps before each collect."""
        tickets: list[Ticket] = []
        for _ in range(limit):
            if not infer.has_work(self.state):
                break
            self.state, ticket = infer.launch(model(), self.state)
            tickets.append(ticket)
            keep = ahead if ticket.plan.num_sequences else 0
            while len(tickets) > keep:
                self.state, report = infer.collect(model(), self.state, tickets.pop(0))
                self.take(report)
        assert not infer.has_work(self.state), "the engine does not come to an end"
        return self


def run(
    many: list[tuple[int, ...]], params: SamplingParams, *, ahead: int = 0, **options: object
) -> dict[tuple[str, int], list[int]]:
    """Tokens of every request and choice."""
    state = infer.submit(engine(**options), requests(many, params))
    return Run(state).finish(ahead=ahead).tokens
