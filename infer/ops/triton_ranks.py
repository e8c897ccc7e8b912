"""A decode step on one of several ranks: the kernels of ``triton_step``, and sums over ranks.

A projection that ends a block (o, down) leaves this rank's share of a sum. For a few rows one rank
adds the residual stream to its share, so that the sum over ranks is the new stream and the next
projection can begin with its norm; for more rows the kernel that norms adds it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from infer.ops.triton_matrix import sum_norm
from infer.ops.triton_rows import rows_linear
from infer.ops.triton_step import (
    DecodeBuffers,
    DecodeInputs,
    attend,
    is_few,
    project,
    suits_few,
    swiglu,
)
from infer.ops.triton_vector import vector_linear
from infer.parallel import TP, all_reduce
from infer.weights import LayerWeights, Weights


def decode_layers_of_rank(
    weights: Weights,
    kv_k: tuple[Tensor, ...],
    kv_v: tuple[Tensor, ...],
    b: DecodeBuffers,
    step: DecodeInputs,
    tp: TP,
) -> DecodeBuffers:
    """``triton_step.decode_layers`` with this rank's heads and columns; the buffers that result.

    Their ``hidden`` and ``normed`` are the same on all ranks, up to rounding.
    """
    eps, pdl, layers = step.shape.eps, step.pdl, weights.layers
    if is_few(b):
        for w, k, v in zip(layers, kv_k, kv_v, strict=True):
            b = replace(b, hidden=_few_layer(w, k, v, b, step, tp))
        sum_norm(b.hidden, weights.norm, b.normed, b.hidden, residual=None, eps=eps, pdl=pdl)
        return b
    sum_norm(b.hidden, layers[0].input_norm, b.normed, b.hidden, residual=None, eps=eps, pdl=pdl)
    next_norms = (*(w.input_norm for w in layers[1:]), weights.norm)
    for w, next_norm, k, v in zip(layers, next_norms, kv_k, kv_v, strict=True):
        _many_layer(w, next_norm, k, v, b, step, tp)
    return b


def _few_layer(
    w: LayerWeights,
    k_cache: Tensor,
    v_cache: Tensor,
    b: DecodeBuffers,
    step: DecodeInputs,
    tp: TP,
) -> Tensor:
    """One layer in five kernels and two sums; returns the new residual stream."""
    eps, pdl, hidden = step.shape.eps, step.pdl, b.hidden
    linear = rows_linear if suits_few(b) else vector_linear
    linear(hidden, w.qkv, b.qkv, bias=w.qkv_bias, norm=w.input_norm, eps=eps, pdl=pdl)
    attend(w, k_cache, v_cache, b, step)
    share = torch.empty_like(hidden)
    adds = tp.rank == 0
    linear(b.attended, w.o, share, bias=w.o_bias, residual=hidden if adds else None, pdl=pdl)
    hidden = all_reduce(share, tp)
    linear(
        hidden,
        w.gate_up,
        b.activated,
        bias=w.gate_up_bias,
        norm=w.post_norm,
        eps=eps,
        swiglu=True,
        pdl=pdl,
    )
    share = torch.empty_like(hidden)
    linear(b.activated, w.down, share, bias=w.down_bias, residual=hidden if adds else None, pdl=pdl)
    return all_reduce(share, tp)


def _many_layer(
    w: LayerWeights,
    next_norm: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    b: DecodeBuffers,
    step: DecodeInputs,
    tp: TP,
) -> None:
    """One layer from ``b.normed`` to the next layer's (or the final) norm, ``b.normed`` again."""

    def add_and_norm(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor) -> None:
        share = torch.empty_like(b.hidden)
        project(x, weight, bias, share, step.pdl)
        sum_norm(
            all_reduce(share, tp),
            norm,
            b.normed,
            b.hidden,
            residual=b.hidden,
            eps=step.shape.eps,
            pdl=step.pdl,
        )

    project(b.normed, w.qkv, w.qkv_bias, b.qkv, step.pdl)
    attend(w, k_cache, v_cache, b, step)
    add_and_norm(b.attended, w.o, w.o_bias, w.post_norm)
    swiglu(b.normed, w, b.activated, step.pdl)
    add_and_norm(b.activated, w.down, w.down_bias, next_norm)
