"""Weights laid out for oneDNN, once, so that a CPU reads each of them at memory speed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from infer.weights import LayerWeights, Weights


def pack(weights: Weights) -> Weights:
    """Return ``weights`` with packed projections where that is faster (bfloat16 on a CPU).

    ``infer.ops.torch_dense.linear`` knows both forms. The embedding stays as it is, so a tied LM
    head becomes a packed copy.
    """
    if not can_pack(weights.norm.device, weights.norm.dtype):
        return weights
    return replace(
        weights,
        layers=tuple(_pack_layer(layer) for layer in weights.layers),
        lm_head=_packed(weights.lm_head),
    )


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has a packed linear for this device and dtype."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pack_layer(layer: LayerWeights) -> LayerWeights:
    return replace(
        layer,
        qkv=_packed(layer.qkv),
        o=_packed(layer.o),
        gate_up=_packed(layer.gate_up),
        down=_packed(layer.down),
    )


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight)  # type: ignore[no-any-return]
