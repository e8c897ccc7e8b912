"""Which program of decode attention does what: made once a step, on the device, for all layers.

The grid is fixed by the number of sequences, so that a graph can hold it. The step's whole context
is cut into chunks of about equal length, each of one sequence, and the longest sequences come
first, so that the work stays balanced whatever the lengths are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.ops.triton_common import cdiv, next_power_of_2

FIELDS = 8  # i32 numbers of an item; see divide
ITEMS = 16  # of a program


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How decode attention divides its work. A fixed choice a batch size, never tuned at start."""

    tile: int  # context positions a program loads at once
    num_warps: int
    stages: (
        int  # tiles on their way at once; 1 in ``triton_decode``: ahead of the predecessor's end
    )
    min_chunk: int  # no chunk is shorter, so that short contexts need no combining
    chunks: int  # about how many chunks the step's whole context is cut into

    def max_items(self, num_seqs: int) -> int:
        """An upper bound of the chunks of ``num_seqs`` sequences, whatever their lengths."""
        return num_seqs + self.chunks


def decode_config(num_seqs: int, bits: int) -> DecodeConfig:
    """The table of ``triton_decode``, by the bits of a number and the batch."""
    make = DecodeConfig
    if bits == 32:
        return make(tile=16, num_warps=4, stages=1, min_chunk=128, chunks=64)
    if num_seqs <= 4:
        return make(tile=64, num_warps=4, stages=1, min_chunk=64, chunks=32)
    if num_seqs <= 16:
        return make(tile=128, num_warps=8, stages=1, min_chunk=256, chunks=32)
    if num_seqs <= 48:
        return make(tile=64, num_warps=4, stages=1, min_chunk=256, chunks=32)
    if num_seqs <= 96:
        return make(tile=64, num_warps=4, stages=3, min_chunk=256, chunks=128)
    return make(tile=16, num_warps=1, stages=5, min_chunk=256, chunks=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """One step's division of work and the buffers in which chunks meet; by ``plan_decode``."""

    config: DecodeConfig
    items: Tensor  # i32[max_items, FIELDS]
    partial: Tensor  # f32[max_items * num_kv_heads, group, head_dim]
    maxima: Tensor  # f32[max_items * num_kv_heads, group], base-2 logarithms
    sums: Tensor  # f32[max_items * num_kv_heads, group]
    counters: Tensor  # i32[num_seqs * num_kv_heads], zero between kernels


@triton.jit
def _lengths(seqs, cu_seqlens_q, context_lens, num_seqs, TILE: tl.constexpr, WINDOW: tl.constexpr,
             MIXED: tl.constexpr):  # fmt: skip
    """How many positions these sequences read; -1 where there is no work for decode attention."""
    real = seqs < num_seqs
    length = tl.load(context_lens + seqs, mask=real, other=0)
    if WINDOW > 0:
        length -= tl.maximum(length - WINDOW, 0) // TILE * TILE
    if MIXED:
        starts = tl.load(cu_seqlens_q + seqs, mask=real, other=0)
        ends = tl.load(cu_seqlens_q + seqs + 1, mask=real, other=0)
        real = real & (ends - starts == 1)
    return tl.where(real, length, -1)


@triton.jit
def _counts(length, chunk_len):
    """Chunks of sequences of these lengths."""
    return tl.where(length < 0, 0, tl.maximum((length + chunk_len - 1) // chunk_len, 1))


@triton.jit
def divide(
    program, items_ptr, counters, seq_rows, cu_seqlens_q, context_lens, num_seqs, num_items,
    num_counters,
    TILE: tl.constexpr, MIN_CHUNK: tl.constexpr, CHUNKS: tl.constexpr, WINDOW: tl.constexpr,
    MIXED: tl.constexpr, SEQS: tl.constexpr, ITEMS: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """Lay out the next ITEMS items and clear as many counters, as the ``program``-th to do so.

    An item is (token, table row, context, begin, end, sequence, chunk, its sequence's chunks).
    Items beyond the work have no chunks. A sequence has at least one, even without context.
    """
    seqs = tl.arange(0, SEQS)
    length = _lengths(seqs, cu_seqlens_q, context_lens, num_seqs, TILE, WINDOW, MIXED)
    total = tl.sum(tl.maximum(length, 0), axis=0)
    chunk_len = (total + CHUNKS - 1) // CHUNKS
    chunk_len = tl.maximum((chunk_len + TILE - 1) // TILE * TILE, MIN_CHUNK)
    count = _counts(length, chunk_len)
    # The longest come first: what begins last must not end long after all else.
    first_of = tl.zeros([SEQS], tl.int32)
    SOME: tl.constexpr = min(SEQS, 32)
    for start in range(0, SEQS, SOME):
        others = start + tl.arange(0, SOME)
        other = _lengths(others, cu_seqlens_q, context_lens, num_seqs, TILE, WINDOW, MIXED)
        equal = (other[None, :] == length[:, None]) & (others[None, :] < seqs[:, None])
        before = equal | (other[None, :] > length[:, None])
        first_of += tl.sum(tl.where(before, _counts(other, chunk_len)[None, :], 0), axis=1)

    items = program * ITEMS + tl.arange(0, ITEMS)
    own = (first_of[None, :] <= items[:, None]) & (items[:, None] < (first_of + count)[None, :])
    seq = tl.sum(tl.where(own, seqs[None, :], 0), axis=1)
    first = tl.sum(tl.where(own, first_of[None, :], 0), axis=1)
    num_chunks = tl.sum(tl.where(own, count[None, :], 0), axis=1)
    inside = num_chunks > 0
    token = seq
    if MIXED:
        token = tl.load(cu_seqlens_q + seq, mask=inside, other=0)
    context = tl.load(context_lens + seq, mask=inside, other=0)
    row = tl.load(seq_rows + seq, mask=inside, other=0)
    chunk = items - first
    begin = chunk * chunk_len
    if WINDOW > 0:
        begin += tl.maximum(context - WINDOW, 0) // TILE * TILE
    end = tl.minimum(begin + chunk_len, context)
    out = items_ptr + items * 8
    written = items < num_items
    tl.store(out, token, mask=written)
    tl.store(out + 1, row, mask=written)
    tl.store(out + 2, context, mask=written)
    tl.store(out + 3, begin, mask=written)
    tl.store(out + 4, end, mask=written)
    tl.store(out + 5, seq, mask=written)
    tl.store(out + 6, chunk, mask=written)
    tl.store(out + 7, num_chunks, mask=written)
    counter = program * COUNTERS + tl.arange(0, COUNTERS)
    tl.store(counters + counter, tl.zeros([COUNTERS], tl.int32), mask=counter < num_counters)


@triton.jit
def load_item(items, item):
    """An item's token, table row, context, begin, end, sequence and chunk; see ``divide``."""
    record = items + item * 8
    token = tl.load(record).to(tl.int64)
    row = tl.load(record + 1).to(tl.int64)
    context = tl.load(record + 2)
    begin = tl.load(record + 3)
    end = tl.load(record + 4)
    seq = tl.load(record + 5)
    chunk = tl.load(record + 6)
    return token, row, context, begin, end, seq, chunk


@triton.jit
def _plan_kernel(
    items_ptr, counters, seq_rows, cu_seqlens_q, context_lens, num_seqs, num_items, num_counters,
    TILE: tl.constexpr, MIN_CHUNK: tl.constexpr, CHUNKS: tl.constexpr, WINDOW: tl.constexpr,
    MIXED: tl.constexpr, SEQS: tl.constexpr, ITEMS: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    divide(
        tl.program_id(0), items_ptr, counters, seq_rows, cu_seqlens_q, context_lens, num_seqs,
        num_items, num_counters, TILE, MIN_CHUNK, CHUNKS, WINDOW, MIXED, SEQS, ITEMS, COUNTERS,
    )  # fmt: skip


def empty_plan(
    num_seqs: int,
    *,
    config: DecodeConfig,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
) -> DecodePlan:
    """Room for the plan of so many sequences, for ``divide`` to fill."""
    num_items, group = config.max_items(num_seqs), num_heads // num_kv_heads
    rows = num_items * num_kv_heads
    floats = lambda *shape: torch.empty(shape, dtype=torch.float32, device=device)  # noqa: E731
    return DecodePlan(
        config=config,
        items=torch.empty((num_items, FIELDS), dtype=torch.int32, device=device),
        partial=floats(rows, group, head_dim),
        maxima=floats(rows, group),
        sums=floats(rows, group),
        counters=torch.empty(num_seqs * num_kv_heads, dtype=torch.int32, device=device),
    )


def plan_programs(plan: DecodePlan) -> int:
    """How many programs ``divide`` takes, with ``plan_constants``."""
    return cdiv(plan.items.shape[0], ITEMS)


def plan_constants(
    plan: DecodePlan, num_seqs: int, sliding_window: int | None, *, mixed: bool
) -> dict[str, int | bool]:
    """The constants of ``divide``."""
    counters = cdiv(plan.counters.shape[0], plan_programs(plan))
    return {
        "TILE": plan.config.tile,
        "MIN_CHUNK": plan.config.min_chunk,
        "CHUNKS": plan.config.chunks,
        "WINDOW": sliding_window or 0,
        "MIXED": mixed,
        "SEQS": next_power_of_2(num_seqs),
        "ITEMS": ITEMS,
        "COUNTERS": next_power_of_2(counters),
    }


def plan_decode(
    seq_rows: Tensor,
    context_lens: Tensor,
    *,
    config: DecodeConfig,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sliding_window: int | None = None,
    cu_seqlens_q: Tensor | None = None,
) -> DecodePlan:
    """Divide one step's decode attention; nothing is read back to the host.

    ``cu_seqlens_q`` is that of a mixed batch: sequences with another number of query positions than
    one are left out. None: sequence s is token s.
    """
    num_seqs = context_lens.shape[0]
    plan = empty_plan(
        num_seqs, config=config, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        device=context_lens.device,
    )  # fmt: skip
    _plan_kernel[(plan_programs(plan),)](
        plan.items, plan.counters, seq_rows,
        context_lens if cu_seqlens_q is None else cu_seqlens_q, context_lens,
        num_seqs, plan.items.shape[0], plan.counters.shape[0], num_warps=4,
        **plan_constants(plan, num_seqs, sliding_window, mixed=cu_seqlens_q is not None),
    )  # fmt: skip
    return plan
