"""``LLM``: what scripts call."""

from __future__ import annotations

import asyncio

import pytest

import infer
from infer import LLM, ConfigError, RequestError, SamplingParams
from tests.engine.models import expected, greedy, model, prompts

OPTIONS = {"max_model_len": 256, "max_num_seqs": 4, "num_blocks": 64, "block_size": 16}


@pytest.fixture
def llm() -> LLM:
    return LLM(model(), **OPTIONS)


def test_generate_one_or_many(llm: LLM) -> None:
    many = prompts(5, seed=2)
    outputs = llm.generate([list(p) for p in many], greedy(6), progress=False)
    assert [list(o.token_ids) for o in outputs] == [expected(p, 6) for p in many]
    assert [o.prompt_token_ids for o in outputs] == many
    (one,) = llm.generate(list(many[0]), greedy(6), progress=False)
    assert one.token_ids == outputs[0].token_ids
    assert one.text is None  # no tokenizer
    assert one.finish_reason == "length"


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    two = [list(p) for p in prompts(2, seed=5)]
    outputs = llm.generate(two, [greedy(2), greedy(5)], progress=False)
    assert [len(o.token_ids) for o in outputs] == [2, 5]
    with pytest.raises(RequestError, match="3 sampling parameters for 2 prompts"):
        llm.generate(two, [greedy(2)] * 3, progress=False)


def test_mappings_in_the_place_of_prompts_or_parameters(llm: LLM) -> None:
    with pytest.raises(RequestError, match="messages are for chat"):
        llm.generate([{"role": "user", "content": "Hi."}])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="it must be SamplingParams"):
        llm.generate([1, 2, 3], {"max_tokens": 2})  # type: ignore[arg-type]


def test_metrics_are_in_order(llm: LLM) -> None:
    (output,) = llm.generate(list(prompts(1)[0]), greedy(6), progress=False)
    m = output.metrics
    assert m.scheduled is not None and m.first_token is not None and m.last_token is not None
    assert m.arrival <= m.scheduled <= m.first_token <= m.last_token <= m.finished
    assert m.num_generated_tokens == 6
    assert m.ttft_s is not None and m.ttft_s > 0
    assert m.tpot_s is not None and m.tpot_s > 0


def test_a_request_is_finished_when_it_ends_and_not_when_all_have(llm: LLM) -> None:
    two = [list(p) for p in prompts(2, seed=5)]
    short, long = (o.metrics for o in llm.generate(two, [greedy(2), greedy(40)], progress=False))
    assert short.last_token is not None and long.last_token is not None
    assert short.last_token <= short.finished < long.last_token <= long.finished


def test_the_bar_counts_requests(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([list(p) for p in prompts(3)], greedy(4))
    assert "3/3" in capsys.readouterr().err
    llm.generate([[1, 2]], greedy(4), progress=False)
    assert capsys.readouterr().err == ""


def test_n_choices_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=4, logprobs=2)
    (output,) = llm.generate([5, 6, 7], params, progress=False)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    for completion in output.outputs:
        assert completion.logprobs is not None
        assert [own.token_id for own, _ in completion.logprobs] == list(completion.token_ids)


def test_stream_and_its_early_end(llm: LLM) -> None:
    prompt = list(prompts(1, seed=3)[0])
    whole = [d.token_id for d in llm.stream(prompt, greedy(8)) if d.token_id is not None]
    assert whole == expected(tuple(prompt), 8)
    stream = llm.stream(prompt, greedy(8))
    next(stream)
    stream.close()
    assert not infer.has_work(llm.state)
    assert (llm.state.host.pool.ref_count == 0).all()


def test_async_twins(llm: LLM) -> None:
    prompt = list(prompts(1, seed=6)[0])

    async def both() -> tuple[list[int], list[int]]:
        (output,) = await llm.agenerate([prompt], greedy(5))
        streamed = [d.token_id async for d in llm.astream(prompt, greedy(5))]
        return list(output.token_ids), [t for t in streamed if t is not None]

    generated, streamed = asyncio.run(both())
    assert generated == streamed == expected(tuple(prompt), 5)


def test_an_interrupt_leaves_a_usable_state(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    many = [list(p) for p in prompts(4, seed=8)]
    calls = 0

    def interrupting(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGINT)  # in the middle of a step
        return launch(*args, **kwargs)

    launch = infer.engine.launch
    with monkeypatch.context() as patch:
        patch.setattr("infer.engine.launch", interrupting)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(many, greedy(20), progress=False)
    assert not infer.has_work(llm.state)
    outputs = llm.generate(many, greedy(4), progress=False)
    assert [list(o.token_ids) for o in outputs] == [expected(tuple(p), 4) for p in many]


def test_options_and_texts_that_cannot_be(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'max_seqs'.*max_num_seqs"):
        LLM(model(), max_seqs=3)
    with pytest.raises(ConfigError, match="dtype"):
        LLM(model(), dtype="float32")
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("hello", progress=False)
