"""Projections of tens of rows: skinny matrix products, split over K where N alone is too little.

A product split over K leaves float32 partial sums, which ``sum_norm`` adds in a fixed order,
together with the residual, before the next RMSNorm.
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
    next_power_of_2,
    release_successor,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixConfig:
    """Tile of a program, ways the product is split over K, warps and pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int


def matrix_config(
    rows: int, size_n: int, size_k: int, bits: int, *, swiglu: bool = False, parts: bool = False
) -> MatrixConfig:
    """The table of configurations by shape; ``parts`` where the product may be split over K."""
    make = MatrixConfig
    block_m = max(16, min(64, next_power_of_2(rows)))
    if bits == 32:
        return make(block_m=16, block_n=16, block_k=32, split=1, num_warps=4, num_stages=1)
    if parts:
        split = max(1, min(4, size_k // 256))
        return make(
            block_m=block_m, block_n=64, block_k=128, split=split, num_warps=4, num_stages=4
        )
    if swiglu and block_m == 32:
        return make(block_m=32, block_n=64, block_k=64, split=1, num_warps=4, num_stages=4)
    stages = 6 if block_m < 64 and not swiglu else 4
    return make(block_m=block_m, block_n=32, block_k=128, split=1, num_warps=4, num_stages=stages)


@triton.jit
def _matrix_kernel(
    x_ptr, x_stride, w_ptr, bias_ptr, out_ptr, num_rows,
    SIZE_N: tl.constexpr, SIZE_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPAN: tl.constexpr, PARTIAL: tl.constexpr, SWIGLU: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of one part of K; PARTIAL stores float32 sums ``[part, rows, N]``."""
    release_successor(PDL)
    first_n = tl.program_id(0) * BLOCK_N
    part = tl.program_id(2)
    first_k = part * SPAN
    await_predecessor(PDL)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    mask_m = m < num_rows
    mask_n = n < SIZE_N
    x_where = x_ptr + m[:, None] * x_stride + first_k + k[None, :]
    w_where = w_ptr + n.to(tl.int64)[:, None] * SIZE_K + first_k + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, SPAN, BLOCK_K):
        if SIZE_K % SPAN == 0:
            mask_x = mask_m[:, None]
            mask_w = mask_n[:, None]
        else:
            inside = first_k + start + k < SIZE_K
            mask_x = mask_m[:, None] & inside[None, :]
            mask_w = mask_n[:, None] & inside[None, :]
        x = tl.load(x_where + start, mask=mask_x, other=0.0)
        w = tl.load(w_where + start, mask=mask_w, other=0.0)
        acc = dot(x, tl.trans(w), acc, PRECISION)
        if SWIGLU:
            w = tl.load(w_where + start + SIZE_N * SIZE_K, mask=mask_w, other=0.0)
            acc_up = dot(x, tl.trans(w), acc_up, PRECISION)
    mask = mask_m[:, None] & mask_n[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if SWIGLU:
        if BIAS:
            acc_up += tl.load(bias_ptr + SIZE_N + n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        acc = acc * tl.sigmoid(acc) * acc_up
    where = out_ptr + m.to(tl.int64)[:, None] * SIZE_N + n[None, :]
    if PARTIAL:
        where += part.to(tl.int64) * num_rows * SIZE_N
    tl.store(where, acc, mask=mask)


def matrix_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    swiglu: bool = False,
    config: MatrixConfig,
    pdl: bool = False,
) -> None:
    """Write ``out = epilogue(x @ weight.T + bias)``, or partial sums for ``sum_norm``.

    ``x`` is ``[rows, K]``; ``weight`` ``[N, K]``, or with ``swiglu`` ``[2 N, K]``, gate rows first.
    ``out`` is ``[rows, N]``, or f32[split, rows, N]: then neither bias nor swiglu is possible.
    """
    rows, size_k = x.shape
    size_n = weight.shape[0] // 2 if swiglu else weight.shape[0]
    partial = out.dim() == 3
    assert config.split == 1 or (partial and bias is None and not swiglu)
    span = cdiv(cdiv(size_k, config.split), config.block_k) * config.block_k
    grid = (cdiv(size_n, config.block_n), cdiv(rows, config.block_m), config.split)
    _matrix_kernel[grid](
        x, x.stride(0), weight, weight if bias is None else bias, out, rows,
        SIZE_N=size_n, SIZE_K=size_k, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, SPAN=span, PARTIAL=partial, SWIGLU=swiglu, BIAS=bias is not None,
        PRECISION=dot_precision(x.dtype), PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _sum_norm_kernel(
    x_ptr, bias_ptr, residual_ptr, residual_stride, weight_ptr, out_ptr, sum_ptr, num_rows, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: add its parts in order, bias and residual; store the sum and its RMSNorm."""
    release_successor(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    await_predecessor(PDL)
    # All loads first: the sum waits for one round trip.
    parts = ()
    for part in tl.static_range(PARTS):
        where = x_ptr + (part * num_rows + row) * HIDDEN + cols
        parts += (tl.load(where, mask=mask, other=0.0),)
    if BIAS:
        bias = tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        where = residual_ptr + row * residual_stride + cols
        residual = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    x = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        x += parts[part].to(tl.float32)
    if BIAS:
        x += bias
    if RESIDUAL:
        x += residual
    rounded = x.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * HIDDEN + cols, rounded, mask=mask)
    x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    tl.store(out_ptr + row * HIDDEN + cols, x * scale * weight, mask=mask)


def sum_norm(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    total: Tensor,
    *,
    residual: Tensor | None,
    bias: Tensor | None = None,
    eps: float,
    pdl: bool = False,
) -> None:
    """Write ``total = sum of x's parts + bias + residual`` and ``out`` = its RMSNorm.

    ``x`` is ``[rows, hidden]`` or partial sums f32[parts, rows, hidden]; ``residual`` may be
    ``total`` itself.
    """
    rows, hidden = out.shape
    block = next_power_of_2(hidden)
    _sum_norm_kernel[(rows,)](
        x, weight if bias is None else bias,
        total if residual is None else residual, 0 if residual is None else residual.stride(0),
        weight, out, total, rows, eps,
        HIDDEN=hidden, BLOCK=block, PARTS=x.shape[0] if x.dim() == 3 else 1,
        BIAS=bias is not None, RESIDUAL=residual is not None, PDL=pdl,
        num_warps=max(1, min(8, block // 256)), **launch_options(pdl),
    )  # fmt: skip
