"""Projections of tens to hundreds of rows on Hopper, written in Gluon: tiles of 64 weight rows.

A program asks for its weights before it waits (Note [dependent launch] in
``infer.ops.triton_common``), by the tensor memory accelerator into shared memory, all of them where
they fit; rows of x follow through a ring. Weights are the left operand of the product, of which the
hardware takes 64 rows, so that x may have any number of rows from 16 on.
"""

from __future__ import annotations

from dataclasses import dataclass

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

from infer.ops.triton_common import cdiv, hopper_gluon, launch_options, next_power_of_2

MAX_ROWS = 256
BLOCK_N = gl.constexpr(64)  # weight rows of a tile
ROW_OF_BANKS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesConfig:
    """Rows and columns of x a program takes at once, ways the product is split over K, warps.

    ``shared_kib`` is a program's shared memory, barriers aside, of which ``weight_kib`` at most is
    for weights. What it leaves of a multiprocessor's 227 KiB is for programs of other kernels.
    """

    block_m: int
    block_k: int
    split: int
    num_warps: int
    shared_kib: int = 226  # all there is
    weight_kib: int = 128

    def stages(self, steps: int) -> tuple[int, int]:
        """Tiles of x and of weights in shared memory, where a program takes ``steps`` of them."""
        tile_bytes, row_bytes = BLOCK_N.value * self.block_k * 2, self.block_m * self.block_k * 2
        weights = min(steps, self.weight_kib * 1024 // tile_bytes)
        rows = min(weights, 4, (self.shared_kib * 1024 - weights * tile_bytes) // row_bytes)
        assert rows >= min(2, steps), "a tile of x is replaced while the next one is in use"
        return rows, weights


def suits_tiles(x: Tensor, weight: Tensor) -> bool:
    """Whether ``tiles_linear`` takes ``x`` and ``weight``, on this device."""
    return (
        x.shape[0] <= MAX_ROWS
        and x.element_size() == 2
        and x.stride(0) % 8 == 0
        and weight.stride(0) % 8 == 0
        and hopper_gluon(x.device)
    )


def tiles_config(rows: int, size_k: int, *, swiglu: bool, parts: bool) -> TilesConfig:
    """The table of configurations; ``parts`` where the product may be split over K."""
    make = TilesConfig
    split = max(1, min(4, size_k // 256)) if parts else 1
    if rows <= 32:
        block_k = 128 if parts else 256
        return make(
            block_m=max(16, next_power_of_2(rows)), block_k=block_k, split=split, num_warps=4
        )
    if rows <= 64:
        return make(block_m=64, block_k=128, split=split, num_warps=4)
    if rows <= 128:
        memory = (226, 128) if rows <= 96 else (160, 64)
        tile = (128, 64) if swiglu else (64, 128)
    else:
        memory = (176, 80)
        tile = (256, 64) if swiglu else (128, 128)
    return make(
        block_m=tile[0], block_k=tile[1], split=split, num_warps=8 if tile[0] == 256 else 4,
        shared_kib=memory[0], weight_kib=memory[1],
    )  # fmt: skip


@gluon.jit
def _load_weights(w_desc, boxes, ready, step, first_n, first_k, SIZE_N: gl.constexpr,
                  STAGES: gl.constexpr, PARTS: gl.constexpr, KINDS: gl.constexpr):  # fmt: skip
    """Ask for the weights of a step: columns by 64, as they lie in a tile, gate rows before up."""
    for part in gl.static_range(PARTS):
        for kind in gl.static_range(KINDS):
            box = boxes.index((step % STAGES * PARTS + part) * KINDS + kind)
            where = [first_n + kind * SIZE_N, first_k + (step * PARTS + part) * 64]
            tma.async_copy_global_to_shared(w_desc, where, ready, box)


@gluon.jit
def _tiles_kernel(
    x_desc, w_desc, bias_ptr, out_ptr, num_rows,
    SIZE_N: gl.constexpr, STEPS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
    X_STAGES: gl.constexpr, W_STAGES: gl.constexpr, SWIGLU: gl.constexpr, BIAS: gl.constexpr,
    PARTIAL: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One tile of one part of K, transposed; PARTIAL stores float32 sums ``[part, rows, N]``."""
    if PDL:
        gdc_launch_dependents()
    KINDS: gl.constexpr = 2 if SWIGLU else 1
    TILE_N: gl.constexpr = BLOCK_N // KINDS
    PARTS: gl.constexpr = BLOCK_K // 64
    W_BYTES: gl.constexpr = BLOCK_N * BLOCK_K * 2
    X_BYTES: gl.constexpr = BLOCK_M * BLOCK_K * 2
    GROUPS: gl.constexpr = WARPS // 4  # each takes a part of the rows of x
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, BLOCK_M // GROUPS, 16])
    dtype: gl.constexpr = w_desc.dtype
    first_m = gl.program_id(0) * BLOCK_M
    first_n = gl.program_id(1) * TILE_N
    first_k = gl.program_id(2) * (STEPS * BLOCK_K)
    ws = gl.allocate_shared_memory(dtype, [W_STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    boxes = ws._reinterpret(dtype, [W_STAGES * PARTS * KINDS, TILE_N, 64], w_desc.layout)
    xs = gl.allocate_shared_memory(dtype, [X_STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    x_ready = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(w_ready, count=1)
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_ready.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(w_ready, W_STAGES * W_BYTES)
    for i in gl.static_range(W_STAGES):
        _load_weights(w_desc, boxes, w_ready, i, first_n, first_k, SIZE_N, W_STAGES, PARTS, KINDS)
    if PDL:
        gdc_wait()
    for i in gl.static_range(X_STAGES):
        ready = x_ready.index(i)
        mbarrier.expect(ready, X_BYTES)
        tma.async_copy_global_to_shared(
            x_desc, [first_m, first_k + i * BLOCK_K], ready, xs.index(i)
        )
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    mbarrier.wait(w_ready, 0)
    for i in gl.static_range(STEPS):
        mbarrier.wait(x_ready.index(i % X_STAGES), (i // X_STAGES) & 1)
        x = xs.index(i % X_STAGES).permute((1, 0))
        acc = warpgroup_mma(ws.index(i % W_STAGES), x, acc, is_async=True)
        if i >= 1 and i - 1 + X_STAGES < STEPS:
            # The product of the step before is done: its tile of x may be replaced, and weights
            # that are no nearer (there are no fewer tiles of them). One barrier stands for both.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            ready = x_ready.index((i - 1) % X_STAGES)
            following = i - 1 + X_STAGES
            mbarrier.expect(ready, X_BYTES + (W_BYTES if i - 1 + X_STAGES >= W_STAGES else 0))
            tma.async_copy_global_to_shared(
                x_desc,
                [first_m, first_k + following * BLOCK_K],
                ready,
                xs.index((i - 1) % X_STAGES),
            )
            if i - 1 + X_STAGES >= W_STAGES:
                _load_weights(
                    w_desc, boxes, ready, following, first_n, first_k, SIZE_N, W_STAGES, PARTS,
                    KINDS,
                )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.invalidate(w_ready)
    for i in gl.static_range(X_STAGES):
        mbarrier.invalidate(x_ready.index(i))

    WIDE: gl.constexpr = 4 if PARTIAL else 8  # numbers of 16 bytes
    if SWIGLU:
        PAIR: gl.constexpr = gl.BlockedLayout(
            [WIDE, 1, 2], [TILE_N // WIDE, 32 * WIDE // TILE_N, 1], [1, WARPS, 1], [2, 0, 1]
        )
        pairs = acc.reshape([2, TILE_N, BLOCK_M]).permute((1, 2, 0))
        out, up = gl.split(gl.convert_layout(pairs, PAIR))
    else:
        OUT: gl.constexpr = gl.BlockedLayout(
            [WIDE, 1], [BLOCK_N // WIDE, 32 * WIDE // BLOCK_N], [1, WARPS], [0, 1]
        )
        out = gl.convert_layout(acc, OUT)
    n = first_n + gl.arange(0, TILE_N, gl.SliceLayout(1, out.type.layout))
    m = first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, out.type.layout))
    mask_n = n < SIZE_N
    if BIAS:
        out += gl.load(bias_ptr + n, mask=mask_n, other=0.0).to(gl.float32)[:, None]
        if SWIGLU:
            up += gl.load(bias_ptr + SIZE_N + n, mask=mask_n, other=0.0).to(gl.float32)[:, None]
    if SWIGLU:
        out = out / (1.0 + gl.exp(-out)) * up
    where = out_ptr + m[None, :].to(gl.int64) * SIZE_N + n[:, None]
    if PARTIAL:
        where += gl.program_id(2).to(gl.int64) * num_rows * SIZE_N
    mask = mask_n[:, None] & (m < num_rows)[None, :]
    gl.store(where, out.to(out_ptr.dtype.element_ty), mask=mask)


def tiles_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    swiglu: bool = False,
    config: TilesConfig,
    pdl: bool = False,
) -> None:
    """What ``triton_matrix.matrix_linear`` does, where ``suits_tiles``."""
    rows, size_k = x.shape
    size_n = weight.shape[0] // 2 if swiglu else weight.shape[0]
    partial = out.dim() == 3
    assert config.split == 1 or (partial and bias is None and not swiglu)
    tile_n = BLOCK_N.value // 2 if swiglu else BLOCK_N.value
    steps = cdiv(cdiv(size_k, config.split), config.block_k)
    x_stages, w_stages = config.stages(steps)
    describe = lambda t, *box: TensorDescriptor(  # noqa: E731
        t, list(t.shape), list(t.stride()), list(box), ROW_OF_BANKS
    )
    grid = (cdiv(rows, config.block_m), cdiv(size_n, tile_n), config.split)
    _tiles_kernel[grid](
        describe(x, config.block_m, config.block_k), describe(weight, tile_n, 64),
        weight if bias is None else bias, out, rows,
        SIZE_N=size_n, STEPS=steps, BLOCK_M=config.block_m, BLOCK_K=config.block_k,
        X_STAGES=x_stages, W_STAGES=w_stages, SWIGLU=swiglu, BIAS=bias is not None,
        PARTIAL=partial, WARPS=config.num_warps, PDL=pdl, num_warps=config.num_warps,
        **launch_options(pdl),
    )  # fmt: skip
