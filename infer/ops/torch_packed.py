"""Layers over weights laid out once for oneDNN: a CPU without a C++ compiler.

A decode step on a CPU is bound by reading weights, then by the number of torch calls: code and data
have left the caches by the time they are wanted again, so every call costs microseconds. Hence
packed weights, and RMSNorm through one library kernel. (Additions and products inside oneDNN's
projections were tried: they take longer there than by themselves.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.batch import Batch, merge_ids
from infer.kv import KVCache
from infer.ops import LayerShape, Ops, WholeWeights
from infer.ops.torch_attention import attention, qk_norm_rope_store
from infer.ops.torch_dense import silu_mul
from infer.weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer. Projections are oneDNN tensors ``[out_features, in_features]``."""

    input_norm: Tensor  # [2 * hidden_size], the weight twice; see ``rms_norm``
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor  # [2 * hidden_size]
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class PackedWeights(WholeWeights):
    """What ``pack`` makes of ``Weights``; its ``layers`` are empty, ``packed`` holds them."""

    packed: tuple[PackedLayer, ...]
    packed_norm: Tensor  # [2 * hidden_size]
    packed_head: Tensor

    def run(
        self, kv: KVCache, batch: Batch, last_token: Tensor, ops: Ops, shape: LayerShape
    ) -> Tensor:
        """See ``WholeWeights``."""
        step = ops.prepare(batch.attention, ops.cos_sin, kv.k[0], shape)
        stream = F.embedding(merge_ids(batch, last_token), self.embed)
        for w, k_cache, v_cache in zip(self.packed, kv.k, kv.v, strict=True):
            qkv = _linear(rms_norm(stream, w.input_norm, shape.eps), w.qkv, w.qkv_bias)
            q = qk_norm_rope_store(qkv, w.q_norm, w.k_norm, k_cache, v_cache, step, shape)
            heads = attention(q, k_cache, v_cache, step, shape).to(stream.dtype)
            stream = _linear(heads, w.o, w.o_bias).add_(stream)
            normed = rms_norm(stream, w.post_norm, shape.eps)
            gated = silu_mul(_linear(normed, w.gate_up, w.gate_up_bias))
            stream = _linear(gated, w.down, w.down_bias).add_(stream)
        return stream

    def logits(self, hidden: Tensor, rows: Tensor, eps: float) -> Tensor:
        """See ``WholeWeights``."""
        chosen = hidden.index_select(0, rows)
        return _linear(rms_norm(chosen, self.packed_norm, eps), self.packed_head, None).float()


def can_pack(weights: Weights) -> bool:
    """Whether oneDNN can lay these weights out: on a CPU, in a dtype it is fast in there."""
    if isinstance(weights, PackedWeights) or weights.norm.device.type != "cpu":
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weights.norm.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weights.norm.dtype == torch.float32


def pack(weights: Weights, shape: LayerShape | None = None) -> Weights:
    """Return ``weights`` packed where that is possible, else unchanged.

    The embedding stays as it is, so a tied LM head becomes a packed copy.
    """
    if not can_pack(weights):
        return weights
    return PackedWeights(
        embed=weights.embed,
        layers=(),
        norm=weights.norm,
        lm_head=weights.lm_head,
        packed=tuple(_layer(layer) for layer in weights.layers),
        packed_norm=weights.norm.repeat(2),
        packed_head=_reorder(weights.lm_head),
    )


def rms_norm(x: Tensor, doubled_weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``[num_tokens, hidden_size]``.

    LayerNorm of ``[x, -x]`` has mean 0 and the mean square as its variance, so its first half is
    the RMSNorm of x. Torch has one kernel for it on a CPU, where RMSNorm takes ten calls.
    """
    both = torch.cat((x, x.neg()), dim=-1)
    return F.layer_norm(both, doubled_weight.shape, doubled_weight, None, eps)[:, : x.shape[-1]]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _layer(w: LayerWeights) -> PackedLayer:
    return PackedLayer(
        input_norm=w.input_norm.repeat(2),
        qkv=_reorder(w.qkv),
        qkv_bias=w.qkv_bias,
        q_norm=w.q_norm,
        k_norm=w.k_norm,
        o=_reorder(w.o),
        o_bias=w.o_bias,
        post_norm=w.post_norm.repeat(2),
        gate_up=_reorder(w.gate_up),
        gate_up_bias=w.gate_up_bias,
        down=_reorder(w.down),
        down_bias=w.down_bias,
    )


def _reorder(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed
