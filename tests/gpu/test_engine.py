"""Whole engines on a GPU: they wait in one place, compile nothing late, and agree however run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from infer import LLM, Model, SamplingParams, load
from infer.llm import advance
from infer.outputs import RequestOutput
from infer.state import Ticket
from infer.types import Request
from tests.model.reference import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
VOCAB = 131
PARAMS = (
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.8, max_tokens=20, seed=1, n=2),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, max_tokens=9, seed=2),
    SamplingParams(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, seed=3),
    SamplingParams(temperature=0, logit_bias={5: 4.0, 7: -3.0}, min_tokens=6, max_tokens=16),
    SamplingParams(temperature=0.5, logprobs=3, prompt_logprobs=2, max_tokens=5, seed=4),
    SamplingParams(temperature=0, stop_token_ids=(3, 4, 5, 6), max_tokens=30, ignore_eos=True),
)


def tiny(dtype: str) -> Model:
    hf = tiny_model("qwen3", heads=(4, 2), head_dim=64)
    config = hf.config.to_dict()
    return load(state_dict=hf.state_dict(), config=config, dtype=dtype, device="cuda")


def engine(model: Model, **options: object) -> LLM:
    """An engine so small that it preempts and cuts prompts into chunks."""
    defaults: dict[str, object] = {
        "max_model_len": 160,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "num_blocks": 16,
    }
    return LLM(model, **{**defaults, **options})


def requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            request_id=f"{seed}-{i}",
            prompt_token_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.randint(2, 100))),
            params=replace(PARAMS[i % len(PARAMS)], max_tokens=rng.randint(7, 30)),
        )
        for i in range(21)
    ]


def generate(llm: LLM, seed: int) -> list[RequestOutput]:
    many = requests(seed)
    return llm.generate(
        [r.prompt_token_ids for r in many], [r.params for r in many], progress=False
    )


@contextmanager
def no_hidden_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_waits_for_its_event_alone(graphs: bool) -> None:
    llm = engine(tiny("bfloat16"), cuda_graphs=graphs)
    generate(llm, 0)  # whatever is loaded lazily
    with no_hidden_waits():
        outputs = generate(llm, 1)
    assert all(choice.token_ids for output in outputs for choice in output.outputs)


def test_nothing_is_compiled_after_the_start() -> None:
    llm = engine(tiny("bfloat16"))
    late: list[tuple[int, int]] = []
    preempted = 0
    tickets: tuple[Ticket, ...] = ()
    import infer

    llm.state = infer.submit(llm.state, requests(2))
    while infer.has_work(llm.state):
        llm.state, tickets, reports = advance(llm.model, llm.state, tickets)
        late += [(r.plan.num_tokens, r.stats.num_recompiles) for r in reports]
        preempted += sum(r.stats.num_preempted for r in reports)
    assert preempted, "the load was to be hard enough"
    assert [what for what in late if what[1]] == []


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_depth": 0},
        {"pipeline_depth": 1, "cuda_graphs": False},
        {"attention_backend": "torch", "compile": False},
        {"attention_backend": "torch", "compile": True},
        {"num_blocks": 400},
        {"max_num_seqs": 24, "max_num_batched_tokens": 256, "num_blocks": 400},
    ],
    ids=str,
)
def test_equal_in_float32_however_it_runs(options: dict[str, object]) -> None:
    model = tiny("float32")
    plain = generate(engine(model), 3)
    other = generate(engine(model, **options), 3)
    for one, two in zip(plain, other, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in two.outputs]
        assert [c.finish_reason for c in one.outputs] == [c.finish_reason for c in two.outputs]


def test_bit_equal_in_bfloat16_with_graphs_and_without() -> None:
    model = tiny("bfloat16")
    many = requests(4)
    params = [replace(r.params, logprobs=4) for r in many]
    runs = []
    for graphs in (True, False):
        llm = engine(model, cuda_graphs=graphs, num_blocks=400, max_num_seqs=24)
        # Alike in shape: one step of prompts, then decodes of one batch size.
        prompts = [r.prompt_token_ids[:10] for r in many][:4]
        runs.append(llm.generate(prompts, params[:4], progress=False))
    for one, two in zip(*runs, strict=True):
        for a, b in zip(one.outputs, two.outputs, strict=True):
            assert a.token_ids == b.token_ids
            assert a.logprobs == b.logprobs
