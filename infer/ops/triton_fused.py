"""Decode attention of fused steps on recent NVIDIA GPUs, written in Gluon.

What ``infer.ops.triton_decode`` computes, for the same plan. Pages are on their way into shared
memory before the predecessor ends (Note [dependent launch] in ``infer.ops.triton_common``). Every
warp goes through positions of its own; the warps' softmax states and the new position meet at the
end, and only there do warps wait for each other.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from infer.ops.triton_common import (
    LOG2E,
    MASKED,
    hopper_gluon,
    indices,
    launch_options,
    next_power_of_2,
)
from infer.ops.triton_decode import FusedInput
from infer.ops.triton_plan import DecodeConfig, DecodePlan, load_item

MAX_GROUP = 8  # query heads a KV head: a product has 16 rows, the lower half is not looked at


@gluon.jit
def _copy_tile(
    k_cache, v_cache, table, first, low, end, head_offset, k_lo, k_hi, v,
    BLOCK_SIZE: gl.constexpr, ROW: gl.constexpr, HALF: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Begin to copy K, as two halves, and V of positions first..; zeros where not valid."""
    part, t, d = indices(COPY, k_lo.shape[0], k_lo.shape[1], HALF)
    tokens = first + part * k_lo.shape[1] + t
    valid = (tokens >= low) & (tokens < end)
    block = gl.load(table + tokens // BLOCK_SIZE, mask=valid, other=0).to(gl.int64)
    where = (block * BLOCK_SIZE + tokens % BLOCK_SIZE) * ROW + head_offset + d
    valid = valid & (d >= 0)
    async_copy.async_copy_global_to_shared(k_lo, k_cache + where, valid)
    async_copy.async_copy_global_to_shared(k_hi, k_cache + where + HALF, valid)
    async_copy.async_copy_global_to_shared(v.slice(0, HALF, dim=2), v_cache + where, valid)
    async_copy.async_copy_global_to_shared(
        v.slice(HALF, HALF, dim=2), v_cache + where + HALF, valid
    )


@gluon.jit
def _merge_chunks(
    out_row, partial, maxima, sums, first_cell, num_chunks,
    HEADS: gl.constexpr, GROUP: gl.constexpr, G: gl.constexpr, DIM: gl.constexpr,
    STEP: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Combine a sequence's chunks, in their order, for one KV head's query heads."""
    S: gl.constexpr = gl.SliceLayout(2, OUT)
    ROWS: gl.constexpr = gl.SliceLayout(0, S)
    COLS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, OUT))
    chunk, g, d = indices(OUT, STEP, G, DIM)
    chunk2 = gl.arange(0, STEP, gl.SliceLayout(1, S))[:, None]
    g2 = gl.arange(0, G, ROWS)[None, :]
    top = gl.full([G], MASKED, gl.float32, ROWS)
    total = gl.zeros([G], gl.float32, ROWS)
    acc = gl.zeros([G, DIM], gl.float32, gl.SliceLayout(0, OUT))
    for begin in range(0, num_chunks, STEP):
        # Another multiprocessor wrote these: not from this one's L1.
        cells = first_cell + (begin + chunk2) * (HEADS * GROUP) + g2
        real = (begin + chunk2 < num_chunks) & (g2 < GROUP)
        m = gl.load(maxima + cells, mask=real, other=MASKED, cache_modifier=".cg")
        s = gl.load(sums + cells, mask=real, other=0.0, cache_modifier=".cg")
        where = (first_cell + (begin + chunk) * (HEADS * GROUP) + g) * DIM + d
        real_a = (begin + chunk < num_chunks) & (g < GROUP) & (d >= 0)
        a = gl.load(partial + where, mask=real_a, other=0.0, cache_modifier=".cg")
        new_top = gl.maximum(top, gl.max(m, axis=0))
        weight = gl.where(real, gl.exp2(m - new_top[None, :]), 0.0)
        keep = gl.exp2(top - new_top)
        total = total * keep + gl.sum(s * weight, axis=0)
        acc = acc * gl.convert_layout(keep, COLS)[:, None] + gl.sum(a * weight[:, :, None], axis=0)
        top = new_top
    inverse = gl.convert_layout(gl.where(total > 0, 1.0 / total, 0.0), COLS)
    g_out = gl.arange(0, G, COLS)[:, None]
    d_out = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(0, OUT)))[None, :]
    result = (acc * inverse[:, None]).to(out_row.dtype.element_ty)
    gl.store(out_row + g_out * DIM + d_out, result, mask=(g_out < GROUP) & (d_out >= 0))


@gluon.jit
def _finish_new(
    where, r, cos, sin, norm_lo, norm_hi, eps, dtype: gl.constexpr, HALF: gl.constexpr,
    GROUP: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Load the rows of what is new and normalise and rotate all but the value's."""
    raw_lo = gl.load(where, mask=r < GROUP + 2, other=0.0)
    raw_hi = gl.load(where + HALF, mask=r < GROUP + 2, other=0.0)
    lo = raw_lo.to(gl.float32)
    hi = raw_hi.to(gl.float32)
    if NORM:
        factor = gl.rsqrt(gl.sum(lo * lo + hi * hi, axis=1) / (2 * HALF) + eps)[:, None]
        lo = lo * factor * norm_lo
        hi = hi * factor * norm_hi
    turned_lo = (lo * cos - hi * sin).to(dtype)
    turned_hi = (hi * cos + lo * sin).to(dtype)
    return gl.where(r > GROUP, raw_lo, turned_lo), gl.where(r > GROUP, raw_hi, turned_hi)


@gluon.jit
def _dot_rows(rows, L: gl.constexpr, G: gl.constexpr, KEY: gl.constexpr):
    """The products of rows 0..G-1 with row KEY."""
    key = rows.slice(KEY, 1).load(L).to(gl.float32)
    return gl.sum(rows.slice(0, G).load(L).to(gl.float32) * key, axis=1)


@gluon.jit
def _fused_kernel(
    out_ptr, qkv_ptr, qkv_stride, k_cache, v_cache, q_norm, k_norm, cos_sin, slot_mapping,
    block_tables, table_stride, items, partial, maxima, sums, counters, eps, scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, G: gl.constexpr, R: gl.constexpr,
    HALF: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, WARPS: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, NORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One item: a chunk of one sequence for one KV head and its query heads.

    Programs without an item end at once; every step has programs with one, which wait.
    """
    if PDL:
        gdc_launch_dependents()
    DIM: gl.constexpr = 2 * HALF
    SPAN: gl.constexpr = WARPS * TILE
    ROW: gl.constexpr = HEADS * DIM
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    # Columns of a head in another order, the same for queries and keys: wide reads.
    ORDER: gl.constexpr = HALF // 8 if HALF < 64 else 8
    Q: gl.constexpr = gl.DotOperandLayout(0, MMA, ORDER)
    K: gl.constexpr = gl.DotOperandLayout(1, MMA, ORDER)
    P: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    V: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    STATE: gl.constexpr = gl.SliceLayout(2, MMA)
    K_BANKS: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 2, [2, 1, 0])
    V_BANKS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // HALF, HALF // 8], [WARPS, 1, 1], [2, 1, 0]
    )
    NEW: gl.constexpr = gl.BlockedLayout([1, HALF // 32], [1, 32], [WARPS, 1], [1, 0])
    OUT: gl.constexpr = gl.BlockedLayout(
        [WARPS, 1, 4], [1, 128 // DIM, DIM // 4], [1, WARPS, 1], [2, 1, 0]
    )
    MERGE: gl.constexpr = gl.BlockedLayout(
        [8, 1, 4], [1, 128 // DIM, DIM // 4], [1, WARPS, 1], [2, 1, 0]
    )
    OUT_G: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, OUT))
    OUT_D: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, OUT))
    STATES: gl.constexpr = gl.SliceLayout(2, OUT)
    dtype: gl.constexpr = k_cache.dtype.element_ty
    head = gl.program_id(0)
    item = gl.program_id(1)
    num_chunks = gl.load(items + item * 8 + 7)
    if num_chunks > 0:
        token, row, context, begin, end, seq, chunk = load_item(items, item)
        table = block_tables + row * table_stride
        low = 0
        if WINDOW > 0:
            low = gl.maximum(context - WINDOW, 0)
        # The new position's K and V are in no cache yet.
        newest = chunk == num_chunks - 1
        position = gl.maximum(context - 1, 0)
        end = gl.minimum(end, position)
        k_lo = gl.allocate_shared_memory(dtype, [STAGES, WARPS, TILE, HALF], K_BANKS)
        k_hi = gl.allocate_shared_memory(dtype, [STAGES, WARPS, TILE, HALF], K_BANKS)
        v = gl.allocate_shared_memory(dtype, [STAGES, WARPS, TILE, DIM], V_BANKS)
        for i in gl.static_range(STAGES):
            if begin + i * SPAN < end:
                _copy_tile(
                    k_cache, v_cache, table, begin + i * SPAN, low, end, head * DIM,
                    k_lo.index(i), k_hi.index(i), v.index(i), BLOCK_SIZE, ROW, HALF, COPY,
                )  # fmt: skip
            async_copy.commit_group()
        # Rows of what is new: query heads, the key, the value.
        r = gl.arange(0, R, gl.SliceLayout(1, NEW))[:, None]
        d = gl.arange(0, HALF, gl.SliceLayout(0, NEW))[None, :]
        angle = cos_sin + position.to(gl.int64) * DIM + d
        cos = gl.load(angle)
        sin = gl.load(angle + HALF)
        slot = gl.load(slot_mapping + token).to(gl.int64)
        norm_lo = cos
        norm_hi = cos
        if NORM:
            is_q = (r < GROUP) & (d >= 0)
            norm_lo = gl.where(is_q, gl.load(q_norm + d), gl.load(k_norm + d)).to(gl.float32)
            norm_hi = gl.where(is_q, gl.load(q_norm + HALF + d), gl.load(k_norm + HALF + d))
            norm_hi = norm_hi.to(gl.float32)
        place = gl.where(r < GROUP, head * GROUP + r, HEADS * r + head)
        where = qkv_ptr + token * qkv_stride + place * DIM + d
        if PDL:
            gdc_wait()

        new_lo, new_hi = _finish_new(
            where, r, cos, sin, norm_lo, norm_hi, eps, dtype, HALF, GROUP, NORM
        )  # fmt: skip
        rows_lo = gl.allocate_shared_memory(dtype, [16, HALF], ROWS)
        rows_hi = gl.allocate_shared_memory(dtype, [16, HALF], ROWS)
        rows_lo.slice(0, R).store(new_lo)
        rows_hi.slice(0, R).store(new_hi)
        # Rows that are no query's hold anything: rows of a product do not mix.
        nothing = gl.zeros([WARPS, 16, HALF], dtype, Q)
        q_lo = rows_lo.load(gl.SliceLayout(0, Q))[None, :, :] + nothing
        q_hi = rows_hi.load(gl.SliceLayout(0, Q))[None, :, :] + nothing

        log_scale = scale * LOG2E
        top = gl.full([WARPS, 16], MASKED, gl.float32, STATE)
        total = gl.zeros([WARPS, 16], gl.float32, STATE)
        acc = gl.zeros([WARPS, 16, DIM], gl.float32, MMA)
        part, first_row, t = indices(MMA, WARPS, 1, TILE)
        for start in range(begin, end, SPAN):
            stage = (start - begin) // SPAN % STAGES
            async_copy.wait_group(STAGES - 1)
            s = gl.zeros([WARPS, 16, TILE], gl.float32, MMA)
            s = mma_v2(q_lo, k_lo.index(stage).permute((0, 2, 1)).load(K), s)
            s = mma_v2(q_hi, k_hi.index(stage).permute((0, 2, 1)).load(K), s) * log_scale
            tokens = start + part * TILE + t
            valid = (tokens >= low) & (tokens < end) & (first_row >= 0)
            s = gl.where(valid, s, MASKED)
            new_top = gl.maximum(top, gl.max(s, axis=2))
            keep = gl.exp2(top - new_top)
            p = gl.where(valid, gl.exp2(s - new_top[:, :, None]), 0.0)
            total = total * keep + gl.sum(p, axis=2)
            p = gl.convert_layout(p.to(dtype), P)
            acc = mma_v2(p, v.index(stage).load(V), acc * keep[:, :, None])
            top = new_top
            if start + STAGES * SPAN < end:
                _copy_tile(
                    k_cache, v_cache, table, start + STAGES * SPAN, low, end, head * DIM,
                    k_lo.index(stage), k_hi.index(stage), v.index(stage),
                    BLOCK_SIZE, ROW, HALF, COPY,
                )  # fmt: skip
            async_copy.commit_group()
        async_copy.wait_group(0)

        # The score of the new position, and the warps' states, each where its result is made.
        s_new = _dot_rows(rows_lo, NEW, G, GROUP) + _dot_rows(rows_hi, NEW, G, GROUP)
        s_new = gl.where(newest, gl.convert_layout(s_new * log_scale, OUT_G), MASKED)
        tops = gl.allocate_shared_memory(gl.float32, [WARPS, 16], ROWS, top)
        totals = gl.allocate_shared_memory(gl.float32, [WARPS, 16], ROWS, total)
        queries, _ = gl.split(acc.reshape([WARPS, 2, 8, DIM]).permute((0, 2, 3, 1)))
        accs = gl.allocate_shared_memory(gl.float32, [WARPS, 8, DIM], CUBE, queries)
        top = tops.slice(0, G, dim=1).load(STATES)
        total = totals.slice(0, G, dim=1).load(STATES)
        most = gl.maximum(gl.convert_layout(gl.max(top, axis=0), OUT_G), s_new)
        weight = gl.exp2(top - gl.convert_layout(most, gl.SliceLayout(0, STATES))[None, :])
        own = gl.where(newest, gl.exp2(s_new - most), 0.0)
        total = gl.convert_layout(gl.sum(total * weight, axis=0), OUT_G) + own
        result = gl.sum(accs.slice(0, G, dim=1).load(OUT) * weight[:, :, None], axis=0)
        cols = gl.arange(0, DIM, OUT_D)[None, :]
        value = qkv_ptr + token * qkv_stride + (HEADS * (GROUP + 1) + head) * DIM + cols
        result += own[:, None] * gl.load(value).to(gl.float32)

        heads = gl.arange(0, G, OUT_G)
        shown = (heads < GROUP)[:, None] & (cols >= 0)
        out_row = out_ptr + (token * HEADS + head) * GROUP * DIM
        if num_chunks == 1:
            inverse = gl.where(total > 0, 1.0 / total, 0.0)[:, None]
            gl.store(
                out_row + heads[:, None] * DIM + cols, (result * inverse).to(dtype), mask=shown
            )
        else:
            cells = (item * HEADS + head) * GROUP + heads
            gl.store(partial + cells[:, None] * DIM + cols, result, mask=shown)
            gl.store(maxima + cells, most, mask=heads < GROUP)
            gl.store(sums + cells, total, mask=heads < GROUP)
        if newest:
            cell = slot * ROW + head * DIM + d + r * 0
            gl.store(k_cache + cell, new_lo, mask=r == GROUP)
            gl.store(k_cache + cell + HALF, new_hi, mask=r == GROUP)
            gl.store(v_cache + cell, new_lo, mask=r == GROUP + 1)
            gl.store(v_cache + cell + HALF, new_hi, mask=r == GROUP + 1)
        if num_chunks > 1:
            # Every thread's partial results come before the count that publishes them.
            gl.thread_barrier()
            counter = counters + seq * HEADS + head
            arrived = gl.atomic_add(counter, 1, sem="acq_rel")
            if arrived == num_chunks - 1:
                gl.store(counter, 0)
                first_cell = ((item - chunk) * HEADS + head) * GROUP
                _merge_chunks(
                    out_row, partial, maxima, sums, first_cell, num_chunks, HEADS, GROUP, G, DIM,
                    8, MERGE,
                )  # fmt: skip


def suits_fused(k_cache: Tensor, num_heads: int) -> bool:
    """Whether ``fused_attention`` takes these shapes, on this device."""
    _, _, num_kv_heads, head_dim = k_cache.shape
    return (
        head_dim in (64, 128)
        and num_heads // num_kv_heads <= MAX_GROUP
        and k_cache.element_size() == 2
        and hopper_gluon(k_cache.device)
    )


def fused_config(num_seqs: int) -> DecodeConfig:
    """The table of configurations, by the batch: every warp takes 16 positions at once."""
    make = DecodeConfig
    if 1 < num_seqs <= 8:
        return make(tile=128, num_warps=8, stages=2, min_chunk=256, chunks=16)
    if num_seqs <= 32:
        chunks = 16 if num_seqs <= 16 else 32
        return make(tile=64, num_warps=4, stages=3, min_chunk=256, chunks=chunks)
    # Of three stages four programs fit a multiprocessor, of two six: what fills the last round.
    stages = 3 if num_seqs <= 64 or 112 < num_seqs <= 128 else 2
    return make(tile=32, num_warps=2, stages=stages, min_chunk=256, chunks=64)


def fused_attention(
    out: Tensor,
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    plan: DecodePlan,
    *,
    num_heads: int,
    scale: float,
    sliding_window: int | None = None,
    fused: FusedInput,
    pdl: bool = False,
) -> None:
    """What ``triton_decode.decode_attention`` does with ``fused``, where ``suits_fused``."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    group, config = num_heads // num_kv_heads, plan.config
    _fused_kernel[(num_kv_heads, plan.items.shape[0])](
        out, qkv, qkv.stride(0), k_cache, v_cache,
        qkv if fused.q_norm is None else fused.q_norm,
        qkv if fused.k_norm is None else fused.k_norm,
        fused.cos_sin, fused.slot_mapping, block_tables, block_tables.stride(0),
        plan.items, plan.partial, plan.maxima, plan.sums, plan.counters, fused.eps, scale,
        HEADS=num_kv_heads, GROUP=group, G=next_power_of_2(group), R=next_power_of_2(group + 2),
        HALF=head_dim // 2, BLOCK_SIZE=block_size, TILE=config.tile // config.num_warps,
        WARPS=config.num_warps, STAGES=config.stages, WINDOW=sliding_window or 0,
        NORM=fused.q_norm is not None, PDL=pdl, num_warps=config.num_warps, **launch_options(pdl),
    )  # fmt: skip
