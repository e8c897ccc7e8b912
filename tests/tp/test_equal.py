"""What the ranks generate together is what one process generates alone, token for token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infer
from infer import LLM, Model, SamplingParams, host
from infer.parallel import TP
from infer.types import FinishReason
from tests.server.tiny import write_tiny
from tests.tp.conftest import CPU
from tests.tp.models import tiny
from tests.tp.work import Told, config, requests, run

Models = Callable[[str, TP | None], Model]
Ranks = Callable[[int], TP]

SPLITS = [
    pytest.param("qwen3", 2, id="qwen3-split"),
    pytest.param("smollm2", 2, id="smollm2-padded"),
    pytest.param("qwen3", 4, id="qwen3-replicated"),
    pytest.param("llama", 4, id="llama-split", marks=pytest.mark.slow),
    pytest.param("llama", 2, id="llama-split-in-two", marks=pytest.mark.slow),
    pytest.param("smollm2", 4, id="smollm2-padded-in-four", marks=pytest.mark.slow),
    pytest.param("qwen2", 4, id="qwen2-replicated", marks=pytest.mark.slow),
]


def same(ours: Told, theirs: Told) -> None:
    assert ours.tokens == theirs.tokens
    assert ours.finishes == theirs.finishes
    assert ours.top_ids == theirs.top_ids
    assert ours.logprobs  # the workload asks for some
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("case", "size"), SPLITS)
def test_every_kind_of_request(model: Models, ranks: Ranks, case: str, size: int) -> None:
    wanted = requests(20)
    _, alone = run(model(case, None), wanted, config())
    state, together = run(model(case, ranks(size)), wanted, config())
    same(together, alone)
    host.check(state.host)


@pytest.mark.parametrize(
    ("size", "ahead", "options"),
    [
        (2, 0, {"max_num_batched_tokens": 8}),  # chunks
        (2, 1, {}),
        (2, 0, {"num_blocks": 17}),  # preempts
        pytest.param(4, 1, {"num_blocks": 17}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_however_it_is_cut(
    model: Models, ranks: Ranks, size: int, ahead: int, options: dict[str, Any]
) -> None:
    wanted = requests(14, seed=1)
    more: dict[str, Any] = {"aborts": {5: "r0", 7: "r6", 9: "r13"}, "ahead": ahead}
    _, alone = run(model("qwen3", None), wanted, config(**options), **more)
    _, together = run(model("qwen3", ranks(size)), wanted, config(**options), **more)
    same(together, alone)
    assert FinishReason.ABORT in together.reasons
    if "num_blocks" in options:
        assert sum(f.num_preemptions for f in together.finishes.values()) > 0
    assert sum(f.num_cached_tokens for f in together.finishes.values()) > 0


def test_forks(model: Models, ranks: Ranks) -> None:
    wanted = [r for r in requests(10, seed=2) if r.params.n == 1]
    forks = {4: (wanted[0].request_id, "twin")}
    _, alone = run(model("qwen3", None), wanted, config(), forks=forks)
    _, together = run(model("qwen3", ranks(2)), wanted, config(), forks=forks)
    same(together, alone)
    assert ("twin", 0) in together.tokens


def test_offline_generation_as_transformers_does_it(model: Models, ranks: Ranks) -> None:
    reference = tiny("smollm2")
    prompts = [r.prompt_token_ids for r in requests(4, seed=3)]
    llm = LLM(model("smollm2", ranks(2)), num_blocks=64, block_size=8)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=20)
    outputs = llm.generate(prompts, params, progress=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            expected = reference(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert expected.argmax(-1).tolist() == list(completion.token_ids)
        assert completion.logprobs is not None
        for row, (_, top) in zip(expected, completion.logprobs, strict=True):
            values = [entry.logprob for entry in top]
            np.testing.assert_allclose(row[[e.token_id for e in top]], values, atol=1e-4, rtol=0)
    again = llm.generate(prompts, params, progress=False)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]
    assert all(o.num_cached_tokens > 0 for o in again if len(o.prompt_token_ids) > 8)


def test_stop_strings_end_requests_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks need the tokenizer's bytes to see a stop string where the first rank sees it."""
    folder = write_tiny(tmp_path / "tiny")
    options: dict[str, Any] = {**CPU, "load_format": "random"}
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=60, stop=("a", "e ", "T", "0"))
    texts = []
    for tp in (None, ranks(2)):
        llm = LLM(infer.load(folder, tp=tp or TP(), **options), num_blocks=64, block_size=8)
        # A second round: had a rank gone on with an ended request, it would plan another step.
        outputs = [llm.generate(["one", "two two"], params, progress=False) for _ in range(2)]
        texts.append([o.outputs[0].text for round_ in outputs for o in round_])
        assert {o.outputs[0].finish_reason for o in outputs[0]} == {FinishReason.STOP}
    assert texts[0] == texts[1]


def test_refusals_leave_the_ranks_as_they_were(
    model: Models, ranks: Ranks, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    shared = model("qwen3", ranks(2))
    with pytest.raises(infer.ConfigError, match="max_model_len is 5000"):
        infer.init(shared, config(max_model_len=5000))
    broken = shutil.copytree(checkpoint("qwen3"), tmp_path / "broken")
    written = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**written, "intermediate_size": 151}))
    with pytest.raises(infer.CheckpointError, match="mlp"):
        infer.load(broken, tp=ranks(2), device="cpu", dtype="float32", progress=False)
    state = infer.init(shared, config())
    too_long = infer.Request(request_id="long", prompt_token_ids=(1,) * 200)
    with pytest.raises(infer.RequestError):
        infer.submit(state, too_long)
    _, alone = run(model("qwen3", None), requests(10), config())
    _, together = run(shared, requests(10), config())
    same(together, alone)
    with pytest.raises(infer.StateError, match="other ranks follow"):
        infer.snapshot(state)


def test_a_state_that_was_dropped_was_never_heard_of(model: Models, ranks: Ranks) -> None:
    """A submit makes a new state; going on from the old one, ranks must not know the request."""
    shared = model("qwen3", ranks(2))
    (first, second, *_) = requests(10)
    state = infer.init(shared, config())
    infer.submit(state, first)
    state = infer.submit(state, second)
    told = Told()
    while infer.has_work(state):
        state, report = infer.step(shared, state)
        for event in report.events:
            told.hear(event)
    assert {name for name, _ in told.tokens} == {second.request_id}
