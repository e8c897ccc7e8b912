"""Time the kernels on a GPU: a whole decode step and each of its parts, and prefill attention.

    python -m tests.bench.kernels [--batches 1,8,32] [--contexts 192,2048] [--json FILE]

The model has the shapes of Qwen3-0.6B and random weights, every layer its own, so that the L2 never
holds what a step reads. A step is one CUDA Graph from the embedded tokens to the sampled ones; the
parts are graphs of the same kernel over all layers. Times are medians of replays, in microseconds.
The floor counts weights and KV once at the datasheet's 4.8 TB/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from infer.batch import AttentionMeta
from infer.ops import (
    LayerShape,
    triton_plan,
    triton_prefill,
    triton_step,
)
from infer.ops.sampling import SamplingRows
from infer.ops.triton_common import dependent_launch
from infer.ops.triton_head import finish_step, score_head
from infer.weights import LayerWeights, Weights

BYTES_PER_US = 4.8e6
HIDDEN, INNER, VOCAB, LAYERS = 1024, 3072, 151_936, 28
SHAPE = LayerShape(num_heads=16, num_kv_heads=8, head_dim=128, eps=1e-6, sliding_window=None)


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement."""

    name: str
    batch: int
    context: int
    us: float
    floor_us: float


@dataclass(frozen=True, slots=True)
class Case:
    """One batch of equal contexts, ready to run."""

    weights: Weights
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    buffers: triton_step.DecodeBuffers
    step: triton_step.DecodeInputs
    seq_rows: Tensor
    context_lens: Tensor
    params: SamplingRows
    last_token: Tensor


def make_weights(device: torch.device, layers: int = LAYERS) -> Weights:
    """Random weights of Qwen3-0.6B's shapes in bfloat16."""
    torch.manual_seed(0)
    make = lambda *s: torch.randn(s, device=device, dtype=torch.bfloat16) * s[-1] ** -0.5  # noqa: E731
    ones = lambda n: torch.ones(n, device=device, dtype=torch.bfloat16)  # noqa: E731
    dim = SHAPE.head_dim
    stack = tuple(
        LayerWeights(
            input_norm=ones(HIDDEN), qkv=make(4096, HIDDEN), qkv_bias=None, q_norm=ones(dim),
            k_norm=ones(dim), o=make(HIDDEN, 2048), o_bias=None, post_norm=ones(HIDDEN),
            gate_up=make(2 * INNER, HIDDEN), gate_up_bias=None, down=make(HIDDEN, INNER),
            down_bias=None,
        )
        for _ in range(layers)
    )  # fmt: skip
    embed = make(VOCAB, HIDDEN)
    return Weights(embed=embed, layers=stack, norm=ones(HIDDEN), lm_head=embed)


def make_case(
    weights: Weights,
    batch: int,
    context: int,
    block_size: int,
    config: triton_plan.DecodeConfig | None = None,
    *,
    pdl: bool = True,
) -> Case:
    """A batch whose sequences lie in shuffled blocks."""
    device = weights.norm.device
    per_seq = -(-context // block_size)
    shape = (batch * per_seq + 1, block_size, SHAPE.num_kv_heads, SHAPE.head_dim)
    make = lambda: torch.randn(shape, device=device, dtype=torch.bfloat16)  # noqa: E731
    k = tuple(make() for _ in weights.layers)
    v = tuple(make() for _ in weights.layers)
    blocks = torch.randperm(batch * per_seq, device=device).to(torch.int32).view(batch, per_seq)
    context_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    rows = torch.arange(batch, dtype=torch.int32, device=device)
    config = config or triton_step.step_config(batch, k[0], SHAPE)
    plan = plan_for(rows, context_lens, config)
    position = context - 1
    step = triton_step.DecodeInputs(
        plan=plan, block_tables=blocks, cos_sin=torch.randn(context, SHAPE.head_dim, device=device),
        slot_mapping=blocks[:, position // block_size] * block_size + position % block_size,
        shape=SHAPE, pdl=pdl and dependent_launch(device),
    )  # fmt: skip
    hidden = torch.randn(batch, HIDDEN, device=device, dtype=torch.bfloat16)
    words = torch.zeros(batch, dtype=torch.int32, device=device)
    params = SamplingRows(
        temperature=torch.full((batch,), 0.6, device=device), top_k=words, top_p=words.float() + 1,
        min_p=words.float(), seed=torch.zeros(batch, 2, dtype=torch.int32, device=device),
        choice=words,
    )  # fmt: skip
    buffers = triton_step.decode_buffers(hidden, weights.layers[0], SHAPE)
    return Case(weights, k, v, buffers, step, rows, context_lens, params, words.clone())


def plan_for(
    rows: Tensor, context_lens: Tensor, config: triton_plan.DecodeConfig
) -> triton_plan.DecodePlan:
    """Divide the attention of these sequences."""
    return triton_plan.plan_decode(
        rows, context_lens, config=config, num_heads=SHAPE.num_heads,
        num_kv_heads=SHAPE.num_kv_heads, head_dim=SHAPE.head_dim,
    )  # fmt: skip


def run_step(case: Case, start: Tensor) -> None:
    """Everything from embedded tokens to sampled tokens."""
    plan_for(case.seq_rows, case.context_lens, case.step.plan.config)
    case.buffers.hidden.copy_(start)
    triton_step.decode_layers(case.weights, case.k, case.v, case.buffers, case.step)
    sample(case)


def sample(case: Case) -> None:
    """LM head and sampling."""
    scored = score_head(
        case.buffers.normed, case.weights.lm_head, case.seq_rows, case.context_lens, case.params,
        pdl=case.step.pdl,
    )  # fmt: skip
    finish_step(scored, case.seq_rows, case.last_token, pdl=case.step.pdl)


def parts(case: Case) -> dict[str, tuple[Callable[[], None], float]]:
    """Attention and the head over all layers, and the bytes they must read."""
    w, b, step = case.weights, case.buffers, case.step
    kv_bytes = 2 * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * int(case.context_lens.sum())

    def attention() -> None:
        for layer, k, v in zip(w.layers, case.k, case.v, strict=True):
            triton_step.attend(layer, k, v, b, step)

    return {
        "attention": (attention, LAYERS * kv_bytes),
        "head": (lambda: sample(case), 2.0 * w.lm_head.numel()),
    }


def time_graph(function: Callable[[], None], replays: int = 30) -> float:
    """Median time of a replay of ``function``'s graph, microseconds."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    graph.reset()
    return statistics.median(times)


def measure_decode(
    weights: Weights, batch: int, context: int, block_size: int, with_parts: bool
) -> list[Timing]:
    """Time one batch's step, and its parts."""
    case = make_case(weights, batch, context, block_size)
    matrices = [x for w in weights.layers for x in (w.qkv, w.o, w.gate_up, w.down)]
    weight_bytes = sum(2.0 * t.numel() for t in (weights.lm_head, *matrices))
    kv_bytes = LAYERS * 4.0 * SHAPE.num_kv_heads * SHAPE.head_dim * batch * context
    start = case.buffers.hidden.clone()
    us = time_graph(lambda: run_step(case, start))
    found = [Timing("step", batch, context, us, (weight_bytes + kv_bytes) / BYTES_PER_US)]
    if with_parts:
        for name, (function, read) in parts(case).items():
            found.append(Timing(name, batch, context, time_graph(function), read / BYTES_PER_US))
    return found


def measure_prefill(count: int, length: int, block_size: int, device: torch.device) -> Timing:
    """Time attention of ``count`` prompts; its floor is arithmetic at 790 TFLOP/s."""
    tokens, per_seq = count * length, -(-length // block_size)
    make = lambda *s: torch.randn(s, device=device, dtype=torch.bfloat16)  # noqa: E731
    q = make(tokens, SHAPE.num_heads, SHAPE.head_dim)
    out = torch.empty_like(q)
    cache_shape = (count * per_seq + 1, block_size, SHAPE.num_kv_heads, SHAPE.head_dim)
    k, v = make(*cache_shape), make(*cache_shape)
    ints = lambda t: t.to(device=device, dtype=torch.int32)  # noqa: E731
    tables = ints(torch.randperm(count * per_seq)).view(count, per_seq)
    rows, starts = ints(torch.arange(count)), ints(torch.arange(count + 1) * length)
    lens = ints(torch.full((count,), length))
    meta = AttentionMeta(
        positions=ints(torch.arange(length)).repeat(count), slot_mapping=starts, seq_rows=rows,
        cu_seqlens_q=starts, context_lens=lens, block_tables=tables, max_seqlen_q=length,
        max_seqlen_k=length, decode=False,
    )  # fmt: skip
    plan = triton_prefill.plan_prefill(meta, k, SHAPE)
    us = time_graph(
        lambda: triton_prefill.prefill_attention(out, q, k, v, tables, plan, scale=SHAPE.scale)
    )
    flops = 4.0 * SHAPE.num_heads * SHAPE.head_dim * count * length * (length + 1) / 2
    return Timing("prefill attention", count, length, us, flops / 790e6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--contexts", type=numbers, default=[192])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--no-parts", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    weights = make_weights(device)
    found = []
    for context in args.contexts:
        for batch in args.batches:
            if batch * context > 600_000:
                continue
            found += measure_decode(weights, batch, context, args.block_size, not args.no_parts)
    for count, length in ((1, 128), (8, 2048), (1, 16384)):
        found.append(measure_prefill(count, length, args.block_size, device))
    for t in found:
        share = f"{100 * t.floor_us / t.us:5.1f} % of the floor" if t.floor_us else ""
        print(f"{t.name:18s} batch {t.batch:4d} context {t.context:6d} {t.us:10.1f} us  {share}")
    if args.json:
        args.json.write_text(json.dumps([asdict(t) for t in found], indent=1))


if __name__ == "__main__":
    main()
