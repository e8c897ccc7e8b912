"""Projections of a few more rows than one: like ``triton_vector``, with tensor cores.

All of a program's weights are in registers before its predecessor has finished; x is padded to 16
rows. Every warp multiplies a part of K of its own, so that no long chain of sums holds the result
up; the parts are added at the end, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from infer.ops.triton_common import (
    await_predecessor,
    cdiv,
    dot,
    dot_precision,
    launch_options,
    release_successor,
)

MAX_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsConfig:
    """Shape of a program: weight rows it holds, columns a warp takes at once, warps."""

    block_n: int
    part_k: int
    num_warps: int


def rows_config(size_n: int, size_k: int, swiglu: bool, bits: int) -> RowsConfig:
    """The table of configurations."""
    if bits == 32:
        return RowsConfig(block_n=16, part_k=32, num_warps=4)
    if size_n > 2048:
        return RowsConfig(block_n=8 if swiglu else 16, part_k=256, num_warps=4)
    if size_k > 2048:
        return RowsConfig(block_n=16, part_k=128, num_warps=8)
    return RowsConfig(block_n=8, part_k=256, num_warps=4)


@triton.jit
def _load_parts(ptr, rows, mask_rows, stride, SIZE_K: tl.constexpr, PARTS: tl.constexpr,
                PART_K: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """Some rows of K numbers as a tuple of chunks ``[PARTS, rows, PART_K]``."""
    parts = tl.arange(0, PARTS)[:, None, None]
    cols = tl.arange(0, PART_K)[None, None, :]
    out = ()
    for c in tl.static_range(CHUNKS):
        k = (c * PARTS + parts) * PART_K + cols
        where = ptr + rows[None, :, None] * stride + k
        if SIZE_K == CHUNKS * PARTS * PART_K:
            mask = mask_rows[None, :, None]
        else:
            mask = mask_rows[None, :, None] & (k < SIZE_K)
        out += (tl.load(where, mask=mask, other=0.0),)
    return out


@triton.jit
def _rows_kernel(
    x_ptr, x_stride, w_ptr, bias_ptr, norm_ptr, residual_ptr, residual_stride, out_ptr,
    num_rows, eps,
    SIZE_N: tl.constexpr, SIZE_K: tl.constexpr, BLOCK_N: tl.constexpr, PART_K: tl.constexpr,
    PARTS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
    SWIGLU: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program's weight rows times all rows of x; the epilogue in float32."""
    release_successor(PDL)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = n < SIZE_N
    m = tl.arange(0, ROWS)
    mask_m = m < num_rows
    weights = _load_parts(w_ptr, n, mask_n, SIZE_K, SIZE_K, PARTS, PART_K, CHUNKS)
    if SWIGLU:
        ups = _load_parts(w_ptr, n + SIZE_N, mask_n, SIZE_K, SIZE_K, PARTS, PART_K, CHUNKS)
    if NORM:
        norms = _load_parts(
            norm_ptr, tl.arange(0, 1), tl.arange(0, 1) == 0, 0, SIZE_K, PARTS, PART_K, CHUNKS
        )
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=mask_n, other=0.0).to(tl.float32)
        if SWIGLU:
            up_bias = tl.load(bias_ptr + SIZE_N + n, mask=mask_n, other=0.0).to(tl.float32)
    await_predecessor(PDL)
    mask = mask_m[:, None] & mask_n[None, :]
    xs = _load_parts(x_ptr, m, mask_m, x_stride, SIZE_K, PARTS, PART_K, CHUNKS)
    if RESIDUAL:
        where = residual_ptr + m[:, None] * residual_stride + n[None, :]
        residual = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    acc = tl.zeros([PARTS, ROWS, BLOCK_N], tl.float32)
    acc_up = tl.zeros([PARTS, ROWS, BLOCK_N], tl.float32)
    squares = tl.zeros([PARTS, ROWS], tl.float32)
    for c in tl.static_range(CHUNKS):
        x = xs[c]
        if NORM:
            value = x.to(tl.float32)
            squares += tl.sum(value * value, axis=2)
            x = (value * norms[c].to(tl.float32)).to(x.dtype)
        acc = dot(x, tl.permute(weights[c], (0, 2, 1)), acc, PRECISION)
        if SWIGLU:
            acc_up = dot(x, tl.permute(ups[c], (0, 2, 1)), acc_up, PRECISION)
    out = tl.sum(acc, axis=0)
    up = tl.sum(acc_up, axis=0)
    if NORM:
        # The norm's factor is the same for all of K: it may come after the sum.
        scale = tl.rsqrt(tl.sum(squares, axis=0) / SIZE_K + eps)[:, None]
        out = out * scale
        up = up * scale
    if BIAS:
        out += bias[None, :]
    if SWIGLU:
        if BIAS:
            up += up_bias[None, :]
        out = out * tl.sigmoid(out) * up
    if RESIDUAL:
        out += residual
    tl.store(out_ptr + m[:, None] * SIZE_N + n[None, :], out, mask=mask)


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
    """What ``triton_vector.vector_linear`` does, for at most ``MAX_ROWS`` rows."""
    rows, size_k = x.shape
    size_n = weight.shape[0] // 2 if swiglu else weight.shape[0]
    config = config or rows_config(size_n, size_k, swiglu, x.dtype.itemsize * 8)
    chunk = config.num_warps * config.part_k
    _rows_kernel[(cdiv(size_n, config.block_n),)](
        x, x.stride(0), weight, weight if bias is None else bias, weight if norm is None else norm,
        x if residual is None else residual, 0 if residual is None else residual.stride(0), out,
        rows, eps,
        SIZE_N=size_n, SIZE_K=size_k, BLOCK_N=config.block_n, PART_K=config.part_k,
        PARTS=config.num_warps, CHUNKS=cdiv(size_k, chunk), ROWS=MAX_ROWS,
        NORM=norm is not None, SWIGLU=swiglu, BIAS=bias is not None,
        RESIDUAL=residual is not None, PRECISION=dot_precision(x.dtype),
        PDL=pdl, num_warps=config.num_warps, **launch_options(pdl),
    )  # fmt: skip
