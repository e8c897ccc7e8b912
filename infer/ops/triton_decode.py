"""Decode attention over paged KV: one query position a sequence, split over the context.

The grid is fixed by the number of sequences, so that a graph can hold it; programs read
``context_lens`` on the device and cut the step's whole context into chunks of equal length. A
sequence of one chunk is finished by its program. The chunks of a longer one are combined by
whichever program finishes last, always in the same order, so results do not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How decode attention divides its work. A fixed choice a batch size, never tuned at start."""

    use_dot: bool  # tensor cores, or fused multiply-adds (fewer than about four heads a group)
    tile: int  # context positions a program loads at once
    num_warps: int
    min_chunk: int  # no chunk is shorter, so that short contexts need no combining
    chunks: int  # about how many chunks the step's whole context is cut into

    def max_items(self, num_seqs: int) -> int:
        """An upper bound of the chunks of ``num_seqs`` sequences, whatever their lengths."""
        return num_seqs + self.chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeScratch:
    """Device buffers that decode attention writes and no one else reads.

    ``counters`` must be zero before the first call; every call leaves them zero.
    """

    partial: Tensor  # f32[max_items * num_kv_heads, group, head_dim]
    maxima: Tensor  # f32[max_items * num_kv_heads, group], base-2 logarithms
    sums: Tensor  # f32[max_items * num_kv_heads, group]
    counters: Tensor  # i32[num_seqs * num_kv_heads]


def decode_config(num_seqs: int, num_heads: int, num_kv_heads: int, bits: int) -> DecodeConfig:
    """The table of configurations."""
    use_dot = num_heads // num_kv_heads >= 4
    if bits == 32:
        return DecodeConfig(use_dot=use_dot, tile=16, num_warps=4, min_chunk=128, chunks=64)
    if num_seqs <= 8:
        return DecodeConfig(use_dot=use_dot, tile=32, num_warps=4, min_chunk=64, chunks=32)
    return DecodeConfig(use_dot=use_dot, tile=32, num_warps=4, min_chunk=256, chunks=128)


def decode_scratch(
    config: DecodeConfig,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
) -> DecodeScratch:
    """Allocate the scratch buffers of one configuration."""
    rows = config.max_items(num_seqs) * num_kv_heads
    group = num_heads // num_kv_heads
    make = lambda *shape: torch.empty(shape, dtype=torch.float32, device=device)  # noqa: E731
    return DecodeScratch(
        partial=make(rows, group, head_dim),
        maxima=make(rows, group),
        sums=make(rows, group),
        counters=torch.zeros(num_seqs * num_kv_heads, dtype=torch.int32, device=device),
    )


@triton.jit
def _find_item(
    context_lens, cu_seqlens_q, num_seqs, item,
    TILE: tl.constexpr, MIN_CHUNK: tl.constexpr, CHUNKS: tl.constexpr, WINDOW: tl.constexpr,
    MIXED: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Map a program's item to (sequence, chunk, chunks of it, first item, chunk length, valid)."""
    seqs = tl.arange(0, SEQS)
    real = seqs < num_seqs
    length = tl.load(context_lens + seqs, mask=real, other=0)
    if WINDOW > 0:
        length -= tl.maximum(length - WINDOW, 0) // TILE * TILE
    if MIXED:
        start = tl.load(cu_seqlens_q + seqs, mask=real, other=0)
        end = tl.load(cu_seqlens_q + seqs + 1, mask=real, other=0)
        real = real & (end - start == 1)
        length = tl.where(real, length, 0)
    total = tl.sum(length, axis=0)
    chunk = (total + CHUNKS - 1) // CHUNKS
    chunk = tl.maximum((chunk + TILE - 1) // TILE * TILE, MIN_CHUNK)
    count = tl.where(real, tl.maximum((length + chunk - 1) // chunk, 1), 0)
    upto = tl.cumsum(count, axis=0)
    seq = tl.sum((upto <= item).to(tl.int32), axis=0)
    first = tl.sum(tl.where(seqs < seq, count, 0), axis=0)
    num_chunks = tl.sum(tl.where(seqs == seq, count, 0), axis=0)
    return seq, item - first, num_chunks, first, chunk, seq < num_seqs


@triton.jit
def _load_half_rows(ptr, norm_ptr, rows_mask, row_stride, rows, cos, sin, eps,
                    HALF: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """Load heads ``[rows, 2 * HALF]``, optionally RMS-normalised, rotated; the halves apart."""
    cols = tl.arange(0, HALF)
    where = ptr + rows[:, None] * row_stride + cols[None, :]
    lo = tl.load(where, mask=rows_mask[:, None], other=0.0).to(tl.float32)
    hi = tl.load(where + HALF, mask=rows_mask[:, None], other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(lo * lo, axis=1) + tl.sum(hi * hi, axis=1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        lo = lo * scale * tl.load(norm_ptr + cols).to(tl.float32)[None, :]
        hi = hi * scale * tl.load(norm_ptr + HALF + cols).to(tl.float32)[None, :]
    return lo * cos[None, :] - hi * sin[None, :], hi * cos[None, :] + lo * sin[None, :]


@triton.jit
def _load_tile(k_cache, v_cache, table, tokens, valid, head_offset,
               BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """K and V of ``tokens``, each as two halves ``[tile, HALF]``; zeros where not valid."""
    block = tl.load(table + tokens // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    base = (block * BLOCK_SIZE + tokens % BLOCK_SIZE) * ROW + head_offset
    where = base[:, None] + tl.arange(0, HALF)[None, :]
    mask = valid[:, None]
    k_lo = tl.load(k_cache + where, mask=mask, other=0.0)
    k_hi = tl.load(k_cache + where + HALF, mask=mask, other=0.0)
    v_lo = tl.load(v_cache + where, mask=mask, other=0.0)
    v_hi = tl.load(v_cache + where + HALF, mask=mask, other=0.0)
    return k_lo, k_hi, v_lo, v_hi


@triton.jit
def _merge_partials(
    out, partial, maxima, sums, base, num_chunks, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Combine a sequence's chunks, in their order, for one KV head's query heads."""
    cols = tl.arange(0, DIM)
    for g in range(GROUP):
        top = tl.full([1], MASKED, tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([DIM], tl.float32)
        for begin in range(0, num_chunks, STEP):
            chunks = begin + tl.arange(0, STEP)
            valid = chunks < num_chunks
            where = (base + chunks * HEADS) * GROUP + g
            m = tl.load(maxima + where, mask=valid, other=MASKED, cache_modifier=".cg")
            s = tl.load(sums + where, mask=valid, other=0.0, cache_modifier=".cg")
            a = tl.load(
                partial + where[:, None] * DIM + cols[None, :],
                mask=valid[:, None], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(m, axis=0))
            weight = tl.where(valid, tl.exp2(m - new_top), 0.0)
            keep = tl.exp2(top - new_top)
            total = total * keep + tl.sum(s * weight, axis=0)
            acc = acc * keep + tl.sum(a * weight[:, None], axis=0)
            top = new_top
        inverse = tl.where(total > 0, 1.0 / total, 0.0)
        tl.store(out + g * head_stride + cols, acc * inverse)


@triton.jit
def _decode_kernel(
    out_ptr, q_ptr, q_stride, k_cache, v_cache, q_norm, k_norm, cos_sin, slot_mapping,
    seq_rows, cu_seqlens_q, context_lens, block_tables, table_stride,
    partial, maxima, sums, counters, num_seqs, eps, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MIN_CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr, SEQS: tl.constexpr, FUSED: tl.constexpr, NORM: tl.constexpr,
    MIXED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of one sequence for one KV head and its ROWS >= GROUP query heads.

    FUSED takes raw q, k, v, normalises and rotates q and k, and writes the new position's K and V.
    """
    release_successor(PDL)
    head = tl.program_id(0)
    seq, chunk, num_chunks, first, chunk_len, exists = _find_item(
        context_lens, cu_seqlens_q, num_seqs, tl.program_id(1),
        TILE, MIN_CHUNK, CHUNKS, WINDOW, MIXED, SEQS,
    )  # fmt: skip
    if exists:
        DIM: tl.constexpr = 2 * HALF
        dtype = k_cache.dtype.element_ty
        halves = tl.arange(0, HALF)
        rows = tl.arange(0, ROWS)
        real_rows = rows < GROUP
        token = seq.to(tl.int64)
        if MIXED:
            token = tl.load(cu_seqlens_q + seq).to(tl.int64)
        context = tl.load(context_lens + seq)
        # The new position's K and V are in no cache yet when FUSED.
        cached = tl.maximum(context - 1, 0) if FUSED else context
        low = 0
        if WINDOW > 0:
            low = tl.maximum(context - WINDOW, 0)
        begin = low // TILE * TILE + chunk * chunk_len
        end = tl.minimum(begin + chunk_len, cached)
        table = block_tables + tl.load(seq_rows + seq).to(tl.int64) * table_stride
        tokens = begin + tl.arange(0, TILE)
        valid = (tokens >= low) & (tokens < end)
        k_lo, k_hi, v_lo, v_hi = _load_tile(
            k_cache, v_cache, table, tokens, valid, head * DIM, BLOCK_SIZE, HEADS * DIM, HALF
        )
        if FUSED:
            angle = cos_sin + tl.maximum(context - 1, 0).to(tl.int64) * DIM + halves
            cos = tl.load(angle).to(tl.float32)
            sin = tl.load(angle + HALF).to(tl.float32)
            slot = tl.load(slot_mapping + token).to(tl.int64)
        await_predecessor(PDL)

        q_row = q_ptr + token * q_stride + head * GROUP * DIM
        if FUSED:
            q_lo, q_hi = _load_half_rows(
                q_row, q_norm, real_rows, DIM, rows, cos, sin, eps, HALF, NORM
            )
        else:
            where = q_row + rows[:, None] * DIM + halves[None, :]
            q_lo = tl.load(where, mask=real_rows[:, None], other=0.0).to(tl.float32)
            q_hi = tl.load(where + HALF, mask=real_rows[:, None], other=0.0).to(tl.float32)
        if DOT:
            # Scaled after the dot product: q keeps the values it would have had.
            q_lo_t = q_lo.to(dtype)
            q_hi_t = q_hi.to(dtype)
            top = tl.full([ROWS], MASKED, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc_lo = tl.zeros([ROWS, HALF], tl.float32)
            acc_hi = tl.zeros([ROWS, HALF], tl.float32)
        else:
            # Every lane of the tile keeps a softmax of its own; they meet after the loop.
            top = tl.full([ROWS, TILE], MASKED, tl.float32)
            total = tl.zeros([ROWS, TILE], tl.float32)
            acc_lo = tl.zeros([ROWS, TILE, HALF], tl.float32)
            acc_hi = tl.zeros([ROWS, TILE, HALF], tl.float32)
        log_scale = scale * LOG2E
        for position in range(begin, end, TILE):
            tokens = position + TILE + tl.arange(0, TILE)
            next_valid = (tokens >= low) & (tokens < end)
            next_k_lo, next_k_hi, next_v_lo, next_v_hi = _load_tile(
                k_cache, v_cache, table, tokens, next_valid, head * DIM,
                BLOCK_SIZE, HEADS * DIM, HALF,
            )  # fmt: skip
            if DOT:
                s = dot(q_lo_t, tl.trans(k_lo), tl.zeros([ROWS, TILE], tl.float32), PRECISION)
                s = dot(q_hi_t, tl.trans(k_hi), s, PRECISION) * log_scale
                s = tl.where(valid[None, :], s, MASKED)
                new_top = tl.maximum(top, tl.max(s, axis=1))
                keep = tl.exp2(top - new_top)
                p = tl.where(valid[None, :], tl.exp2(s - new_top[:, None]), 0.0)
                total = total * keep + tl.sum(p, axis=1)
                p_t = p.to(dtype)
                acc_lo = dot(p_t, v_lo, acc_lo * keep[:, None], PRECISION)
                acc_hi = dot(p_t, v_hi, acc_hi * keep[:, None], PRECISION)
            else:
                product = q_lo[:, None, :] * k_lo.to(tl.float32)[None, :, :]
                product += q_hi[:, None, :] * k_hi.to(tl.float32)[None, :, :]
                s = tl.sum(product, axis=2) * log_scale
                s = tl.where(valid[None, :], s, MASKED)
                new_top = tl.maximum(top, s)
                keep = tl.exp2(top - new_top)
                p = tl.where(valid[None, :], tl.exp2(s - new_top), 0.0)
                total = total * keep + p
                acc_lo = acc_lo * keep[:, :, None] + p[:, :, None] * v_lo.to(tl.float32)[None]
                acc_hi = acc_hi * keep[:, :, None] + p[:, :, None] * v_hi.to(tl.float32)[None]
            top = new_top
            k_lo, k_hi, v_lo, v_hi, valid = next_k_lo, next_k_hi, next_v_lo, next_v_hi, next_valid
        if not DOT:
            lanes = top
            top = tl.max(lanes, axis=1)
            weight = tl.exp2(lanes - top[:, None])
            total = tl.sum(total * weight, axis=1)
            acc_lo = tl.sum(acc_lo * weight[:, :, None], axis=1)
            acc_hi = tl.sum(acc_hi * weight[:, :, None], axis=1)

        if FUSED:
            if chunk == num_chunks - 1:
                # The new position: write it, and count it in without reading it back.
                one = tl.zeros([1], tl.int32)
                kv_row = q_ptr + token * q_stride + (HEADS * GROUP + head) * DIM
                nk_lo, nk_hi = _load_half_rows(
                    kv_row, k_norm, one == 0, DIM, one, cos, sin, eps, HALF, NORM
                )
                v_where = kv_row + HEADS * DIM + one[:, None] + halves[None, :]
                nv_lo = tl.load(v_where)
                nv_hi = tl.load(v_where + HALF)
                nk_lo, nk_hi = nk_lo.to(dtype), nk_hi.to(dtype)
                cell = slot * HEADS * DIM + head * DIM + one[:, None] + halves[None, :]
                tl.store(k_cache + cell, nk_lo)
                tl.store(k_cache + cell + HALF, nk_hi)
                tl.store(v_cache + cell, nv_lo)
                tl.store(v_cache + cell + HALF, nv_hi)
                if DOT:
                    q_lo, q_hi = q_lo_t.to(tl.float32), q_hi_t.to(tl.float32)
                s = tl.sum(q_lo * nk_lo.to(tl.float32) + q_hi * nk_hi.to(tl.float32), axis=1)
                s = s * log_scale
                new_top = tl.maximum(top, s)
                keep = tl.exp2(top - new_top)
                p = tl.exp2(s - new_top)
                total = total * keep + p
                acc_lo = acc_lo * keep[:, None] + p[:, None] * nv_lo.to(tl.float32)
                acc_hi = acc_hi * keep[:, None] + p[:, None] * nv_hi.to(tl.float32)
                top = new_top

        out_row = out_ptr + (token * HEADS + head) * GROUP * DIM
        if num_chunks == 1:
            inverse = tl.where(total > 0, 1.0 / total, 0.0)[:, None]
            where = out_row + rows[:, None] * DIM + halves[None, :]
            tl.store(where, acc_lo * inverse, mask=real_rows[:, None])
            tl.store(where + HALF, acc_hi * inverse, mask=real_rows[:, None])
        else:
            cell = ((first + chunk) * HEADS + head) * GROUP + rows
            where = partial + cell[:, None] * DIM + halves[None, :]
            tl.store(where, acc_lo, mask=real_rows[:, None])
            tl.store(where + HALF, acc_hi, mask=real_rows[:, None])
            tl.store(maxima + cell, top, mask=real_rows)
            tl.store(sums + cell, total, mask=real_rows)
            # Every thread's partial results come before the count that publishes them.
            tl.debug_barrier()
            counter = counters + seq * HEADS + head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel")
            if arrived == num_chunks - 1:
                tl.store(counter, 0)
                _merge_partials(
                    out_row, partial, maxima, sums, first * HEADS + head, num_chunks, DIM,
                    HEADS, GROUP, DIM, 16,
                )  # fmt: skip
    else:
        await_predecessor(PDL)


def decode_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_heads: int,
    seq_rows: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scratch: DecodeScratch,
    config: DecodeConfig,
    scale: float,
    sliding_window: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    fused: FusedInput | None = None,
    pdl: bool = False,
) -> None:
    """Attend from one query position a sequence to its whole context; write ``out``.

    Args:
        out: ``[num_tokens, num_heads * head_dim]``.
        q: with ``fused`` raw projections ``[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]``
            (rows may be strided), else finished queries ``[num_tokens, num_heads * head_dim]`` whose
            K and V are in the cache already.
        k_cache, v_cache: ``[num_blocks + 1, block_size, num_kv_heads, head_dim]``; written at
            ``slot_mapping`` with ``fused``.
        cu_seqlens_q: i32[num_seqs + 1] of a mixed batch: sequences with another number of query
            positions than one are left out. None: sequence s is token s.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    num_seqs = context_lens.shape[0]
    group = num_heads // num_kv_heads
    rows = next_power_of_2(group)
    any_tensor = context_lens
    _decode_kernel[(num_kv_heads, config.max_items(num_seqs))](
        out, q, q.stride(0), k_cache, v_cache,
        any_tensor if fused is None or fused.q_norm is None else fused.q_norm,
        any_tensor if fused is None or fused.k_norm is None else fused.k_norm,
        any_tensor if fused is None else fused.cos_sin,
        any_tensor if fused is None else fused.slot_mapping,
        seq_rows, any_tensor if cu_seqlens_q is None else cu_seqlens_q, context_lens,
        block_tables, block_tables.stride(0),
        scratch.partial, scratch.maxima, scratch.sums, scratch.counters,
        num_seqs, 0.0 if fused is None else fused.eps, scale,
        HEADS=num_kv_heads, GROUP=group, ROWS=max(rows, 16) if config.use_dot else rows,
        HALF=head_dim // 2, BLOCK_SIZE=block_size, TILE=config.tile, MIN_CHUNK=config.min_chunk,
        CHUNKS=config.chunks, WINDOW=sliding_window or 0, SEQS=next_power_of_2(num_seqs),
        FUSED=fused is not None, NORM=fused is not None and fused.q_norm is not None,
        MIXED=cu_seqlens_q is not None, DOT=config.use_dot,
        PRECISION=dot_precision(q.dtype), PDL=pdl,
        num_warps=config.num_warps, **launch_options(pdl),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedInput:
    """What decode attention needs to finish raw q, k and v by itself."""

    q_norm: Tensor | None  # [head_dim]; both norms or none
    k_norm: Tensor | None  # [head_dim]
    cos_sin: Tensor  # f32[num_positions, head_dim], cosines then sines
    slot_mapping: Tensor  # i32[num_tokens]
    eps: float
