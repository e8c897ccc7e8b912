"""User mistakes: each a typed error that names value, limit and remedy, and disturbs nothing."""

from __future__ import annotations

import math

import pytest

import infer
from infer import ConfigError, EngineConfig, Request, RequestError, SamplingParams, StateError
from tests.engine.models import Run, engine, greedy, model, prompts, requests


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": math.nan}, ("temperature", "nan", "100")),
        ({"temperature": -1.0}, ("temperature", "-1.0")),
        ({"top_p": 0.0}, ("top_p", "0.0", "at most 1")),
        ({"top_p": 2.0}, ("top_p", "2.0", "at most 1")),
        ({"max_tokens": 0}, ("max_tokens", "0", "at least 1")),
        ({"max_tokens": -1}, ("max_tokens", "-1", "at least 1")),
        ({"stop": tuple("abcdefghijklmnopq")}, ("stop", "17", "16")),
        ({"n": 0}, ("n is 0", "from 1")),
        ({"n": "2"}, ("n is '2'", "a whole number")),
        ({"max_tokens": 2.5}, ("max_tokens", "2.5", "a whole number")),
        ({"seed": 0.5}, ("seed", "0.5", "a whole number")),
        ({"logprobs": 21}, ("logprobs", "21", "20")),
    ],
    ids=str,
)
def test_parameters_out_of_range(options: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)


def test_parameters_that_are_none() -> None:
    with pytest.raises(RequestError, match="it must be SamplingParams"):
        Request(request_id="a", prompt_token_ids=(1,), params={"n": 1})  # type: ignore[arg-type]


def test_an_empty_prompt() -> None:
    with pytest.raises(RequestError, match="empty"):
        Request(request_id="a", prompt_token_ids=())


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        (range(1), SamplingParams(max_tokens=300), ("max_tokens (300)", "256", "lower")),
        ([1] * 256, SamplingParams(), ("256 tokens", "max_model_len is 256", "shorten")),
        ([1, 131], SamplingParams(), ("131", "vocabulary")),
        ([1, -1], SamplingParams(), ("-1", "vocabulary")),
        ([1], SamplingParams(n=9), ("n is 9", "8", "max_num_seqs")),
        ([1], SamplingParams(logit_bias={500: 1.0}), ("500", "logit_bias")),
    ],
    ids=["too long an answer", "too long a prompt", "id", "negative id", "n", "bias"],
)
def test_requests_that_can_never_run(
    prompt: list[int], params: SamplingParams, words: tuple[str, ...]
) -> None:
    state = infer.submit(engine(), requests(prompts(1), greedy(3)))
    bad = Request(request_id="bad", prompt_token_ids=tuple(prompt), params=params)
    with pytest.raises(RequestError) as caught:
        infer.submit(state, bad)
    assert all(word in str(caught.value) for word in words), caught.value
    assert list(Run(state).finish().finishes) == [("r0", 0)]


def test_all_requests_of_a_call_or_none() -> None:
    good, bad = requests(prompts(2), greedy(3))
    state = engine()
    with pytest.raises(RequestError, match="in use"):
        infer.submit(state, [good, bad, good])
    assert not infer.has_work(state)


def test_an_old_state_is_refused() -> None:
    old = infer.submit(engine(), requests(prompts(1), greedy(3)))
    new, _ = infer.step(model(), old)
    for transition in (
        lambda: infer.step(model(), old),
        lambda: infer.submit(old, requests(prompts(1), greedy(3), "s")),
        lambda: infer.abort(old, "r0"),
        lambda: infer.snapshot(old),
    ):
        with pytest.raises(StateError, match="already advanced"):
            transition()
    assert list(Run(new).finish().finishes) == [("r0", 0)]


def test_tickets_are_collected_once_and_in_order() -> None:
    state = infer.submit(engine(), requests(prompts(2), greedy(5)))
    state, first = infer.launch(model(), state)
    state, second = infer.launch(model(), state)
    with pytest.raises(StateError, match="in the order"):
        infer.collect(model(), state, second)
    with pytest.raises(StateError, match="at rest"):
        infer.snapshot(state)
    state, _ = infer.collect(model(), state, first)
    with pytest.raises(StateError, match="in the order"):
        infer.collect(model(), state, first)
    state, _ = infer.collect(model(), state, second)
    Run(state).finish()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 300, "num_blocks": 16, "block_size": 16}, ("300", "256", "num_blocks")),
        ({"max_model_len": 5000}, ("5000", "1024")),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, ("4", "max_num_seqs (8)")),
        ({"block_size": 0}, ("block_size", "0")),
        ({"pipeline_depth": 2}, ("pipeline_depth", "2")),
        ({"attention_backend": "magic"}, ("magic", "torch")),
        ({"attention_backend": "triton"}, ("triton", "torch")),
        ({"gpu_memory_utilization": 1.5}, ("1.5",)),
    ],
    ids=str,
)
def test_options_that_cannot_be(options: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        infer.init(model(), EngineConfig(**options))  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_failed_launch_leaves_the_state_good(monkeypatch: pytest.MonkeyPatch) -> None:
    state = infer.submit(engine(), requests(prompts(3), greedy(4)))
    want = Run(infer.submit(engine(), requests(prompts(3), greedy(4)))).finish().tokens
    state, report = infer.step(model(), state)
    going = Run(state)
    going.take(report)
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("the device is gone")

        patch.setattr("infer.device_step.models.forward", fail)
        with pytest.raises(RuntimeError, match="gone"):
            going.step()
    assert going.finish().tokens == want
