"""LM head with plain sampling for tens of rows on Hopper, written in Gluon.

One program a multiprocessor goes through tiles of 128 vocabulary ids. One warp copies weights and
rows of x into a ring in shared memory, by the tensor memory accelerator, also while two groups of
four warps score the logits of the tile before: so weights arrive without a pause. A row's best
score stays in registers to the end.
"""

from __future__ import annotations

import torch
import triton.language as tl
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from infer.ops.sampling import SamplingRows
from infer.ops.triton_common import cdiv, hopper_gluon, launch_options
from infer.ops.triton_noise import row_keys, sampling_score

MIN_ROWS = 33
MAX_ROWS = 128  # above, scores take longer than weights
ROWS = gl.constexpr(64)  # of a group of four warps
TILE = gl.constexpr(128)  # vocabulary ids
STEP = gl.constexpr(64)  # columns of x and of the weights that are copied together
RING_BYTES = 224 * 1024
NO_ID = gl.constexpr(0x7FFFFFFF)
PROPAGATE = gl.constexpr(tl.PropagateNan.ALL)


def suits_hopper_head(x: Tensor, lm_head: Tensor) -> bool:
    """Whether ``score_tiles`` takes ``x`` and ``lm_head``, on this device."""
    return (
        MIN_ROWS <= x.shape[0] <= MAX_ROWS
        and x.element_size() == 2
        and x.stride(0) % 8 == 0
        and lm_head.stride(0) % 8 == 0
        and hopper_gluon(x.device)
    )


@gluon.jit
def _copy(desc, boxes, ready, stage, first_row, column, PARTS: gl.constexpr):
    """Ask for the next columns of a tile, rows in as many parts as the groups of warps share."""
    for part in gl.static_range(PARTS):
        box = boxes.index(stage * PARTS + part)
        where = [first_row + part * box.shape[0], column]
        tma.async_copy_global_to_shared(desc, where, ready, box)


@gluon.jit
def _produce(
    x_desc, w_desc, ring, num_tiles,
    STEPS: gl.constexpr, STAGES: gl.constexpr, X_PARTS: gl.constexpr, W_PARTS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    xs, ws, ready, free = ring
    BYTES: gl.constexpr = (ROWS * X_PARTS + TILE) * STEP * 2
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    count = (num_tiles - first + stride - 1) // stride * STEPS
    # The ring is no longer than a tile: of the first stages weights come ahead of the predecessor.
    for i in gl.static_range(STAGES):
        mbarrier.expect(ready.index(i), BYTES)
        _copy(w_desc, ws, ready.index(i), i, first * TILE, i * STEP, W_PARTS)
    if PDL:
        gdc_wait()
    for i in gl.static_range(STAGES):
        _copy(x_desc, xs, ready.index(i), i, 0, i * STEP, X_PARTS)
    for step in range(STAGES, count):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
        bar = ready.index(stage)
        mbarrier.expect(bar, BYTES)
        tile = first + step // STEPS * stride
        column = step % STEPS * STEP
        _copy(w_desc, ws, bar, stage, tile * TILE, column, W_PARTS)
        _copy(x_desc, xs, bar, stage, 0, column, X_PARTS)


@gluon.jit
def _nan_maximum(a, b):
    return gl.maximum(a, b, propagate_nan=PROPAGATE)


@gluon.jit
def _halves(acc):
    """The left and the right columns; every thread has as many of both."""
    shape: gl.constexpr = [acc.shape[0], 2, acc.shape[1] // 2]
    left, right = gl.split(acc.reshape(shape).permute((0, 2, 1)))
    return left, right


@gluon.jit
def _score(logits, start, first_id, temperature, first, second, best, winner, SIZE_N: gl.constexpr):
    """Count logits of the ids from ``start`` on into the best of each row; NaN stays the best."""
    L: gl.constexpr = logits.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    ids = start + gl.arange(0, logits.shape[1], gl.SliceLayout(0, L))
    score = sampling_score(
        logits,
        gl.convert_layout(temperature, ROW)[:, None],
        gl.convert_layout(first, ROW)[:, None],
        gl.convert_layout(second, ROW)[:, None],
        (ids + first_id)[None, :],
        True,
    )
    score = gl.where((ids < SIZE_N)[None, :], score, float("-inf"))
    top = gl.reduce(score, 1, _nan_maximum)
    where = gl.min(gl.where(score == top[:, None], ids[None, :], NO_ID), axis=1)
    top = gl.convert_layout(top, best.type.layout)
    where = gl.convert_layout(where, best.type.layout)
    return _nan_maximum(best, top), gl.where(top > best, where, winner)


@gluon.jit
def _consume(
    outputs, sampling, num_rows, first_id, ring, num_tiles,
    WHO: gl.constexpr, SIZE_N: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    X_PARTS: gl.constexpr, W_PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    best_ptr, id_ptr = outputs
    sample_rows, positions, temperatures, seeds, choices = sampling
    xs, ws, ready, free = ring
    COLS: gl.constexpr = TILE // W_PARTS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    X_PART: gl.constexpr = WHO % X_PARTS
    W_PART: gl.constexpr = WHO % W_PARTS
    m = X_PART * ROWS + gl.arange(0, ROWS, BY_ROW)
    real = m < num_rows
    param = gl.load(sample_rows + m, mask=real, other=0)
    temperature = gl.load(temperatures + param, mask=real, other=0.0)
    first, second = row_keys(
        gl.load(seeds + 2 * param, mask=real, other=0),
        gl.load(seeds + 2 * param + 1, mask=real, other=0),
        gl.load(choices + param, mask=real, other=0),
        gl.load(positions + m, mask=real, other=0),
    )
    best = gl.full([ROWS], float("-inf"), gl.float32, BY_ROW)
    winner = gl.program_id(0) * TILE + gl.zeros([ROWS], gl.int32, BY_ROW)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        acc = gl.zeros([ROWS, COLS], gl.float32, ACC)
        for k in range(STEPS):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            x = xs.index(stage * X_PARTS + X_PART)
            w = ws.index(stage * W_PARTS + W_PART).permute((1, 0))
            token = warpgroup_mma(x, w, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[token])
            if k > 0:
                mbarrier.arrive(free.index((step - 1) % STAGES), count=1)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((step - 1) % STAGES), count=1)
        # A quarter at a time, so that few numbers are alive at once.
        left, right = _halves(acc)
        quarters = _halves(left) + _halves(right)
        for i in gl.static_range(4):
            start = tile * TILE + W_PART * COLS + i * (COLS // 4)
            best, winner = _score(
                quarters[i], start, first_id, temperature, first, second, best, winner, SIZE_N
            )
    if PDL:
        gdc_wait()
    out = (m * gl.num_programs(0) + gl.program_id(0)) * W_PARTS + W_PART
    gl.store(best_ptr + out, best, mask=real)
    gl.store(id_ptr + out, winner + first_id, mask=real)


@gluon.jit
def _hopper_head_kernel(
    x_desc, w_desc, best_ptr, id_ptr, sample_rows, positions, temperatures, seeds, choices,
    num_rows, first_id, num_tiles,
    SIZE_N: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, X_PARTS: gl.constexpr,
    W_PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = w_desc.dtype
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    xs = gl.allocate_shared_memory(dtype, [STAGES * X_PARTS, ROWS, STEP], x_desc.layout)
    ws = gl.allocate_shared_memory(
        dtype, [STAGES * W_PARTS, TILE // W_PARTS, STEP], w_desc.layout
    )  # fmt: skip
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    outputs = (best_ptr, id_ptr)
    sampling = (sample_rows, positions, temperatures, seeds, choices)
    ring = (xs, ws, ready, free)
    gl.warp_specialize(
        [
            (_consume, (
                outputs, sampling, num_rows, first_id, ring, num_tiles,
                0, SIZE_N, STEPS, STAGES, X_PARTS, W_PARTS, PDL,
            )),
            (_consume, (
                outputs, sampling, num_rows, first_id, ring, num_tiles,
                1, SIZE_N, STEPS, STAGES, X_PARTS, W_PARTS, PDL,
            )),
            (_produce, (
                x_desc, w_desc, ring, num_tiles, STEPS, STAGES, X_PARTS, W_PARTS, PDL,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def score_tiles(
    x: Tensor,
    lm_head: Tensor,
    sample_rows: Tensor,
    positions: Tensor,
    params: SamplingRows,
    *,
    vocab_offset: int,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """Best scores f32 and tokens i32 ``[rows, parts]`` of ``score_head``, by group of warps."""
    (rows, size_k), vocab = x.shape, lm_head.shape[0]
    tiles, steps = cdiv(vocab, TILE.value), cdiv(size_k, STEP.value)
    # Two groups of warps share the rows, or the ids where one takes all rows.
    x_parts = cdiv(rows, ROWS.value)
    w_parts = 3 - x_parts
    stage_bytes = (ROWS.value * x_parts + TILE.value) * STEP.value * 2
    programs = min(tiles, torch.cuda.get_device_properties(x.device).multi_processor_count)
    best = torch.empty((rows, programs * w_parts), dtype=torch.float32, device=x.device)
    ids = torch.empty((rows, programs * w_parts), dtype=torch.int32, device=x.device)
    layout = gl.NVMMASharedLayout(128, 16)
    x_desc, w_desc = (
        TensorDescriptor(t, list(t.shape), list(t.stride()), [box, STEP.value], layout)
        for t, box in ((x, ROWS.value), (lm_head, TILE.value // w_parts))
    )
    _hopper_head_kernel[(programs,)](
        x_desc, w_desc, best, ids, sample_rows, positions, params.temperature, params.seed,
        params.choice, rows, vocab_offset, tiles,
        SIZE_N=vocab, STEPS=steps, STAGES=min(RING_BYTES // stage_bytes, steps), X_PARTS=x_parts,
        W_PARTS=w_parts, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return best, ids
