"""Plain torch for everything but attention: the reference, and what runs on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``."""
    return F.linear(x, weight, bias)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm of x + residual, x + residual); the mean square is taken in float32."""
    total = x if residual is None else x + residual
    return F.rms_norm(total, (total.shape[-1],), weight, eps), total


def silu_mul(x: Tensor) -> Tensor:
    """SwiGLU: ``silu(gate) * up`` for ``x = [gate, up]`` along the last dimension."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rope_rows(cos_sin: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gather and widen table rows: (cos, cos) and (-sin, sin), each ``[T, 1, head_dim]``."""
    cos, sin = cos_sin.index_select(0, positions).to(dtype).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of ``[T, heads, head_dim]`` by ``rope_rows``' angles.

    The result has the wider dtype of ``x`` and the angles.
    """
    swapped = torch.roll(x, x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin)
