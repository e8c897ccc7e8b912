"""Whole engines on a GPU: they wait in one place, compile nothing late, and agree however run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

import infer
from infer import LLM, Model, SamplingParams, load
from infer import rows as row_state
from infer.blocks import Int32
from infer.config import Limits
from infer.graphs import Shape, capture, make_layout, run_step
from infer.initialize import allocate_kv
from infer.llm import advance
from infer.ops.backends import make_ops
from infer.outputs import RequestOutput
from infer.state import Ticket
from infer.types import Request
from tests.model.reference import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(
        "ignore:TensorFloat32"
    ),  # which Inductor recommends; float32 is meant
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
VOCAB = 131
PARAMS = (  # one continuation each: an engine of one row runs them too
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.8, max_tokens=20, seed=1),
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
        {"max_num_seqs": 1},
        {"max_num_seqs": 20, "max_num_batched_tokens": 256, "num_blocks": 400},
        {"max_num_seqs": 500, "max_num_batched_tokens": 500, "num_blocks": 400},
        {"max_num_seqs": 1024, "max_num_batched_tokens": 2048, "num_blocks": 400},
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


@pytest.mark.parametrize(
    "shape",
    [
        *(Shape(size, size, decode=True) for size in (1, 8, 24)),
        Shape(64, 6, decode=False),
    ],
    ids=str,
)
def test_a_replay_gives_the_bits_of_the_same_step_launched(shape: Shape) -> None:
    """The same kernels and shapes: logits of decodes, tokens of a mixed step, and KV."""
    model = tiny("bfloat16")
    limits = engine(model, max_num_seqs=24, num_blocks=80, cuda_graphs=False).state.limits
    inputs = torch.from_numpy(filled_in(shape, limits)).cuda()
    found = []
    with torch.inference_mode():
        for replayed in (False, True):
            ops = make_ops("triton", model.config, model.device)
            kv = allocate_kv(model, limits)
            for i, cache in enumerate((*kv.k, *kv.v)):
                generator = torch.Generator("cuda").manual_seed(i)
                cache.normal_(generator=generator)
            rows = row_state.make(limits, model.config.vocab_size, model.device)
            rows.block_tables[:24, :3] = torch.arange(24 * 3, dtype=torch.int32).view(24, 3).cuda()
            sampling = not shape.decode
            if replayed:
                pool = torch.cuda.graph_pool_handle()
                graph = capture(model, ops, kv, rows, limits, shape, pool, sampling=sampling)
                graph.inputs.copy_(inputs)
                graph.graph.replay()
                out = (graph.results, graph.logits)
            else:
                out = run_step(model, ops, kv, rows, inputs, limits, shape, sampling=sampling)
            pages = [cache[: limits.num_blocks] for cache in (*kv.k, *kv.v)]
            found.append([t.clone() for t in (*out, *pages) if t is not None])
    for launched, replay in zip(*found, strict=True):
        assert torch.equal(launched, replay)


def filled_in(shape: Shape, limits: Limits) -> Int32:
    """A step's packed inputs: row i of three blocks has 20 + i positions before it."""
    layout = make_layout(shape, limits)
    out = layout.template.copy()
    spans = shape.spans()

    def put(name: str, values: Int32) -> None:
        start = spans[name][0]
        out[start : start + values.size] = values

    rows = np.arange(shape.num_seqs, dtype=np.int32)
    lens = np.ones_like(rows) if shape.decode else np.array([1, 1, 30, 1, 20, 11], np.int32)
    cached = 20 + rows if shape.decode else np.array([20, 9, 2, 40, 5, 0], np.int32)
    spans_of = zip(cached, cached + lens, strict=True)
    positions = np.concatenate([np.arange(*span, dtype=np.int32) for span in spans_of])
    owner = np.repeat(rows, lens)
    put("input_ids", (7 * positions + owner) % VOCAB)
    put("positions", positions)
    put("slot_mapping", (3 * owner + positions // 16) * 16 + positions % 16)
    put("seq_rows", rows)
    put("cu_seqlens_q", np.concatenate([[0], np.cumsum(lens)]).astype(np.int32))
    put("context_lens", cached + lens)
    put("logits_rows", np.cumsum(lens, dtype=np.int32) - 1)
    put("sample_logits", rows)
    put("sample_rows", rows)
    put("sample_positions", cached + lens)
    return out
