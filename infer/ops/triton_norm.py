"""Elementwise kernels of larger batches: residual add with RMSNorm, and SwiGLU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.ops.triton_common import cdiv, next_power_of_2


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, x_stride, residual_stride, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(
            tl.float32
        )
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * HIDDEN + cols, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * HIDDEN + cols, x * scale * weight, mask=mask)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm of ``x + residual``. Returns (normed, sum), each ``[num_tokens, hidden]``.

    The sum is rounded to x's dtype before the norm, as a separate addition would do. Without a
    residual the sum is x itself.
    """
    num_tokens, hidden = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(out)
    if num_tokens:
        block = next_power_of_2(hidden)
        _add_rms_norm_kernel[(num_tokens,)](
            x, x if residual is None else residual, weight, out, total,
            x.stride(0), x.stride(0) if residual is None else residual.stride(0), eps,
            HIDDEN=hidden, BLOCK=block, HAS_RESIDUAL=residual is not None,
            num_warps=max(1, min(8, block // 256)),
        )  # fmt: skip
    return out, total


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < SIZE
    gate = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + SIZE + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + cols, gate * tl.sigmoid(gate) * up, mask=mask)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """SwiGLU: ``silu(gate) * up`` of ``[num_tokens, 2 * size]`` (gate first) -> ``[.., size]``."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        block = min(1024, next_power_of_2(size))
        _silu_mul_kernel[(num_tokens, cdiv(size, block))](
            gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=block, num_warps=4
        )
    return out
