"""Attention of any number of query positions a sequence over paged KV (prefill, mixed batches).

A program takes one KV head and a tile of query positions of one sequence; the query heads that
share the KV head are rows of the same tile, so each page is read once for all of them. Tiles are
found on the device from ``cu_seqlens_q``: the grid depends on the token count alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from infer.ops.triton_common import (
    LOG2E,
    MASKED,
    cdiv,
    dot,
    dot_precision,
    next_power_of_2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Tile sizes of prefill attention."""

    rows: int  # query rows (positions times query heads a KV head) a program holds
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


@triton.jit
def _attend_tiles(
    acc, top, total, q, k_cache, v_cache, table, begin, end, low, position, context, head,
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
    out_ptr, q_ptr, k_cache, v_cache, seq_rows, cu_seqlens_q, context_lens,
    block_tables, table_stride, num_seqs, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SKIP_SINGLE: tl.constexpr, SEQS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Row r of the tile is query position r // GROUP_ROWS, query head r % GROUP_ROWS."""
    QUERIES: tl.constexpr = ROWS // GROUP_ROWS
    head = tl.program_id(0)
    item = tl.program_id(1)
    seqs = tl.arange(0, SEQS)
    starts = tl.load(cu_seqlens_q + seqs, mask=seqs < num_seqs, other=0)
    ends = tl.load(cu_seqlens_q + seqs + 1, mask=seqs < num_seqs, other=0)
    lengths = ends - starts
    if SKIP_SINGLE:
        lengths = tl.where(lengths == 1, 0, lengths)
    count = (lengths + QUERIES - 1) // QUERIES
    upto = tl.cumsum(count, axis=0)
    seq = tl.sum((upto <= item).to(tl.int32), axis=0)
    if seq < num_seqs:
        tiles = tl.sum(tl.where(seqs == seq, count, 0), axis=0)
        before = tl.sum(tl.where(seqs < seq, count, 0), axis=0)
        # Late tiles see most of the context: start them first.
        tile = tiles - 1 - (item - before)
        q_start = tl.load(cu_seqlens_q + seq)
        q_len = tl.load(cu_seqlens_q + seq + 1) - q_start
        context = tl.load(context_lens + seq)
        table = block_tables + tl.load(seq_rows + seq).to(tl.int64) * table_stride
        rows = tl.arange(0, ROWS)
        cols = tl.arange(0, DIM)
        query = tile * QUERIES + rows // GROUP_ROWS
        member = rows % GROUP_ROWS
        real = (query < q_len) & (member < GROUP)
        cell = ((q_start + query).to(tl.int64) * HEADS + head) * GROUP + member
        q = tl.load(q_ptr + cell[:, None] * DIM + cols[None, :], mask=real[:, None], other=0.0)

        # Rows beyond the query look where the last one does, so that no row sees nothing.
        position = context - q_len + tl.minimum(query, q_len - 1)
        first_position = context - q_len + tile * QUERIES
        end = tl.minimum(first_position + QUERIES, context)
        low = 0
        begin = 0
        full = (first_position + 1) // TILE * TILE  # every row sees all positions before it
        if WINDOW > 0:
            low = tl.maximum(first_position - WINDOW + 1, 0)
            begin = low // TILE * TILE
            full = begin
        acc = tl.zeros([ROWS, DIM], tl.float32)
        top = tl.full([ROWS], MASKED, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        log_scale = scale * LOG2E
        acc, top, total = _attend_tiles(
            acc, top, total, q, k_cache, v_cache, table, begin, full, low, position, context, head,
            log_scale, HEADS, DIM, BLOCK_SIZE, TILE, WINDOW, False, PRECISION,
        )  # fmt: skip
        acc, top, total = _attend_tiles(
            acc, top, total, q, k_cache, v_cache, table, full, end, low, position, context, head,
            log_scale, HEADS, DIM, BLOCK_SIZE, TILE, WINDOW, True, PRECISION,
        )  # fmt: skip
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + cell[:, None] * DIM + cols[None, :], out, mask=real[:, None])


def prefill_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    seq_rows: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    config: PrefillConfig,
    sliding_window: int | None = None,
    skip_single: bool = False,
) -> None:
    """Causal attention of each sequence's last ``q_len`` positions over its whole context.

    ``q`` and ``out`` are ``[num_tokens, num_heads, head_dim]``, contiguous; the K and V of all
    positions are in the caches. ``skip_single`` leaves out sequences with one query position
    (``decode_attention`` takes them). Rows of no sequence are not written.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    num_seqs = context_lens.shape[0]
    group = num_heads // num_kv_heads
    group_rows = next_power_of_2(group)
    rows = max(config.rows, group_rows)
    _prefill_kernel[(num_kv_heads, cdiv(num_tokens, rows // group_rows) + num_seqs)](
        out, q, k_cache, v_cache, seq_rows, cu_seqlens_q, context_lens,
        block_tables, block_tables.stride(0), num_seqs, scale,
        HEADS=num_kv_heads, GROUP=group, GROUP_ROWS=group_rows, DIM=head_dim, ROWS=rows,
        BLOCK_SIZE=block_size, TILE=config.tile, WINDOW=sliding_window or 0,
        SKIP_SINGLE=skip_single, SEQS=next_power_of_2(num_seqs),
        PRECISION=dot_precision(q.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
