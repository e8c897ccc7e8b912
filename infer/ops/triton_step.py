"""A whole decode step in few kernels: five a layer for a handful of rows, seven for more.

All launches use dependent launch where the device has it; see Note [dependent launch] in
``infer.ops.triton_common``. One rank only: nothing here sums over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.ops import LayerShape
from infer.ops.triton_decode import FusedInput, decode_attention
from infer.ops.triton_fused import fused_attention, fused_config, suits_fused
from infer.ops.triton_matrix import matrix_config, matrix_linear, sum_norm
from infer.ops.triton_norm import silu_mul
from infer.ops.triton_plan import DecodeConfig, DecodePlan, decode_config
from infer.ops.triton_rows import rows_linear, suits_rows
from infer.ops.triton_tiles import suits_tiles, tiles_config, tiles_linear
from infer.ops.triton_vector import vector_linear
from infer.weights import LayerWeights, Weights

# Above any of these cuBLAS makes a projection.
LARGE = 1 << 23  # weights; for a model of 8B it is up to twice as fast as the tiles of Hopper
SWIGLU_ROWS = 64  # of gate and up, where those tiles do not make them
MATRIX_ROWS = 128  # of the others, likewise


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


def empty_buffers(like: Tensor, w: LayerWeights, shape: LayerShape) -> DecodeBuffers:
    """Allocate the activations, ``hidden`` of the shape of ``like``."""
    rows = like.shape[0]
    return DecodeBuffers(
        hidden=torch.empty_like(like),
        normed=torch.empty_like(like),
        qkv=like.new_empty(rows, w.qkv.shape[0]),
        attended=like.new_empty(rows, shape.num_heads * shape.head_dim),
        activated=like.new_empty(rows, w.down.shape[1]),
    )


def decode_buffers(hidden: Tensor, w: LayerWeights, shape: LayerShape) -> DecodeBuffers:
    """Allocate the activations, ``hidden`` with a copy of the embedded tokens.

    Call it after ``plan_decode``: the copy is the ordinary launch that Note [dependent launch] asks
    for between what the chain reads early and the chain.
    """
    buffers = empty_buffers(hidden, w, shape)
    buffers.hidden.copy_(hidden)
    return buffers


def decode_layers(
    weights: Weights,
    kv_k: tuple[Tensor, ...],
    kv_v: tuple[Tensor, ...],
    b: DecodeBuffers,
    step: DecodeInputs,
) -> None:
    """Run all layers; write the new position's K and V of every sequence.

    ``b.hidden`` becomes the residual stream after the last layer, ``b.normed`` its final RMSNorm.
    """
    eps, pdl, layers = step.shape.eps, step.pdl, weights.layers
    if is_few(b):
        for w, k, v in zip(layers, kv_k, kv_v, strict=True):
            few_layer(w, k, v, b, step)
        sum_norm(b.hidden, weights.norm, b.normed, b.hidden, residual=None, eps=eps, pdl=pdl)
        return
    sum_norm(b.hidden, layers[0].input_norm, b.normed, b.hidden, residual=None, eps=eps, pdl=pdl)
    next_norms = (*(w.input_norm for w in layers[1:]), weights.norm)
    for w, next_norm, k, v in zip(layers, next_norms, kv_k, kv_v, strict=True):
        many_layer(w, next_norm, k, v, b, step)


def few_layer(
    w: LayerWeights, k_cache: Tensor, v_cache: Tensor, b: DecodeBuffers, step: DecodeInputs
) -> None:
    """One layer in five kernels; updates ``b.hidden``."""
    eps, pdl = step.shape.eps, step.pdl
    linear = rows_linear if suits_few(b) else vector_linear
    linear(b.hidden, w.qkv, b.qkv, bias=w.qkv_bias, norm=w.input_norm, eps=eps, pdl=pdl)
    attend(w, k_cache, v_cache, b, step)
    linear(b.attended, w.o, b.hidden, bias=w.o_bias, residual=b.hidden, pdl=pdl)
    linear(
        b.hidden,
        w.gate_up,
        b.activated,
        bias=w.gate_up_bias,
        norm=w.post_norm,
        eps=eps,
        swiglu=True,
        pdl=pdl,
    )
    linear(b.activated, w.down, b.hidden, bias=w.down_bias, residual=b.hidden, pdl=pdl)


def many_layer(
    w: LayerWeights,
    next_norm: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    b: DecodeBuffers,
    step: DecodeInputs,
) -> None:
    """One layer from ``b.normed`` to the next layer's (or the final) norm, ``b.normed`` again."""

    def add_and_norm(parts: Tensor, bias: Tensor | None, norm: Tensor) -> None:
        sum_norm(
            parts,
            norm,
            b.normed,
            b.hidden,
            residual=b.hidden,
            bias=bias,
            eps=step.shape.eps,
            pdl=step.pdl,
        )

    project(b.normed, w.qkv, w.qkv_bias, b.qkv, step.pdl)
    attend(w, k_cache, v_cache, b, step)
    add_and_norm(_parts(b.attended, w.o, step.pdl), w.o_bias, w.post_norm)
    swiglu(b.normed, w, b.activated, step.pdl)
    add_and_norm(_parts(b.activated, w.down, step.pdl), w.down_bias, next_norm)


def step_config(num_seqs: int, k_cache: Tensor, shape: LayerShape) -> DecodeConfig:
    """How the plan of ``DecodeInputs`` divides the attention of ``num_seqs`` sequences."""
    if suits_fused(k_cache, shape.num_heads):
        return fused_config(num_seqs)
    return decode_config(num_seqs, k_cache.dtype.itemsize * 8)


def attend(
    w: LayerWeights, k_cache: Tensor, v_cache: Tensor, b: DecodeBuffers, step: DecodeInputs
) -> None:
    """From ``b.qkv`` to ``b.attended``, and the new position's K and V."""
    shape = step.shape
    attention = fused_attention if suits_fused(k_cache, shape.num_heads) else decode_attention
    attention(
        b.attended, b.qkv, k_cache, v_cache, step.block_tables, step.plan,
        num_heads=shape.num_heads, scale=shape.scale, sliding_window=shape.sliding_window,
        fused=FusedInput(
            q_norm=w.q_norm, k_norm=w.k_norm, cos_sin=step.cos_sin,
            slot_mapping=step.slot_mapping, eps=shape.eps,
        ),
        pdl=step.pdl,
    )  # fmt: skip


def is_few(b: DecodeBuffers) -> bool:
    """Whether projections can hold all of x, so that norm and sum need no kernel of their own."""
    return b.hidden.shape[0] == 1 or suits_few(b)


def suits_few(b: DecodeBuffers) -> bool:
    """Whether ``rows_linear`` makes all projections."""
    return suits_rows(b.hidden, b.attended.shape[1], b.activated.shape[1])


def _maker(x: Tensor, weight: Tensor, most_rows: int) -> Literal["tiles", "matrix", "cublas"]:
    """Who makes ``x @ weight.T``; ``most_rows`` is the limit where the tiles of Hopper do not."""
    if weight.numel() > LARGE:
        return "cublas"
    if suits_tiles(x, weight):
        return "tiles"
    return "matrix" if x.shape[0] <= most_rows else "cublas"


def project(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, pdl: bool) -> None:
    """Write ``out = x @ weight.T + bias``."""
    rows, size_k = x.shape
    maker = _maker(x, weight, MATRIX_ROWS)
    if maker == "tiles":
        tiles = tiles_config(rows, size_k, swiglu=False, parts=False)
        tiles_linear(x, weight, out, bias=bias, config=tiles, pdl=pdl)
    elif maker == "matrix":
        config = matrix_config(rows, weight.shape[0], size_k, x.dtype.itemsize * 8)
        matrix_linear(x, weight, out, bias=bias, config=config, pdl=pdl)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def swiglu(x: Tensor, w: LayerWeights, out: Tensor, pdl: bool) -> None:
    """Write SwiGLU of the gate and up projections of ``x``."""
    rows, size_k = x.shape
    maker = _maker(x, w.gate_up, SWIGLU_ROWS)
    if maker == "tiles":
        tiles = tiles_config(rows, size_k, swiglu=True, parts=False)
        tiles_linear(x, w.gate_up, out, bias=w.gate_up_bias, swiglu=True, config=tiles, pdl=pdl)
    elif maker == "matrix":
        config = matrix_config(rows, out.shape[1], size_k, x.dtype.itemsize * 8, swiglu=True)
        matrix_linear(x, w.gate_up, out, bias=w.gate_up_bias, swiglu=True, config=config, pdl=pdl)
    else:
        silu_mul(F.linear(x, w.gate_up, w.gate_up_bias), out=out)


def _parts(x: Tensor, weight: Tensor, pdl: bool) -> Tensor:
    """``x @ weight.T`` without bias, whole or in parts, for ``sum_norm``."""
    (rows, size_k), size_n = x.shape, weight.shape[0]
    maker = _maker(x, weight, MATRIX_ROWS)
    if maker == "tiles":
        tiles = tiles_config(rows, size_k, swiglu=False, parts=True)
        parts = x.new_empty((tiles.split, rows, size_n), dtype=torch.float32)
        tiles_linear(x, weight, parts, config=tiles, pdl=pdl)
    elif maker == "matrix":
        config = matrix_config(rows, size_n, size_k, x.dtype.itemsize * 8, parts=True)
        parts = x.new_empty((config.split, rows, size_n), dtype=torch.float32)
        matrix_linear(x, weight, parts, config=config, pdl=pdl)
    else:
        return F.linear(x, weight)
    return parts
