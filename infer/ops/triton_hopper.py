"""Prefill attention for Hopper, written in Gluon: one program a multiprocessor, warps specialised.

A program goes through work items (a tile of 128 query rows of one KV head; see
``infer.ops.triton_prefill``), longest first. One warp copies queries, keys and values into shared
memory ahead of their use, by the tensor memory accelerator, an item ahead too; two groups of four
warps each take 64 rows. A group has the product of the next keys in flight while it takes the
softmax of the last ones (Shah et al., "FlashAttention-3", section 3.2), and goes from the newest
positions to the oldest, so that only its first tiles need a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from infer.ops.triton_common import next_power_of_2

LOG2E = gl.constexpr(1.4426950408889634)
# A score below any real one. A power of two, so that scaling it is exact: where a row sees nothing
# of a tile its weights are then one, and vanish with the next tile, instead of anything up to inf.
MASKED = gl.constexpr(-(2.0**100))
ROWS = gl.constexpr(128)  # query rows (positions times query heads a KV head) of an item
HALF = gl.constexpr(64)  # rows of a group of warps, and columns of a swizzled row of 128 bytes
TILE = gl.constexpr(128)  # context positions of a tile
STAGES = gl.constexpr(2)


@gluon.jit
def _item(items, turn, num_items, HEADS: gl.constexpr):
    """This program's work of a turn: (table row, first token, queries, first position, KV head).

    No queries: the work is done. Programs take turns back and forth, for the longest come first.
    """
    place = gl.program_id(0)
    if turn & 1:
        place = gl.num_programs(0) - 1 - place
    work = turn * gl.num_programs(0) + place
    at = items + gl.minimum(work // HEADS, num_items) * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), work % HEADS


@gluon.jit
def _load_tile(
    cache, ring, barrier, stage, table, start, last_page, head,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Copy positions start .. start + TILE of a head; pages past the context repeat the last."""
    PAGES: gl.constexpr = TILE // PAGE
    PARTS: gl.constexpr = DIM // HALF
    # Halves of the columns lie one after the other, as the swizzled layout has them.
    boxes = ring._reinterpret(
        ring.dtype, [STAGES * PARTS * PAGES, PAGE, HALF], cache.layout
    )  # fmt: skip
    mbarrier.expect(barrier, TILE * DIM * 2)
    for page in gl.static_range(PAGES):
        position = start + page * PAGE
        block = gl.load(table + gl.minimum(position // BLOCK_SIZE, last_page))
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        for part in gl.static_range(PARTS):
            box = boxes.index((stage * PARTS + part) * PAGES + page)
            tma.async_copy_global_to_shared(
                cache, [slot, head * DIM + part * HALF], barrier, box
            )  # fmt: skip


@gluon.jit
def _produce(
    q_rows, k_cache, v_cache, items, num_items, block_tables, table_stride,
    q_smem, k_ring, v_ring, q_bars, k_bars, v_bars,
    HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    QUERIES: gl.constexpr = ROWS // GROUP_ROWS
    PARTS: gl.constexpr = DIM // HALF
    q_boxes = q_smem._reinterpret(
        q_smem.dtype, [2 * PARTS, QUERIES // 2, GROUP_ROWS, HALF], q_rows.layout
    )
    turn = 0
    step = 0
    row, token, queries, position, head = _item(items, turn, num_items, HEADS)
    while queries > 0:
        table = block_tables + row.to(gl.int64) * table_stride
        end = position + queries
        tiles = (end + TILE - 1) // TILE
        last_page = (end - 1) // BLOCK_SIZE
        mbarrier.wait(q_bars.index(1), (turn & 1) ^ 1)
        mbarrier.expect(q_bars.index(0), ROWS * DIM * 2)
        for part in gl.static_range(2 * PARTS):
            first = token + (part // PARTS) * (QUERIES // 2)
            tma.async_copy_global_to_shared(
                q_rows, [first, head * GROUP, (part % PARTS) * HALF], q_bars.index(0),
                q_boxes.index(part),
            )  # fmt: skip
        for number in range(tiles):
            stage = step % STAGES
            phase = (step // STAGES) & 1
            start = (tiles - 1 - number) * TILE
            mbarrier.wait(k_bars.index(STAGES + stage), phase ^ 1)
            _load_tile(
                k_cache, k_ring, k_bars.index(stage), stage, table, start, last_page, head,
                BLOCK_SIZE, PAGE, DIM,
            )  # fmt: skip
            mbarrier.wait(v_bars.index(STAGES + stage), phase ^ 1)
            _load_tile(
                v_cache, v_ring, v_bars.index(stage), stage, table, start, last_page, head,
                BLOCK_SIZE, PAGE, DIM,
            )  # fmt: skip
            step += 1
        turn += 1
        row, token, queries, position, head = _item(items, turn, num_items, HEADS)


@gluon.jit
def _mask(s, start, position, tokens):
    return gl.where((start + tokens)[None, :] <= position[:, None], s, MASKED)


@gluon.jit
def _softmax(s, top, total, log_scale):
    """Fold scores into the running maximum and sum; returns weights and the factor of the past."""
    new_top = gl.maximum(top, gl.max(s, axis=1))
    keep = gl.exp2((top - new_top) * log_scale)
    p = gl.exp2(s * log_scale - (new_top * log_scale)[:, None])
    total = total * keep + gl.sum(p, axis=1)
    return p, new_top, total, keep


@gluon.jit
def _consume(
    out_ptr, items, num_items, log_scale, q_smem, k_ring, v_ring, q_bars, k_bars, v_bars,
    WHO: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr,
    DIM: gl.constexpr,
):  # fmt: skip
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    value: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    weight: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=value, k_width=2)
    by_row: gl.constexpr = gl.SliceLayout(1, score)
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = k_ring.dtype

    rows = WHO * HALF + gl.arange(0, HALF, layout=by_row)
    tokens = gl.arange(0, TILE, layout=gl.SliceLayout(0, score))
    out_rows = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, lines))
    out_cols = gl.arange(0, DIM, layout=gl.SliceLayout(0, lines))
    member = out_rows % GROUP_ROWS
    nothing = gl.zeros([HALF, TILE], gl.float32, layout=score)
    q = q_smem.index(WHO)

    turn = 0
    step = 0
    _row, token, queries, position, head = _item(items, turn, num_items, HEADS)
    while queries > 0:
        end = position + queries
        tiles = (end + TILE - 1) // TILE
        start = (tiles - 1) * TILE
        mine = position + rows // GROUP_ROWS
        top = gl.full([HALF], MASKED, gl.float32, layout=by_row)
        total = gl.zeros([HALF], gl.float32, layout=by_row)
        acc = gl.zeros([HALF, DIM], gl.float32, layout=value)

        mbarrier.wait(q_bars.index(0), turn & 1)
        stage = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(k_bars.index(stage), phase)
        s = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), nothing, use_acc=False)
        mbarrier.arrive(k_bars.index(STAGES + stage), count=1)
        p, top, total, keep = _softmax(_mask(s, start, mine, tokens), top, total, log_scale)
        weights = gl.convert_layout(p.to(dtype), weight)

        # Cells past the context may hold anything, and a weight of zero does not hide a NaN.
        mbarrier.wait(v_bars.index(stage), phase)
        if start + TILE > end:
            live = start + gl.arange(0, TILE, layout=gl.SliceLayout(1, lines)) < end
            v = v_ring.index(stage)
            v.store(gl.where(live[:, None], v.load(lines), 0.0))
            fence_async_shared()

        for _ in range(1, tiles):
            start -= TILE
            step += 1
            old = stage
            old_phase = phase
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_bars.index(stage), phase)
            s_token = warpgroup_mma(
                q, k_ring.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            mbarrier.wait(v_bars.index(old), old_phase)
            acc_token = warpgroup_mma(weights, v_ring.index(old), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_token])
            mbarrier.arrive(k_bars.index(STAGES + stage), count=1)
            if start + TILE > position:
                s = _mask(s, start, mine, tokens)
            p, top, total, keep = _softmax(s, top, total, log_scale)
            acc = warpgroup_mma_wait(0, deps=[acc_token])
            mbarrier.arrive(v_bars.index(STAGES + old), count=1)
            acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, value))[:, None]
            weights = gl.convert_layout(p.to(dtype), weight)

        mbarrier.arrive(q_bars.index(1), count=1)
        mbarrier.wait(v_bars.index(stage), phase)
        acc = warpgroup_mma(weights, v_ring.index(stage), acc)
        mbarrier.arrive(v_bars.index(STAGES + stage), count=1)
        step += 1

        acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, value))[:, None]
        result = gl.convert_layout(acc.to(dtype), lines)
        query = out_rows // GROUP_ROWS
        cell = ((token + query).to(gl.int64) * HEADS + head) * GROUP + member
        real = (query < queries) & (member < GROUP)
        gl.store(
            out_ptr + cell[:, None] * DIM + out_cols[None, :], result, mask=real[:, None]
        )  # fmt: skip
        turn += 1
        _row, token, queries, position, head = _item(items, turn, num_items, HEADS)


@gluon.jit
def _hopper_kernel(
    out_ptr, q_rows, k_cache, v_cache, items, num_items, block_tables, table_stride, log_scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = k_cache.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, HALF, DIM], flat)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM], flat)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM], flat)
    # Full ones, then empty ones.
    q_bars = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    k_bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], bar)
    v_bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], bar)
    mbarrier.init(q_bars.index(0), count=1)
    mbarrier.init(q_bars.index(1), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_bars.index(stage), count=1)
        mbarrier.init(v_bars.index(stage), count=1)
        mbarrier.init(k_bars.index(STAGES + stage), count=2)
        mbarrier.init(v_bars.index(STAGES + stage), count=2)
    gl.warp_specialize(
        [
            (_consume, (
                out_ptr, items, num_items, log_scale, q_smem, k_ring, v_ring, q_bars, k_bars,
                v_bars, 0, HEADS, GROUP, GROUP_ROWS, DIM,
            )),
            (_consume, (
                out_ptr, items, num_items, log_scale, q_smem, k_ring, v_ring, q_bars, k_bars,
                v_bars, 1, HEADS, GROUP, GROUP_ROWS, DIM,
            )),
            (_produce, (
                q_rows, k_cache, v_cache, items, num_items, block_tables, table_stride,
                q_smem, k_ring, v_ring, q_bars, k_bars, v_bars,
                HEADS, GROUP, GROUP_ROWS, DIM, BLOCK_SIZE, PAGE,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def hopper_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    items: Tensor,
    *,
    scale: float,
) -> None:
    """``prefill_attention`` over items of 128 rows, for 16-bit types and head_dim 64 or 128.

    Needs blocks of 16, 32, 64 or a multiple of 128 positions, and at most 64 query heads a KV head.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    group_rows = next_power_of_2(group)
    page = min(block_size, TILE.value)
    q_box = [ROWS.value // group_rows // 2, group_rows, HALF.value]
    q_rows = TensorDescriptor(
        q, [num_tokens, num_heads, head_dim], list(q.stride()), q_box,
        gl.NVMMASharedLayout(128, 16, rank=3),
    )  # fmt: skip
    pages = [
        TensorDescriptor(
            cache, [cache.shape[0] * block_size, num_kv_heads * head_dim],
            [num_kv_heads * head_dim, 1], [page, HALF.value], gl.NVMMASharedLayout(128, 16),
        )
        for cache in (k_cache, v_cache)
    ]  # fmt: skip
    num_items = items.shape[0] - 1
    grid = min(num_items * num_kv_heads, _multiprocessors(q.device))
    _hopper_kernel[(grid,)](
        out, q_rows, *pages, items, num_items, block_tables, block_tables.stride(0),
        scale * LOG2E.value,
        HEADS=num_kv_heads, GROUP=group, GROUP_ROWS=group_rows, DIM=head_dim,
        BLOCK_SIZE=block_size, PAGE=page, num_warps=4,
    )  # fmt: skip


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
