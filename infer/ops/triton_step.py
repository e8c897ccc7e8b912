"""A whole decode step in few kernels: five a layer for a handful of rows, seven for more.

All launches use dependent launch where the device has it; see Note [dependent launch] in
``infer.ops.triton_common``. One rank only: nothing here sums over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.ops import LayerShape
from infer.ops.sample import Sampled, SamplingRows
from infer.ops.triton_common import dependent_launch
from infer.ops.triton_decode import FusedInput, decode_attention
from infer.ops.triton_head import sample_head
from infer.ops.triton_matrix import matrix_config, matrix_linear, sum_norm
from infer.ops.triton_norm import silu_mul
from infer.ops.triton_plan import DecodePlan
from infer.ops.triton_vector import MAX_ROWS, vector_linear
from infer.weights import LayerWeights, Weights

MATRIX_ROWS = 128  # up to so many rows our own matrix products are used, above cuBLAS


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """What all layers of one decode step share."""

    plan: DecodePlan
    block_tables: Tensor  # i32[rows, max_blocks]
    cos_sin: Tensor  # f32[num_positions, head_dim]
    slot_mapping: Tensor  # i32[num_seqs]
    shape: LayerShape
    pdl: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBuffers:
    """Activations of one step, reused by every layer. ``hidden`` is the residual stream."""

    hidden: Tensor  # [num_seqs, hidden_size]
    normed: Tensor  # [num_seqs, hidden_size]
    qkv: Tensor  # [num_seqs, (num_heads + 2 * num_kv_heads) * head_dim]
    attended: Tensor  # [num_seqs, num_heads * head_dim]
    activated: Tensor  # [num_seqs, intermediate_size]


def decode_buffers(hidden: Tensor, w: LayerWeights, shape: LayerShape) -> DecodeBuffers:
    """Allocate the activations for the embedded tokens ``hidden``, which the step overwrites."""
    rows = hidden.shape[0]
    return DecodeBuffers(
        hidden=hidden,
        normed=torch.empty_like(hidden),
        qkv=hidden.new_empty(rows, w.qkv.shape[0]),
        attended=hidden.new_empty(rows, shape.num_heads * shape.head_dim),
        activated=hidden.new_empty(rows, w.down.shape[1]),
    )


def decode_layers(weights: Weights, kv_k: tuple[Tensor, ...], kv_v: tuple[Tensor, ...],
                  b: DecodeBuffers, step: DecodeInputs) -> None:  # fmt: skip
    """Run all layers: ``b.hidden`` becomes the residual stream after the last one.

    With more than ``MAX_ROWS`` rows ``b.normed`` becomes its final RMSNorm. Writes the new
    position's K and V of every sequence.
    """
    if b.hidden.shape[0] <= MAX_ROWS:
        for w, k, v in zip(weights.layers, kv_k, kv_v, strict=True):
            vector_layer(w, k, v, b, step)
        return
    eps, pdl = step.shape.eps, step.pdl
    sum_norm(
        b.hidden, weights.layers[0].input_norm, b.normed, b.hidden,
        residual=None, eps=eps, pdl=pdl,
    )  # fmt: skip
    next_norms = [w.input_norm for w in weights.layers[1:]] + [weights.norm]
    for w, k, v, next_norm in zip(weights.layers, kv_k, kv_v, next_norms, strict=True):
        matrix_layer(w, next_norm, k, v, b, step)


def vector_layer(
    w: LayerWeights, k_cache: Tensor, v_cache: Tensor, b: DecodeBuffers, step: DecodeInputs
) -> None:
    """One layer in five kernels, for at most ``MAX_ROWS`` rows; updates ``b.hidden``."""
    VECTOR_STAGES["qkv"](w, b, step)
    attend(w, k_cache, v_cache, b, step)
    for name in ("o", "gate_up", "down"):
        VECTOR_STAGES[name](w, b, step)


def matrix_layer(
    w: LayerWeights,
    next_norm: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    b: DecodeBuffers,
    step: DecodeInputs,
) -> None:
    """One layer from ``b.normed`` to the next layer's (or the final) norm, ``b.normed`` again."""
    eps, pdl = step.shape.eps, step.pdl
    _matrix_qkv(w, b, step)
    attend(w, k_cache, v_cache, b, step)
    sum_norm(
        _matrix_o(w, b, step), w.post_norm, b.normed, b.hidden,
        residual=b.hidden, bias=w.o_bias, eps=eps, pdl=pdl,
    )  # fmt: skip
    _matrix_gate_up(w, b, step)
    sum_norm(
        _matrix_down(w, b, step), next_norm, b.normed, b.hidden,
        residual=b.hidden, bias=w.down_bias, eps=eps, pdl=pdl,
    )  # fmt: skip


def decode_sample(
    weights: Weights,
    b: DecodeBuffers,
    step: DecodeInputs,
    sample_rows: Tensor,
    positions: Tensor,
    params: SamplingRows,
) -> Sampled:
    """Sample the next token of every row after ``decode_layers``; rows that truncate excluded."""
    few = b.hidden.shape[0] <= MAX_ROWS
    return sample_head(
        b.hidden if few else b.normed, weights.lm_head, sample_rows, positions, params,
        norm=weights.norm if few else None, eps=step.shape.eps, pdl=step.pdl,
    )  # fmt: skip


def uses_dependent_launch(device: torch.device) -> bool:
    """Whether ``DecodeInputs.pdl`` may be set on this device."""
    return dependent_launch(device)


def attend(
    w: LayerWeights, k_cache: Tensor, v_cache: Tensor, b: DecodeBuffers, step: DecodeInputs
) -> None:
    """From ``b.qkv`` to ``b.attended``, and the new position's K and V."""
    shape = step.shape
    decode_attention(
        b.attended, b.qkv, k_cache, v_cache, step.block_tables, step.plan,
        num_heads=shape.num_heads, scale=shape.scale, sliding_window=shape.sliding_window,
        fused=FusedInput(
            q_norm=w.q_norm, k_norm=w.k_norm, cos_sin=step.cos_sin,
            slot_mapping=step.slot_mapping, eps=shape.eps,
        ),
        pdl=step.pdl,
    )  # fmt: skip


def _vector_qkv(w: LayerWeights, b: DecodeBuffers, step: DecodeInputs) -> None:
    vector_linear(
        b.hidden, w.qkv, b.qkv,
        bias=w.qkv_bias, norm=w.input_norm, eps=step.shape.eps, pdl=step.pdl,
    )  # fmt: skip


def _vector_o(w: LayerWeights, b: DecodeBuffers, step: DecodeInputs) -> None:
    vector_linear(b.attended, w.o, b.hidden, bias=w.o_bias, residual=b.hidden, pdl=step.pdl)


def _vector_gate_up(w: LayerWeights, b: DecodeBuffers, step: DecodeInputs) -> None:
    vector_linear(
        b.hidden, w.gate_up, b.activated,
        bias=w.gate_up_bias, norm=w.post_norm, eps=step.shape.eps, swiglu=True, pdl=step.pdl,
    )  # fmt: skip


def _vector_down(w: LayerWeights, b: DecodeBuffers, step: DecodeInputs) -> None:
    vector_linear(b.activated, w.down, b.hidden, bias=w.down_bias, residual=b.hidden, pdl=step.pdl)


def _matrix_qkv(w: LayerWeights, b: DecodeBuffers, step: DecodeInputs) -> None:
    rows, size_k = b.normed.shape
    if rows > MATRIX_ROWS:
        if w.qkv_bias is None:
            torch.mm(b.normed, w.qkv.t(), out=b.qkv)
        else:
            torch.addmm(w.qkv_bias, b.normed, w.qkv.t(), out=b.qkv)
        return
    config = matrix_config(rows, w.qkv.shape[0], size_k, b.normed.dtype.itemsize * 8)
    matrix_linear(b.normed, w.qkv, b.qkv, bias=w.qkv_bias, config=config, pdl=step.pdl)


def _matrix_o(w: LayerWeights, b: DecodeBuffers, step: DecodeInputs) -> Tensor:
    return _parts(b.attended, w.o, step.pdl)


def _matrix_gate_up(w: LayerWeights, b: DecodeBuffers, step: DecodeInputs) -> None:
    rows, size_k = b.normed.shape
    if rows > MATRIX_ROWS:
        silu_mul(F.linear(b.normed, w.gate_up, w.gate_up_bias), out=b.activated)
        return
    config = matrix_config(
        rows, w.down.shape[1], size_k, b.normed.dtype.itemsize * 8, swiglu=True
    )
    matrix_linear(
        b.normed, w.gate_up, b.activated,
        bias=w.gate_up_bias, swiglu=True, config=config, pdl=step.pdl,
    )  # fmt: skip


def _matrix_down(w: LayerWeights, b: DecodeBuffers, step: DecodeInputs) -> Tensor:
    return _parts(b.activated, w.down, step.pdl)


def _parts(x: Tensor, weight: Tensor, pdl: bool) -> Tensor:
    """``x @ weight.T`` without bias, whole or in parts, for ``sum_norm``."""
    rows, size_k = x.shape
    if rows > MATRIX_ROWS:
        return F.linear(x, weight)
    size_n = weight.shape[0]
    config = matrix_config(rows, size_n, size_k, x.dtype.itemsize * 8, parts=True)
    shape = (config.split, rows, size_n)
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    matrix_linear(x, weight, parts, config=config, pdl=pdl)
    return parts


# The projections of a layer by the name of their weight.
VECTOR_STAGES: Mapping[str, Callable[[LayerWeights, DecodeBuffers, DecodeInputs], None]] = {
    "qkv": _vector_qkv,
    "o": _vector_o,
    "gate_up": _vector_gate_up,
    "down": _vector_down,
}
MATRIX_STAGES: Mapping[str, Callable[[LayerWeights, DecodeBuffers, DecodeInputs], object]] = {
    "qkv": _matrix_qkv,
    "o": _matrix_o,
    "gate_up": _matrix_gate_up,
    "down": _matrix_down,
}
