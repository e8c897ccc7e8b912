"""The plain stages against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from infer.ops import torch_dense, torch_packed
from infer.ops.torch_dense import rope_rows, rotate


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_add_rms_norm(rows: int, scale: float) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(rows, 96) * scale, torch.randn(rows, 96), torch.rand(96)
    normed, total = torch_dense.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(
        normed.double(), rms(x + residual, weight, 1e-5), atol=1e-6, rtol=1e-5
    )
    alone, same = torch_dense.add_rms_norm(x, None, weight, 1e-5)
    assert torch.equal(same, x)
    torch.testing.assert_close(alone.double(), rms(x, weight, 1e-5), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 50.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_rms_norm_through_layer_norm(scale: float, offset: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 576) * scale + offset, torch.rand(576)
    got = torch_packed.rms_norm(x, weight.repeat(2), 1e-5)
    torch.testing.assert_close(got.double(), rms(x, weight, 1e-5), atol=1e-6, rtol=1e-5)


def test_rms_norm_through_layer_norm_in_bfloat16() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 576).bfloat16(), torch.rand(576).bfloat16()
    got = torch_packed.rms_norm(x, weight.repeat(2), 1e-5)
    torch.testing.assert_close(got.double(), rms(x, weight, 1e-5), atol=0, rtol=2**-8)


def test_silu_mul() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 320)
    gate, up = x.double().chunk(2, -1)
    got = torch_dense.silu_mul(x)
    torch.testing.assert_close(got.double(), gate * gate.sigmoid() * up, atol=1e-6, rtol=1e-5)


def test_rotation_is_transformers() -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(6, 3, 64), torch.tensor([0, 5, 3, 9, 1, 2], dtype=torch.int32)
    angles = torch.rand(10, 32) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    got = rotate(x, *rope_rows(table, positions, torch.float32))
    chosen = angles[positions.long()].repeat(1, 2)
    want, _ = apply_rotary_pos_emb(x[None], x[None], chosen.cos()[None], chosen.sin()[None], 2)
    torch.testing.assert_close(got, want[0], atol=1e-6, rtol=1e-5)
