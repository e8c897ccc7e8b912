"""Projections of a few rows, written in Gluon: weights on their way before the predecessor ends.

A program holds some weight rows over all of K, in registers or in shared memory, and has asked for
them before it waits (Note [dependent launch] in ``infer.ops.triton_common``). Weights are the left
operand of the product, so that x needs no more than eight columns. Every warp multiplies a part of
K of its own, so that no long chain of sums holds the result up; the parts are added at the end, in
a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from infer.ops.triton_common import (
    cdiv,
    hopper_gluon,
    indices,
    launch_options,
)

MAX_ROWS = 8
MAX_COLUMNS = 3072  # up to so many columns a program's share of the weights fits
STEP = 64  # columns of the smallest product


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsConfig:
    """Weight rows of a program, its warps, and whether weights wait in shared memory."""

    block_n: int
    num_warps: int
    shared: bool


def suits_rows(x: Tensor, *others: int) -> bool:
    """Whether ``rows_linear`` takes ``x``, and as many rows of other sizes, on this device."""
    columns = (x.shape[1], *others)
    return (
        x.shape[0] <= MAX_ROWS
        and max(columns) <= MAX_COLUMNS
        and all(n % 8 == 0 for n in columns)
        and x.element_size() == 2
        and hopper_gluon(x.device)
    )


def rows_config(rows: int, size_n: int, size_k: int, swiglu: bool) -> RowsConfig:
    """The table of configurations."""
    if swiglu and size_k <= 1024:
        return RowsConfig(block_n=16, num_warps=4, shared=False)
    if size_n > 2048:
        return RowsConfig(block_n=16 if swiglu else 32, num_warps=8, shared=True)
    if rows == 1:
        return RowsConfig(block_n=16, num_warps=4, shared=True)
    return RowsConfig(block_n=16, num_warps=8, shared=False)


@gluon.jit
def _load_weights(
    w_ptr, first_n,
    SIZE_N: gl.constexpr, SIZE_K: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr,
    CHUNKS: gl.constexpr, CHUNK_K: gl.constexpr, KINDS: gl.constexpr, SHARED: gl.constexpr,
    LEFT: gl.constexpr,
):  # fmt: skip
    """Ask for weight rows: chunks ``[PARTS, BLOCK_N, CHUNK_K]``, up after gate."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [PARTS, 1, 1], [2, 1, 0])
    # Consecutive rows lie in different halves of the banks.
    BANKS: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 2, [2, 1, 0])
    part, n, k = indices(COPY if SHARED else LEFT, PARTS, BLOCK_N, CHUNK_K)
    k += part * (CHUNKS * CHUNK_K)
    weights = ()
    for kind in gl.static_range(KINDS):
        where = w_ptr + (first_n + n + kind * SIZE_N).to(gl.int64) * SIZE_K + k
        for c in gl.static_range(CHUNKS):
            mask = (first_n + n < SIZE_N) & (c * CHUNK_K + k < SIZE_K)
            if SHARED:
                tile = gl.allocate_shared_memory(
                    w_ptr.dtype.element_ty, [PARTS, BLOCK_N, CHUNK_K], BANKS
                )
                async_copy.async_copy_global_to_shared(tile, where + c * CHUNK_K, mask)
                weights += (tile,)
            else:
                weights += (gl.load(where + c * CHUNK_K, mask=mask, other=0.0),)
    if SHARED:
        async_copy.commit_group()
    return weights


@gluon.jit
def _load_chunks(where, k, mask, SIZE_K: gl.constexpr, CHUNKS: gl.constexpr,
                 CHUNK_K: gl.constexpr):  # fmt: skip
    """Columns k.. of x or of the norm's weights as a tuple of chunks."""
    out = ()
    for c in gl.static_range(CHUNKS):
        inside = mask & (k + c * CHUNK_K < SIZE_K)
        out += (gl.load(where + c * CHUNK_K, mask=inside, other=0.0),)
    return out


@gluon.jit
def _rows_kernel(
    x_ptr, x_stride, w_ptr, bias_ptr, norm_ptr, residual_ptr, residual_stride, out_ptr,
    num_rows, eps,
    SIZE_N: gl.constexpr, SIZE_K: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr,
    CHUNKS: gl.constexpr, CHUNK_K: gl.constexpr, ROWS: gl.constexpr, NORM: gl.constexpr,
    SWIGLU: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, SHARED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One program's weight rows times all rows of x; the epilogue in float32."""
    if PDL:
        gdc_launch_dependents()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PARTS, 1, 1], [1, 16, 8])
    # Eight numbers in a row are a thread's: K is taken in another order, the same on both sides.
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    OUT: gl.constexpr = gl.BlockedLayout([PARTS, 1, 1], [1, 16, 2], [1, 1, PARTS], [1, 2, 0])
    OUT_N: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, OUT))
    OUT_M: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, OUT))
    first_n = gl.program_id(0) * BLOCK_N
    weights = _load_weights(
        w_ptr, first_n, SIZE_N, SIZE_K, BLOCK_N, PARTS, CHUNKS, CHUNK_K, 2 if SWIGLU else 1,
        SHARED, LEFT,
    )  # fmt: skip
    part, k, m = indices(RIGHT, PARTS, CHUNK_K, ROWS)
    k += part * (CHUNKS * CHUNK_K)
    if NORM:
        norms = _load_chunks(norm_ptr + k, k, k >= 0, SIZE_K, CHUNKS, CHUNK_K)
    out_n = first_n + gl.arange(0, BLOCK_N, OUT_N)
    out_m = gl.arange(0, ROWS, OUT_M)
    mask_n = out_n < SIZE_N
    mask_out = mask_n[:, None] & (out_m < num_rows)[None, :]
    if BIAS:
        bias = gl.load(bias_ptr + out_n, mask=mask_n, other=0.0).to(gl.float32)[:, None]
        if SWIGLU:
            up_bias = gl.load(bias_ptr + SIZE_N + out_n, mask=mask_n, other=0.0)
            up_bias = up_bias.to(gl.float32)[:, None]
    if PDL:
        gdc_wait()
    xs = _load_chunks(x_ptr + m * x_stride + k, k, m < num_rows, SIZE_K, CHUNKS, CHUNK_K)
    if RESIDUAL:
        where = residual_ptr + out_m[None, :] * residual_stride + out_n[:, None]
        residual = gl.load(where, mask=mask_out, other=0.0).to(gl.float32)
    if SHARED:
        async_copy.wait_group(0)
    acc = gl.zeros([PARTS, BLOCK_N, ROWS], gl.float32, MMA)
    acc_up = gl.zeros([PARTS, BLOCK_N, ROWS], gl.float32, MMA)
    squares = gl.zeros([PARTS, ROWS], gl.float32, gl.SliceLayout(1, RIGHT))
    for c in gl.static_range(CHUNKS):
        right = xs[c]
        if NORM:
            wide = right.to(gl.float32)
            squares += gl.sum(wide * wide, axis=1)
            right = (wide * norms[c].to(gl.float32)).to(right.dtype)
        acc = mma_v2(weights[c].load(LEFT) if SHARED else weights[c], right, acc)
        if SWIGLU:
            up = weights[CHUNKS + c]
            acc_up = mma_v2(up.load(LEFT) if SHARED else up, right, acc_up)
    out = gl.sum(gl.convert_layout(acc, OUT), axis=0)
    up = gl.sum(gl.convert_layout(acc_up, OUT), axis=0)
    if NORM:
        # The norm's factor is the same for all of K: it may come after the sum.
        scale = gl.rsqrt(gl.sum(squares, axis=0) / SIZE_K + eps)
        scale = gl.convert_layout(scale, OUT_M)[None, :]
        out = out * scale
        up = up * scale
    if BIAS:
        out += bias
    if SWIGLU:
        if BIAS:
            up += up_bias
        out = out / (1.0 + gl.exp(-out)) * up
    if RESIDUAL:
        out += residual
    where = out_ptr + out_m[None, :] * SIZE_N + out_n[:, None]
    gl.store(where, out.to(out_ptr.dtype.element_ty), mask=mask_out)


def rows_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual: Tensor | None = None,
    config: RowsConfig | None = None,
    pdl: bool = False,
) -> None:
    """What ``triton_vector.vector_linear`` does, where ``suits_rows``."""
    rows, size_k = x.shape
    size_n = weight.shape[0] // 2 if swiglu else weight.shape[0]
    config = config or rows_config(rows, size_n, size_k, swiglu)
    part_k = cdiv(size_k, config.num_warps * STEP) * STEP
    chunk_k = 2 * STEP if part_k % (2 * STEP) == 0 else STEP
    _rows_kernel[(cdiv(size_n, config.block_n),)](
        x, x.stride(0), weight, weight if bias is None else bias, weight if norm is None else norm,
        x if residual is None else residual, 0 if residual is None else residual.stride(0), out,
        rows, eps,
        SIZE_N=size_n, SIZE_K=size_k, BLOCK_N=config.block_n, PARTS=config.num_warps,
        CHUNKS=part_k // chunk_k, CHUNK_K=chunk_k, ROWS=MAX_ROWS, NORM=norm is not None,
        SWIGLU=swiglu, BIAS=bias is not None, RESIDUAL=residual is not None, SHARED=config.shared,
        PDL=pdl, num_warps=config.num_warps, **launch_options(pdl),
    )  # fmt: skip
