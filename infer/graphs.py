"""CUDA Graphs over whole steps: embedding to sampled token in one launch.

A graph is captured for a *shape*: T tokens and S sequences, decode (T = S, one position each) or
mixed. A step runs in the smallest shape that holds it, padded: spare tokens write to the spare
block, spare sequences are empty (mixed) or read the spare row (decode), and spare sampling rows
write their token to the spare row. Nothing else differs from an eager step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infer import device_step as step
from infer.batch import AttentionMeta, Batch
from infer.blocks import Int32
from infer.config import Limits
from infer.device_step import Extras
from infer.hostbatch import HostBatch
from infer.kv import KVCache
from infer.model import Model
from infer.ops import Ops
from infer.ops.sampling import SampleFlags
from infer.plan import Plan
from infer.rows import RowState, introduce, spare_place
from infer.staging import aligned

MIXED_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
FULL = 15 / 16  # of the token budget: a step this full is as well padded to all of it
FEW_SEQS = 8  # mixed steps of few sequences have graphs of their own: the LM head is most of them
TOKEN_FIELDS = ("input_ids", "src_rows", "positions", "slot_mapping")
CHANGE_FIELDS = ("places", "words")  # of rows and block tables; see infer.rows
FIELDS = (
    *TOKEN_FIELDS,
    "seq_rows",
    "cu_seqlens_q",
    "context_lens",
    "logits_rows",
    "sample_logits",
    "sample_rows",
    "sample_positions",
    *CHANGE_FIELDS,
)
COUNTING_FIELDS = ("cu_seqlens_q", "logits_rows", "sample_logits")  # constant in a decode graph


# The hungriest sampler, of memory and of kernels.
TRUNCATING = Extras(SampleFlags(top_k=True, top_p=True, min_p=True))


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What one graph holds."""

    num_tokens: int
    num_seqs: int
    decode: bool

    @property
    def num_changes(self) -> int:
        """How many words of rows and block tables can change before its step.

        In a mixed step every sequence can start (eight words) and get blocks of 16 positions.
        """
        return self.num_seqs if self.decode else 9 * self.num_seqs + self.num_tokens // 16

    def spans(self) -> dict[str, tuple[int, int]]:
        """Start and size of each field in the packed inputs.

        Starts are aligned: kernels are compiled for aligned pointers and for others apart.
        """
        spans, at = {}, 0
        for name in FIELDS:
            size = self.num_tokens if name in TOKEN_FIELDS else self.num_seqs
            size = self.num_changes if name in CHANGE_FIELDS else size
            size += name == "cu_seqlens_q"
            spans[name] = (at, size)
            at += aligned(size)
        return spans


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each input lies in a graph's packed buffer, and the buffer of a step of padding."""

    shape: Shape
    starts: Mapping[str, int]  # of the fields that change from step to step
    template: Int32

    def pack(self, batch: HostBatch, changes: Mapping[str, Int32], out: Int32) -> None:
        """Write a step's inputs, padded, into ``out`` (i32[template.size])."""
        out[:] = self.template
        for name, start in self.starts.items():
            if name in CHANGE_FIELDS:
                continue
            value = getattr(batch, name)
            out[start : start + value.size] = value
        if "cu_seqlens_q" in self.starts:
            start = self.starts["cu_seqlens_q"] + batch.num_seqs
            out[start : start + self.shape.num_seqs + 1 - batch.num_seqs] = batch.num_tokens
        for name, value in changes.items():
            start = self.starts[name]
            out[start : start + value.size] = value


def make_layout(shape: Shape, limits: Limits) -> Layout:
    """The layout of ``shape``, padded with the spare row and the spare block."""
    padding = {
        "src_rows": -1,
        "slot_mapping": limits.num_blocks * limits.block_size,
        "seq_rows": limits.max_num_seqs,
        "context_lens": 1 if shape.decode else 0,
        "sample_rows": limits.max_num_seqs,
        "places": spare_place(limits),
        "words": limits.num_blocks,
    }
    spans = shape.spans()
    template = np.zeros(sum(aligned(size) for _, size in spans.values()), np.int32)
    starts = {}
    for name, (start, size) in spans.items():
        if shape.decode and name in COUNTING_FIELDS:
            # Every sequence, a padded one too, has one position and is sampled.
            template[start : start + size] = np.arange(size, dtype=np.int32)
        else:
            template[start : start + size] = padding.get(name, 0)
            starts[name] = start
    return Layout(shape, starts, template)


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step. ``inputs`` is written before a replay, the outputs are read after it."""

    layout: Layout
    inputs: Tensor  # i32[template.size]
    graph: torch.cuda.CUDAGraph
    batch: Batch  # views of ``inputs``
    results: Tensor | None  # i32[2, S], tokens and NaN marks; None when it ends at the logits
    logits: Tensor | None  # f32[S, vocab_size]

    @property
    def shape(self) -> Shape:
        """What it holds."""
        return self.layout.shape


def decode_shapes(max_num_seqs: int) -> list[Shape]:
    """Row buckets that cover every batch up to ``max_num_seqs``, the largest exactly that."""
    sizes = {1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64}
    sizes |= set(range(80, 129, 16)) | set(range(160, 513, 32)) | set(range(576, 4097, 64))
    chosen = sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})
    return [Shape(size, size, decode=True) for size in chosen]


def mixed_shapes(max_num_seqs: int, max_num_tokens: int) -> list[Shape]:
    """Token buckets for prompts and mixed steps, for few and for all sequences.

    Beyond ``MIXED_TOKENS`` padding costs the device more than launches cost the host, so there is
    only the full step, which long prompts fill exactly.
    """
    counts = sorted({min(FEW_SEQS, max_num_seqs), max_num_seqs})
    sizes = sorted({size for size in MIXED_TOKENS if size < max_num_tokens} | {max_num_tokens})
    return [
        Shape(tokens, seqs, decode=False) for tokens in sizes for seqs in counts if seqs <= tokens
    ]


def smallest(shapes: Sequence[Shape], num_tokens: int, num_seqs: int) -> Shape | None:
    """The first shape (they are sorted) that holds a step; None if none does, or only too large."""
    for shape in shapes:
        if shape.num_tokens >= num_tokens and shape.num_seqs >= num_seqs:
            full = shape.num_tokens <= MIXED_TOKENS[-1] or num_tokens >= FULL * shape.num_tokens
            return shape if shape.decode or full else None
    return None


def views(
    inputs: Tensor, shape: Shape, block_tables: Tensor, max_seqlen_k: int
) -> tuple[Batch, dict[str, Tensor]]:
    """The packed inputs as a batch, and the changes of rows and block tables beside it."""
    parts = {name: inputs[at : at + size] for name, (at, size) in shape.spans().items()}
    meta = AttentionMeta(
        positions=parts["positions"],
        slot_mapping=parts["slot_mapping"],
        seq_rows=parts["seq_rows"],
        cu_seqlens_q=parts["cu_seqlens_q"],
        context_lens=parts["context_lens"],
        block_tables=block_tables,
        max_seqlen_q=1 if shape.decode else shape.num_tokens,
        max_seqlen_k=max_seqlen_k,
        decode=shape.decode,
    )
    none = inputs[:0]
    batch = Batch(
        input_ids=parts["input_ids"],
        src_rows=parts["src_rows"],
        attention=meta,
        logits_rows=parts["logits_rows"],
        sample_logits=parts["sample_logits"],
        sample_rows=parts["sample_rows"],
        sample_positions=parts["sample_positions"],
        prompt_rows=none,
        prompt_targets=none,
    )
    return batch, {name: parts[name] for name in CHANGE_FIELDS}


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Captures collect garbage; with everything frozen that costs nothing."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_step(
    model: Model,
    ops: Ops,
    kv: KVCache,
    rows: RowState,
    inputs: Tensor,
    limits: Limits,
    shape: Shape,
    *,
    sampling: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The step that a graph of ``shape`` holds: its results, or without ``sampling`` its logits."""
    batch, changed = views(inputs, shape, rows.block_tables, limits.max_model_len)
    if shape.decode:
        return step.decode(model, ops, kv, rows, batch, changed, sampling=sampling)
    introduce(rows, changed)
    hidden, _ = step.forward(model, ops, kv, rows, batch)
    scores = step.logits(model, ops, hidden, batch.logits_rows)
    return step.results(step.pick(model, scores, rows, batch, step.PLAIN)[0]), None


def capture(
    model: Model,
    ops: Ops,
    kv: KVCache,
    rows: RowState,
    limits: Limits,
    shape: Shape,
    pool: object,
    *,
    sampling: bool,
) -> Graph:
    """Run a padded step of ``shape`` once, so that every kernel is compiled, and capture it.

    Without ``sampling`` the graph ends at the logits, for steps whose sampling needs more than
    temperature.
    """
    device = rows.last_token.device
    layout = make_layout(shape, limits)
    inputs = torch.from_numpy(layout.template).to(device)

    def body() -> tuple[Tensor | None, Tensor | None]:
        return run_step(model, ops, kv, rows, inputs, limits, shape, sampling=sampling)

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # NCCL's own threads look at events meanwhile, which a global capture would forbid.
    mode = "global" if model.tp.size == 1 else "thread_local"
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):  # type: ignore[arg-type]
        results, scores = body()
    batch, _ = views(inputs, shape, rows.block_tables, limits.max_model_len)
    return Graph(layout, inputs, graph, batch, results, scores)


def warm_up(
    model: Model, ops: Ops, kv: KVCache, rows: RowState, limits: Limits, shapes: Sequence[Shape]
) -> None:
    """Run a step of padding in every shape, and the sampling that follows logits.

    Every kernel that serving can meet is compiled here. Padding writes nothing but the spare row
    and block.
    """
    for shape in shapes:
        inputs = torch.from_numpy(make_layout(shape, limits).template).to(rows.last_token.device)
        run_step(model, ops, kv, rows, inputs, limits, shape, sampling=True)
        if shape.decode:
            _, scores = run_step(model, ops, kv, rows, inputs, limits, shape, sampling=False)
            assert scores is not None
            batch, _ = views(inputs, shape, rows.block_tables, limits.max_model_len)
            step.pick(model, scores, rows, batch, TRUNCATING)
    torch.cuda.synchronize(rows.last_token.device)


def padded_batch(shape: Shape, limits: Limits, rows: RowState) -> Batch:
    """A batch of nothing but padding, for measuring."""
    inputs = torch.from_numpy(make_layout(shape, limits).template).to(rows.last_token.device)
    return views(inputs, shape, rows.block_tables, limits.max_model_len)[0]


def all_shapes(limits: Limits) -> list[Shape]:
    """All shapes, the largest first: smaller graphs then find their memory in the pool."""
    shapes = decode_shapes(limits.max_num_seqs)
    shapes += mixed_shapes(limits.max_num_seqs, limits.max_num_batched_tokens)
    return sorted(shapes, reverse=True)


def largest_shapes(limits: Limits) -> list[Shape]:
    """The largest mixed and the largest decode shape."""
    shapes = all_shapes(limits)
    mixed = [shape for shape in shapes if not shape.decode][:1]
    return mixed + [shape for shape in shapes if shape.decode][:1]


def suits(plan: Plan, batch: HostBatch) -> bool:
    """Whether a step is a decode step of a graph: one position and one sample a sequence."""
    return (
        batch.max_seqlen_q == 1
        and plan.samples.size == plan.num_sequences == plan.sample_rows.size
        and not plan.prompt_logprobs.size
    )
