"""How sequences end, and what log-probabilities say, through the whole engine."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import infer
from infer import SamplingParams
from infer.types import FinishReason, PromptLogprobsEvent, TokenEvent
from tests.engine.models import Run, engine, expected, greedy, model, prompts, reference, requests

PROMPT = prompts(1, seed=4)[0]
TOKENS = expected(PROMPT, 12)


def finish(params: SamplingParams, ahead: int = 0) -> Run:
    return Run(infer.submit(engine(), requests([PROMPT], params))).finish(ahead=ahead)


def first_at(token: int) -> int:
    return TOKENS.index(token)


@pytest.mark.parametrize("ahead", [0, 1])
def test_stop_token_ids(ahead: int) -> None:
    stop = TOKENS[5]
    done = finish(greedy(stop_token_ids=(stop,)), ahead)
    assert done.tokens["r0", 0] == TOKENS[: first_at(stop) + 1]
    assert done.finishes["r0", 0].reason is FinishReason.STOP
    assert done.finishes["r0", 0].stop == stop


@pytest.mark.parametrize("ahead", [0, 1])
def test_min_tokens_bans_stops_until_then(ahead: int) -> None:
    stop = TOKENS[0]
    done = finish(greedy(stop_token_ids=(stop,), min_tokens=6), ahead)
    assert stop not in done.tokens["r0", 0][:6]


def test_every_eos_of_the_model_ends() -> None:
    eos = (TOKENS[4], TOKENS[7])
    defaults = dataclasses.replace(model().defaults, eos_token_ids=eos)
    ours = dataclasses.replace(model(), defaults=defaults)
    state = infer.init(ours, infer.EngineConfig(max_model_len=256, num_blocks=64, block_size=16))
    params = SamplingParams(temperature=0, max_tokens=12)
    state = infer.submit(state, requests([PROMPT], params))
    tokens = []
    while infer.has_work(state):
        state, report = infer.step(ours, state)
        tokens += [e.token_id for e in report.events if isinstance(e, TokenEvent)]
    assert tokens == TOKENS[: min(map(first_at, eos)) + 1]


def test_max_tokens_and_context_end_with_length() -> None:
    done = finish(greedy(max_tokens=3))
    assert done.tokens["r0", 0] == TOKENS[:3]
    assert done.finishes["r0", 0].reason is FinishReason.LENGTH
    open_end = SamplingParams(temperature=0, ignore_eos=True)
    done = finish(open_end)
    assert len(done.tokens["r0", 0]) == 256 - len(PROMPT)


def test_logprobs_are_the_raw_ones_of_transformers() -> None:
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=5, logprobs=3, prompt_logprobs=2)
    state = infer.submit(engine(max_num_batched_tokens=16), requests([PROMPT], params))
    events = []
    while infer.has_work(state):
        state, report = infer.step(model(), state)
        events += report.events
    tokens = [e for e in events if isinstance(e, TokenEvent)]
    (prompt,) = [e for e in events if isinstance(e, PromptLogprobsEvent)]
    ids = torch.tensor([[*PROMPT, *(e.token_id for e in tokens)]])
    with torch.no_grad():
        raw = reference()(ids).logits[0].log_softmax(-1)
    assert len(prompt.logprobs) == len(PROMPT) - 1
    for position, (own, top) in enumerate(prompt.logprobs):
        _check(raw[position], own, top, int(ids[0, position + 1]), 2)
    for i, event in enumerate(tokens):
        assert event.logprob is not None
        at = len(PROMPT) - 1 + i
        _check(raw[at], event.logprob, event.top_logprobs, event.token_id, 3)


def _check(raw: torch.Tensor, own: object, top: object, token: int, count: int) -> None:
    assert own.token_id == token  # type: ignore[attr-defined]
    assert own.logprob == pytest.approx(float(raw[token]), abs=1e-4)  # type: ignore[attr-defined]
    assert own.rank == int((raw > raw[token]).sum()) + 1  # type: ignore[attr-defined]
    best = raw.topk(count)
    assert [t.token_id for t in top] == best.indices.tolist()  # type: ignore[attr-defined]
    assert [t.logprob for t in top] == pytest.approx(best.values.tolist(), abs=1e-4)  # type: ignore[attr-defined]
