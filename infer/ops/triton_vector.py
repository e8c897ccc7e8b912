"""Projections of one row: matrix times vector at memory speed, with norm and epilogue fused.

A program holds a few weight rows over all of K in registers, loaded before its predecessor has
finished (Note [dependent launch]), then multiplies them with every row of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from infer.ops.triton_common import (
    await_predecessor,
    cdiv,
    launch_options,
    next_power_of_2,
    release_successor,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorConfig:
    """Shape of a program: weight rows it holds, columns of a chunk of K, warps."""

    block_n: int
    block_k: int
    num_warps: int


def vector_config(size_n: int, size_k: int, swiglu: bool = False) -> VectorConfig:
    """The table: 8 to 16 KiB of weights a program, so that two kernels fit side by side."""
    block_k = min(1024, next_power_of_2(size_k))
    rows = max(1, 8192 // next_power_of_2(size_k))
    if swiglu:
        rows = max(1, rows // 2)
    elif size_n <= 2048:
        rows = min(rows, 2)
    return VectorConfig(block_n=rows, block_k=block_k, num_warps=4)


@triton.jit
def load_weights(ptr, rows, mask_n, SIZE_K: tl.constexpr, BLOCK_K: tl.constexpr,
                  CHUNKS: tl.constexpr):  # fmt: skip
    """All of K of some weight rows, as a tuple of chunks."""
    cols = tl.arange(0, BLOCK_K)
    out = ()
    for c in tl.static_range(CHUNKS):
        k = c * BLOCK_K + cols
        mask = mask_n[:, None] & (k < SIZE_K)[None, :]
        out += (tl.load(ptr + rows[:, None] * SIZE_K + k[None, :], mask=mask, other=0.0),)
    return out


@triton.jit
def load_row(ptr, SIZE_K: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr):
    """A row of K numbers as a tuple of float32 chunks."""
    cols = tl.arange(0, BLOCK_K)
    out = ()
    for c in tl.static_range(CHUNKS):
        k = c * BLOCK_K + cols
        out += (tl.load(ptr + k, mask=k < SIZE_K, other=0.0).to(tl.float32),)
    return out


@triton.jit
def _vector_kernel(
    x_ptr, x_stride, w_ptr, bias_ptr, norm_ptr, residual_ptr, residual_stride, out_ptr,
    num_rows, eps,
    SIZE_N: tl.constexpr, SIZE_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr, NORM: tl.constexpr, SWIGLU: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program's weight rows times every row of x; the epilogue in float32."""
    release_successor(PDL)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = n < SIZE_N
    weights = load_weights(w_ptr, n, mask_n, SIZE_K, BLOCK_K, CHUNKS)
    if SWIGLU:
        ups = load_weights(w_ptr, n + SIZE_N, mask_n, SIZE_K, BLOCK_K, CHUNKS)
    if NORM:
        norms = load_row(norm_ptr, SIZE_K, BLOCK_K, CHUNKS)
    await_predecessor(PDL)
    x = load_row(x_ptr, SIZE_K, BLOCK_K, CHUNKS)
    for row in range(num_rows):
        following = tl.minimum(row + 1, num_rows - 1)
        next_x = load_row(x_ptr + following * x_stride, SIZE_K, BLOCK_K, CHUNKS)
        if RESIDUAL:
            residual = tl.load(residual_ptr + row * residual_stride + n, mask=mask_n, other=0.0)
        total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        total_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        squares = tl.zeros([BLOCK_K], tl.float32)
        for c in tl.static_range(CHUNKS):
            value = x[c]
            if NORM:
                squares += value * value
                value = value * norms[c]
            total += weights[c].to(tl.float32) * value[None, :]
            if SWIGLU:
                total_up += ups[c].to(tl.float32) * value[None, :]
        out = tl.sum(total, axis=1)
        scale = 1.0
        if NORM:
            # The norm's factor is the same for all of K: it may come after the sum.
            scale = tl.rsqrt(tl.sum(squares, axis=0) / SIZE_K + eps)
            out = out * scale
        if BIAS:
            out += tl.load(bias_ptr + n, mask=mask_n, other=0.0).to(tl.float32)
        if SWIGLU:
            up = tl.sum(total_up, axis=1) * scale
            if BIAS:
                up += tl.load(bias_ptr + SIZE_N + n, mask=mask_n, other=0.0).to(tl.float32)
            out = out * tl.sigmoid(out) * up
        if RESIDUAL:
            out += residual.to(tl.float32)
        tl.store(out_ptr + row * SIZE_N + n, out, mask=mask_n)
        x = next_x


def vector_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual: Tensor | None = None,
    config: VectorConfig | None = None,
    pdl: bool = False,
) -> None:
    """Write ``out = epilogue(rms_norm(x) @ weight.T + bias) [+ residual]``, all in float32 inside.

    ``x`` is ``[rows, K]``, few of them; ``weight`` is ``[N, K]``, or with ``swiglu`` ``[2 N, K]``,
    gate rows first; ``out`` and ``residual`` are ``[rows, N]``, and may be one tensor.
    """
    rows, size_k = x.shape
    size_n = weight.shape[0] // 2 if swiglu else weight.shape[0]
    config = config or vector_config(size_n, size_k, swiglu)
    _vector_kernel[(cdiv(size_n, config.block_n),)](
        x, x.stride(0), weight, weight if bias is None else bias, weight if norm is None else norm,
        x if residual is None else residual, 0 if residual is None else residual.stride(0), out,
        rows, eps,
        SIZE_N=size_n, SIZE_K=size_k, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        CHUNKS=cdiv(size_k, config.block_k), NORM=norm is not None, SWIGLU=swiglu,
        BIAS=bias is not None, RESIDUAL=residual is not None, PDL=pdl,
        num_warps=config.num_warps, **launch_options(pdl),
    )  # fmt: skip
