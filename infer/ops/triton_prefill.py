"""Attention of any number of query positions a sequence over paged KV (prefill, mixed batches).

An item of work is one KV head and a tile of query positions of one sequence; the query heads that
share the KV head are rows of the same tile, so each page is read once for all of them. Items are
laid out once a step, on the device: the grid depends on the number of tokens and sequences alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.batch import AttentionMeta
from infer.ops import LayerShape
from infer.ops.triton_common import (
    LOG2E,
    MASKED,
    cdiv,
    dot,
    dot_precision,
    hopper_gluon,
    next_power_of_2,
)

FIELDS = 4  # i32 numbers of an item; see _plan_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Tile sizes of prefill attention."""

    rows: int  # query rows (positions times query heads a KV head) of an item
    tile: int  # context positions read at once
    num_warps: int
    num_stages: int


def prefill_config(head_dim: int, bits: int) -> PrefillConfig:
    """The table of configurations."""
    if bits == 32:
        return PrefillConfig(rows=16, tile=32, num_warps=4, num_stages=1)
    if head_dim > 128:
        return PrefillConfig(rows=64, tile=32, num_warps=4, num_stages=2)
    return PrefillConfig(rows=64, tile=64, num_warps=4, num_stages=3)


HOPPER = PrefillConfig(rows=128, tile=128, num_warps=4, num_stages=2)  # as triton_hopper has it


def _suits_hopper(k_cache: Tensor, shape: LayerShape) -> bool:
    """Whether ``hopper_attention`` takes these shapes and this device."""
    block_size = k_cache.shape[1]
    return (
        hopper_gluon(k_cache.device)
        and k_cache.dtype.itemsize == 2
        and shape.head_dim in (64, 128)
        and shape.sliding_window is None
        and shape.num_heads <= 16 * shape.num_kv_heads
        and (block_size % HOPPER.tile == 0 or block_size in (16, 32, 64))
    )


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One step's items of work; by ``plan_prefill``."""

    config: PrefillConfig
    items: Tensor  # i32[max_items + 1, FIELDS], longest first, the last one empty


@triton.jit
def _plan_kernel(
    items_ptr, seq_rows, cu_seqlens_q, context_lens, num_seqs, num_items,
    QUERIES: tl.constexpr, SKIP_SINGLE: tl.constexpr, SEQS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """An item is (table row, first token, queries, position of the first); unused: no queries."""
    seqs = tl.arange(0, SEQS)
    real = seqs < num_seqs
    starts = tl.load(cu_seqlens_q + seqs, mask=real, other=0)
    lengths = tl.load(cu_seqlens_q + seqs + 1, mask=real, other=0) - starts
    firsts = tl.load(context_lens + seqs, mask=real, other=0) - lengths
    if SKIP_SINGLE:
        lengths = tl.where(lengths == 1, 0, lengths)
    count = (lengths + QUERIES - 1) // QUERIES
    upto = tl.cumsum(count, axis=0)

    items = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    seq = tl.sum((upto[None, :] <= items[:, None]).to(tl.int32), axis=1)
    inside = seq < num_seqs
    earlier = seqs[None, :] < seq[:, None]
    begin = (items - tl.sum(tl.where(earlier, count[None, :], 0), axis=1)) * QUERIES
    start = tl.load(cu_seqlens_q + seq, mask=inside, other=0)
    length = tl.load(cu_seqlens_q + seq + 1, mask=inside, other=0) - start
    position = tl.load(context_lens + seq, mask=inside, other=0) - length + begin
    row = tl.load(seq_rows + seq, mask=inside, other=0)
    queries = tl.where(inside, tl.minimum(length - begin, QUERIES), 0)

    # Its place: how many items see more, or as much in an earlier sequence.
    limit = position[:, None] - earlier.to(tl.int32) - firsts[None, :] + QUERIES
    behind = tl.minimum(tl.maximum(limit, 0) // QUERIES, count[None, :])
    place = tl.where(inside, tl.sum(count[None, :] - behind, axis=1), items)
    out = items_ptr + place * 4
    written = items < num_items
    tl.store(out, row, mask=written)
    tl.store(out + 1, start + begin, mask=written)
    tl.store(out + 2, queries, mask=written)
    tl.store(out + 3, position, mask=written)


def plan_prefill(
    meta: AttentionMeta, k_cache: Tensor, shape: LayerShape, *, skip_single: bool = False
) -> PrefillPlan:
    """Lay out one step's prefill attention; nothing is read back to the host.

    ``skip_single`` leaves out sequences with one query position (``decode_attention`` takes them).
    """
    config = prefill_config(shape.head_dim, k_cache.dtype.itemsize * 8)
    if _suits_hopper(k_cache, shape):
        config = HOPPER
    return make_plan(meta, config, shape, skip_single=skip_single)


def make_plan(
    meta: AttentionMeta, config: PrefillConfig, shape: LayerShape, *, skip_single: bool
) -> PrefillPlan:
    """``plan_prefill`` with tile sizes of one's own."""
    group_rows = next_power_of_2(shape.num_heads // shape.num_kv_heads)
    queries = max(config.rows // group_rows, 1)
    num_seqs = meta.context_lens.shape[0]
    num_items = cdiv(meta.positions.shape[0], queries) + num_seqs + 1
    items = torch.empty((num_items, FIELDS), dtype=torch.int32, device=meta.positions.device)
    per_program = 16
    _plan_kernel[(cdiv(num_items, per_program),)](
        items, meta.seq_rows, meta.cu_seqlens_q, meta.context_lens, num_seqs, num_items,
        QUERIES=queries, SKIP_SINGLE=skip_single, SEQS=next_power_of_2(num_seqs),
        ITEMS=per_program, num_warps=4,
    )  # fmt: skip
    return PrefillPlan(config, items)


@triton.jit
def _attend_tiles(
    acc, top, total, q, k_cache, v_cache, table, begin, end, position, context, head,
    log_scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go over context tiles begin..end; CHECK hides what each query may not see."""
    cols = tl.arange(0, DIM)
    offsets = tl.arange(0, TILE)
    for start in range(begin, end, TILE):
        tokens = start + offsets
        if BLOCK_SIZE % TILE == 0:
            # One block holds the tile: its address is one number.
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            first = (block * BLOCK_SIZE + start % BLOCK_SIZE) * (HEADS * DIM) + head * DIM
            where = first + offsets[:, None] * (HEADS * DIM) + cols[None, :]
        else:
            inside = tokens < context
            block = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            cell = (block * BLOCK_SIZE + tokens % BLOCK_SIZE) * (HEADS * DIM) + head * DIM
            where = cell[:, None] + cols[None, :]
        if CHECK:
            k = tl.load(k_cache + where, mask=(tokens < context)[:, None], other=0.0)
        else:
            k = tl.load(k_cache + where)
        s = dot(q, tl.trans(k), tl.zeros([q.shape[0], TILE], tl.float32), PRECISION) * log_scale
        if CHECK:
            seen = tokens[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (tokens[None, :] > position[:, None] - WINDOW)
            s = tl.where(seen, s, MASKED)
        new_top = tl.maximum(top, tl.max(s, axis=1))
        keep = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        if CHECK:
            p = tl.where(seen, p, 0.0)
        total = total * keep + tl.sum(p, axis=1)
        acc = acc * keep[:, None]
        if CHECK:
            v = tl.load(v_cache + where, mask=(tokens < context)[:, None], other=0.0)
        else:
            v = tl.load(v_cache + where)
        acc = dot(p.to(v.dtype), v, acc, PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def _prefill_kernel(
    out_ptr, q_ptr, k_cache, v_cache, items, block_tables, table_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Row r of the tile is query position r // GROUP_ROWS, query head r % GROUP_ROWS."""
    head = tl.program_id(0)
    item = items + tl.program_id(1) * 4
    queries = tl.load(item + 2)
    if queries > 0:
        table = block_tables + tl.load(item).to(tl.int64) * table_stride
        token = tl.load(item + 1)
        first_position = tl.load(item + 3)
        rows = tl.arange(0, ROWS)
        cols = tl.arange(0, DIM)
        query = rows // GROUP_ROWS
        member = rows % GROUP_ROWS
        real = (query < queries) & (member < GROUP)
        cell = ((token + query).to(tl.int64) * HEADS + head) * GROUP + member
        q = tl.load(q_ptr + cell[:, None] * DIM + cols[None, :], mask=real[:, None], other=0.0)

        # Rows beyond the query look where the last one does, so that no row sees nothing.
        position = first_position + tl.minimum(query, queries - 1)
        end = first_position + queries
        begin = 0
        full = (first_position + 1) // TILE * TILE  # every row sees all positions before it
        if WINDOW > 0:
            begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
            full = begin
        acc = tl.zeros([ROWS, DIM], tl.float32)
        top = tl.full([ROWS], MASKED, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        log_scale = scale * LOG2E
        acc, top, total = _attend_tiles(
            acc, top, total, q, k_cache, v_cache, table, begin, full, position, end, head,
            log_scale, HEADS, DIM, BLOCK_SIZE, TILE, WINDOW, False, PRECISION,
        )  # fmt: skip
        acc, top, total = _attend_tiles(
            acc, top, total, q, k_cache, v_cache, table, full, end, position, end, head,
            log_scale, HEADS, DIM, BLOCK_SIZE, TILE, WINDOW, True, PRECISION,
        )  # fmt: skip
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + cell[:, None] * DIM + cols[None, :], out, mask=real[:, None])


def prefill_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> None:
    """Causal attention of each sequence's last ``q_len`` positions over its whole context.

    ``q`` and ``out`` are ``[num_tokens, num_heads, head_dim]``, contiguous; the K and V of all
    positions are in the caches. Rows of no item are not written.
    """
    if plan.config is HOPPER:
        from infer.ops.triton_hopper import hopper_attention

        hopper_attention(out, q, k_cache, v_cache, block_tables, plan.items, scale=scale)
        return
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    group_rows = next_power_of_2(group)
    config = plan.config
    _prefill_kernel[(num_kv_heads, plan.items.shape[0] - 1)](
        out, q, k_cache, v_cache, plan.items, block_tables, block_tables.stride(0), scale,
        HEADS=num_kv_heads, GROUP=group, GROUP_ROWS=group_rows, DIM=head_dim,
        ROWS=max(config.rows, group_rows),
        BLOCK_SIZE=block_size, TILE=config.tile, WINDOW=sliding_window or 0,
        PRECISION=dot_precision(q.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
