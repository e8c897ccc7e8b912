"""Decode attention over paged KV: one query position a sequence, split over the context.

A sequence of one chunk is finished by its program. The chunks of a longer one are combined by
whichever program finishes last, always in the same order, so results do not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from infer.ops.triton_common import (
    LOG2E,
    MASKED,
    await_predecessor,
    dot,
    dot_precision,
    launch_options,
    next_power_of_2,
    release_successor,
)
from infer.ops.triton_plan import DecodePlan, load_item


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedInput:
    """What decode attention needs to finish raw q, k and v by itself."""

    q_norm: Tensor | None  # [head_dim]; both norms or none
    k_norm: Tensor | None  # [head_dim]
    cos_sin: Tensor  # f32[num_positions, head_dim], cosines then sines
    slot_mapping: Tensor  # i32[num_tokens]
    eps: float


@triton.jit
def _load_heads(ptr, heads, real, HALF: tl.constexpr):
    """Load ``[heads, 2 * HALF]`` as float32 halves."""
    where = ptr + heads[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    lo = tl.load(where, mask=real[:, None], other=0.0)
    hi = tl.load(where + HALF, mask=real[:, None], other=0.0)
    return lo.to(tl.float32), hi.to(tl.float32)


@triton.jit
def _norm_rotate(lo, hi, norm_lo, norm_hi, cos, sin, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """RMSNorm each head (with NORM), then rotate its halves."""
    if NORM:
        mean = tl.sum(lo * lo + hi * hi, axis=1) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        lo = lo * scale * norm_lo[None, :]
        hi = hi * scale * norm_hi[None, :]
    return lo * cos[None, :] - hi * sin[None, :], hi * cos[None, :] + lo * sin[None, :]


@triton.jit
def _load_tile(k_cache, v_cache, table, begin, low, end, head_offset,
               TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr,
               HALF: tl.constexpr):  # fmt: skip
    """K and V of positions begin.., each as two halves ``[TILE, HALF]``; zeros where not valid."""
    tokens = begin + tl.arange(0, TILE)
    valid = (tokens >= low) & (tokens < end)
    if BLOCK_SIZE % TILE == 0:
        # Tiles start at multiples of TILE, so one block holds the tile.
        block = tl.load(table + begin // BLOCK_SIZE, mask=begin < end, other=0).to(tl.int64)
        first = (block * BLOCK_SIZE + begin % BLOCK_SIZE) * ROW + head_offset
        base = first + tl.arange(0, TILE) * ROW
    else:
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        base = (blocks * BLOCK_SIZE + tokens % BLOCK_SIZE) * ROW + head_offset
    where = base[:, None] + tl.arange(0, HALF)[None, :]
    mask = valid[:, None]
    k_lo = tl.load(k_cache + where, mask=mask, other=0.0)
    k_hi = tl.load(k_cache + where + HALF, mask=mask, other=0.0)
    v_lo = tl.load(v_cache + where, mask=mask, other=0.0)
    v_hi = tl.load(v_cache + where + HALF, mask=mask, other=0.0)
    return k_lo, k_hi, v_lo, v_hi, valid


@triton.jit
def _add_position(top, total, acc_lo, acc_hi, q_lo, q_hi, k_lo, k_hi, v_lo, v_hi, log_scale):
    """Count one more position ``[1, HALF]`` into softmax states of rows ``[R]``, ``[R, HALF]``."""
    s = tl.sum(q_lo * k_lo + q_hi * k_hi, axis=1) * log_scale
    new_top = tl.maximum(top, s)
    keep = tl.exp2(top - new_top)
    p = tl.exp2(s - new_top)
    acc_lo = acc_lo * keep[:, None] + p[:, None] * v_lo
    acc_hi = acc_hi * keep[:, None] + p[:, None] * v_hi
    return new_top, total * keep + p, acc_lo, acc_hi


@triton.jit
def _write_rows(
    out_row, partial, maxima, sums, cell, heads, real, alone, top, total, acc_lo, acc_hi,
    HALF: tl.constexpr,
):  # fmt: skip
    """Store finished rows (alone: the only chunk), or their softmax states for the merge."""
    DIM: tl.constexpr = 2 * HALF
    cols = tl.arange(0, HALF)[None, :]
    mask = real[:, None]
    if alone:
        inverse = tl.where(total > 0, 1.0 / total, 0.0)[:, None]
        out_cells = out_row + heads[:, None] * DIM + cols
        tl.store(out_cells, acc_lo * inverse, mask=mask)
        tl.store(out_cells + HALF, acc_hi * inverse, mask=mask)
    else:
        cells = cell + heads
        part_cells = partial + cells[:, None] * DIM + cols
        tl.store(part_cells, acc_lo, mask=mask)
        tl.store(part_cells + HALF, acc_hi, mask=mask)
        tl.store(maxima + cells, top, mask=real)
        tl.store(sums + cells, total, mask=real)


@triton.jit
def _merge_chunks(
    out_row, partial, maxima, sums, first_cell, num_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Combine a sequence's chunks, in their order, for one KV head's query heads."""
    cols = tl.arange(0, DIM)
    for g in tl.static_range(GROUP):
        top = tl.full([1], MASKED, tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([DIM], tl.float32)
        for begin in range(0, num_chunks, STEP):
            chunks = begin + tl.arange(0, STEP)
            valid = chunks < num_chunks
            cells = first_cell + chunks * (HEADS * GROUP) + g
            # Another multiprocessor wrote these: not from this one's L1.
            m = tl.load(maxima + cells, mask=valid, other=MASKED, cache_modifier=".cg")
            s = tl.load(sums + cells, mask=valid, other=0.0, cache_modifier=".cg")
            a = tl.load(
                partial + cells[:, None] * DIM + cols[None, :],
                mask=valid[:, None], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(m, axis=0))
            weight = tl.where(valid, tl.exp2(m - new_top), 0.0)
            keep = tl.exp2(top - new_top)
            total = total * keep + tl.sum(s * weight, axis=0)
            acc = acc * keep + tl.sum(a * weight[:, None], axis=0)
            top = new_top
        tl.store(out_row + g * DIM + cols, acc * tl.where(total > 0, 1.0 / total, 0.0))


@triton.jit
def _add_tile(
    top, total, acc_lo, acc_hi, q_lo, q_hi, k_lo, k_hi, v_lo, v_hi, valid, log_scale,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Count a tile into softmax states ``[ROWS]``, ``[ROWS, HALF]``."""
    s = dot(q_lo, tl.trans(k_lo), tl.zeros([q_lo.shape[0], k_lo.shape[0]], tl.float32), PRECISION)
    s = dot(q_hi, tl.trans(k_hi), s, PRECISION) * log_scale
    s = tl.where(valid[None, :], s, MASKED)
    new_top = tl.maximum(top, tl.max(s, axis=1))
    keep = tl.exp2(top - new_top)
    p = tl.where(valid[None, :], tl.exp2(s - new_top[:, None]), 0.0)
    total = total * keep + tl.sum(p, axis=1)
    acc_lo = dot(p.to(v_lo.dtype), v_lo, acc_lo * keep[:, None], PRECISION)
    acc_hi = dot(p.to(v_lo.dtype), v_hi, acc_hi * keep[:, None], PRECISION)
    return new_top, total, acc_lo, acc_hi


@triton.jit
def _attend_chunk(
    q_lo, q_hi, k_lo, k_hi, v_lo, v_hi, valid, k_cache, v_cache, table, begin, low, end,
    head_offset, log_scale,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go over a chunk in tiles. See ``DecodeConfig.stages``."""
    top = tl.full([ROWS], MASKED, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc_lo = tl.zeros([ROWS, HALF], tl.float32)
    acc_hi = tl.zeros([ROWS, HALF], tl.float32)
    if STAGES >= 2:
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            k_lo, k_hi, v_lo, v_hi, valid = _load_tile(
                k_cache, v_cache, table, start, low, end, head_offset, TILE, BLOCK_SIZE, ROW, HALF
            )
            top, total, acc_lo, acc_hi = _add_tile(
                top, total, acc_lo, acc_hi, q_lo, q_hi, k_lo, k_hi, v_lo, v_hi, valid, log_scale,
                PRECISION,
            )  # fmt: skip
    else:
        for start in range(begin, end, TILE):
            top, total, acc_lo, acc_hi = _add_tile(
                top, total, acc_lo, acc_hi, q_lo, q_hi, k_lo, k_hi, v_lo, v_hi, valid, log_scale,
                PRECISION,
            )  # fmt: skip
            k_lo, k_hi, v_lo, v_hi, valid = _load_tile(
                k_cache, v_cache, table, start + TILE, low, end, head_offset,
                TILE, BLOCK_SIZE, ROW, HALF,
            )  # fmt: skip
    return top, total, acc_lo, acc_hi


@triton.jit
def _decode_kernel(
    out_ptr, q_ptr, q_stride, k_cache, v_cache, q_norm, k_norm, cos_sin, slot_mapping,
    block_tables, table_stride, items, partial, maxima, sums, counters, eps, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, FUSED: tl.constexpr,
    NORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One item: a chunk of one sequence for one KV head and its query heads.

    Programs without an item wait as well: a successor that starts too early takes memory bandwidth
    from the chunks.

    FUSED takes raw q, k, v, normalises and rotates q and k, and writes the new position's K and V.
    """
    release_successor(PDL)
    DIM: tl.constexpr = 2 * HALF
    head = tl.program_id(0)
    item = tl.program_id(1)
    num_chunks = tl.load(items + item * 8 + 7)
    if num_chunks > 0:
        token, row, context, begin, end, seq, chunk = load_item(items, item)
        table = block_tables + row * table_stride
        dtype = k_cache.dtype.element_ty
        low = 0
        if WINDOW > 0:
            low = tl.maximum(context - WINDOW, 0)
        halves = tl.arange(0, HALF)
        zeros = tl.zeros([HALF], tl.float32)
        cos, sin, qn_lo, qn_hi, kn_lo, kn_hi = zeros, zeros, zeros, zeros, zeros, zeros
        slot = token
        newest = False
        if FUSED:
            # The new position's K and V are in no cache yet.
            newest = chunk == num_chunks - 1
            position = tl.maximum(context - 1, 0)
            end = tl.minimum(end, position)
            cos = tl.load(cos_sin + position.to(tl.int64) * DIM + halves)
            sin = tl.load(cos_sin + position.to(tl.int64) * DIM + HALF + halves)
            slot = tl.load(slot_mapping + token).to(tl.int64)
            if NORM:
                qn_lo = tl.load(q_norm + halves).to(tl.float32)
                qn_hi = tl.load(q_norm + HALF + halves).to(tl.float32)
                kn_lo = tl.load(k_norm + halves).to(tl.float32)
                kn_hi = tl.load(k_norm + HALF + halves).to(tl.float32)
        last = end if STAGES < 2 else begin  # smem stages load the first tile themselves
        k_lo, k_hi, v_lo, v_hi, valid = _load_tile(
            k_cache, v_cache, table, begin, low, last, head * DIM,
            TILE, BLOCK_SIZE, HEADS * DIM, HALF,
        )  # fmt: skip
        await_predecessor(PDL)

        # All loads first: what follows waits for one round trip.
        one = tl.zeros([1], tl.int32)
        q_row = q_ptr + token * q_stride + head * GROUP * DIM
        nk_lo, nk_hi = tl.zeros([1, HALF], tl.float32), tl.zeros([1, HALF], tl.float32)
        nv_lo, nv_hi = nk_lo, nk_hi
        if FUSED:
            kv_row = q_ptr + token * q_stride + (HEADS * GROUP + head) * DIM
            nk_lo, nk_hi = _load_heads(kv_row, one, one == 0, HALF)
            nv_lo, nv_hi = _load_heads(kv_row + HEADS * DIM, one, one == 0, HALF)
        rows = tl.arange(0, ROWS)
        real = rows < GROUP
        q_lo, q_hi = _load_heads(q_row, rows, real, HALF)
        if FUSED:
            q_lo, q_hi = _norm_rotate(q_lo, q_hi, qn_lo, qn_hi, cos, sin, eps, HALF, NORM)
        q_lo, q_hi = q_lo.to(dtype), q_hi.to(dtype)
        if FUSED:
            nk_lo, nk_hi = _norm_rotate(nk_lo, nk_hi, kn_lo, kn_hi, cos, sin, eps, HALF, NORM)
            # As later steps will read it.
            nk_lo, nk_hi = nk_lo.to(dtype).to(tl.float32), nk_hi.to(dtype).to(tl.float32)

        log_scale = scale * LOG2E
        alone = num_chunks == 1
        out_row = out_ptr + (token * HEADS + head) * GROUP * DIM
        cell0 = (item * HEADS + head) * GROUP
        top, total, acc_lo, acc_hi = _attend_chunk(
            q_lo, q_hi, k_lo, k_hi, v_lo, v_hi, valid, k_cache, v_cache, table,
            begin, low, end, head * DIM, log_scale,
            TILE, BLOCK_SIZE, HEADS * DIM, HALF, ROWS, STAGES, PRECISION,
        )  # fmt: skip
        if FUSED:  # noqa: SIM102 - one is a constant, the other is not
            if newest:
                top, total, acc_lo, acc_hi = _add_position(
                    top, total, acc_lo, acc_hi, q_lo.to(tl.float32), q_hi.to(tl.float32),
                    nk_lo, nk_hi, nv_lo, nv_hi, log_scale,
                )  # fmt: skip
        _write_rows(
            out_row, partial, maxima, sums, cell0, rows, real, alone,
            top, total, acc_lo, acc_hi, HALF,
        )  # fmt: skip
        if FUSED:  # noqa: SIM102 - one is a constant, the other is not
            if newest:
                cell = slot * HEADS * DIM + head * DIM + one[:, None] + halves[None, :]
                tl.store(k_cache + cell, nk_lo.to(dtype))
                tl.store(k_cache + cell + HALF, nk_hi.to(dtype))
                tl.store(v_cache + cell, nv_lo.to(dtype))
                tl.store(v_cache + cell + HALF, nv_hi.to(dtype))
        if num_chunks > 1:
            # Every thread's partial results come before the count that publishes them.
            tl.debug_barrier()
            counter = counters + seq * HEADS + head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel")
            if arrived == num_chunks - 1:
                tl.store(counter, 0)
                first_cell = ((item - chunk) * HEADS + head) * GROUP
                _merge_chunks(
                    out_row, partial, maxima, sums, first_cell, num_chunks, HEADS, GROUP, DIM, 16
                )
    else:
        await_predecessor(PDL)


def decode_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    plan: DecodePlan,
    *,
    num_heads: int,
    scale: float,
    sliding_window: int | None = None,
    fused: FusedInput | None = None,
    pdl: bool = False,
) -> None:
    """Attend from one query position a sequence to its whole context; write ``out``.

    Args:
        out: ``[num_tokens, num_heads * head_dim]``, contiguous; only rows of the plan are written.
        q: with ``fused`` raw projections, ``[num_tokens, (num_heads + 2 * num_kv_heads) *
            head_dim]`` (rows may be strided); else finished queries ``[num_tokens, num_heads *
            head_dim]``, whose K and V are in the cache already.
        k_cache, v_cache: ``[num_blocks + 1, block_size, num_kv_heads, head_dim]``; written at
            ``slot_mapping`` with ``fused``.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    group = num_heads // num_kv_heads
    config, unused = plan.config, plan.items
    norm = fused is not None and fused.q_norm is not None
    _decode_kernel[(num_kv_heads, plan.items.shape[0])](
        out, q, q.stride(0), k_cache, v_cache,
        fused.q_norm if norm and fused is not None else unused,
        fused.k_norm if norm and fused is not None else unused,
        unused if fused is None else fused.cos_sin,
        unused if fused is None else fused.slot_mapping,
        block_tables, block_tables.stride(0),
        plan.items, plan.partial, plan.maxima, plan.sums, plan.counters,
        0.0 if fused is None else fused.eps, scale,
        HEADS=num_kv_heads, GROUP=group, ROWS=max(next_power_of_2(group), 16),
        HALF=head_dim // 2, BLOCK_SIZE=block_size, TILE=config.tile, WINDOW=sliding_window or 0,
        FUSED=fused is not None, NORM=norm, PRECISION=dot_precision(q.dtype),
        STAGES=config.stages, PDL=pdl, num_warps=config.num_warps, **launch_options(pdl),
    )  # fmt: skip
