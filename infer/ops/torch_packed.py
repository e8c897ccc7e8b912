"""Layers over weights laid out once for oneDNN: how a CPU reaches memory speed.

A decode step on a CPU is bound by reading weights, then by the number of torch calls: code and data
have left the caches by the time they are wanted again, so every call costs microseconds. Hence
packed weights, and RMSNorm through one library kernel. (Additions and products inside oneDNN's
projections were tried: they take longer there than by themselves.)
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kv import KVCache
from infer.ops import LayerShape
from infer.ops.torch_attention import TorchStep, attention, qk_norm_rope_store
from infer.ops.torch_dense import silu_mul
from infer.weights import LayerWeights, Weights

WIDE_ROWS = 24  # from here on a step is bound by arithmetic rather than by reading weights
WIDE_MEMORY_SHARE = 0.25  # of the machine's memory, at most, for float32 copies


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
class PackedForm:
    """All that ``layers`` and ``logits`` read, in one dtype."""

    layers: tuple[PackedLayer, ...]
    norm: Tensor  # [2 * hidden_size]
    lm_head: Tensor


@dataclass(frozen=True, slots=True)
class PackedWeights(Weights):
    """What ``pack`` makes of ``Weights``; its ``layers`` are empty, the forms hold them.

    ``wide`` holds the same numbers in float32, for steps of ``WIDE_ROWS`` tokens or more on
    processors that multiply float32 faster than bfloat16 (those without matrix units).
    """

    narrow: PackedForm
    wide: PackedForm | None

    def form(self, num_rows: int) -> PackedForm:
        """The form that is fastest for this many tokens."""
        return self.wide if self.wide is not None and num_rows >= WIDE_ROWS else self.narrow


def can_pack(weights: Weights) -> bool:
    """Whether oneDNN can lay these weights out: on a CPU, in a dtype it is fast in there."""
    if isinstance(weights, PackedWeights) or weights.norm.device.type != "cpu":
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weights.norm.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weights.norm.dtype == torch.float32


def pack(weights: Weights, *, wide: bool | None = None) -> Weights:
    """Return ``weights`` packed where that is possible, else unchanged.

    The embedding stays as it is, so a tied LM head becomes a packed copy. ``wide`` says whether to
    keep float32 copies as well; None measures whether they are faster and asks whether they fit.
    """
    if not can_pack(weights):
        return weights
    dtype = weights.norm.dtype
    if wide is None:
        wide = dtype != torch.float32 and _fits_wide(weights) and _prefers_float32()
    narrow = _form(weights, dtype)
    return PackedWeights(
        embed=weights.embed,
        layers=(),
        norm=weights.norm,
        lm_head=narrow.lm_head,
        narrow=narrow,
        wide=_form(weights, torch.float32) if wide else None,
    )


def layers(
    form: PackedForm, kv: KVCache, stream: Tensor, step: TorchStep, shape: LayerShape
) -> Tensor:
    """Run every layer over the residual stream ``[num_tokens, hidden_size]``, typed as ``form``."""
    for w, k_cache, v_cache in zip(form.layers, kv.k, kv.v, strict=True):
        qkv = _linear(rms_norm(stream, w.input_norm, shape.eps), w.qkv, w.qkv_bias)
        q = qk_norm_rope_store(qkv, w.q_norm, w.k_norm, k_cache, v_cache, step, shape)
        heads = attention(q, k_cache, v_cache, step, shape).to(stream.dtype)
        stream = _linear(heads, w.o, w.o_bias).add_(stream)
        normed = rms_norm(stream, w.post_norm, shape.eps)
        gated = silu_mul(_linear(normed, w.gate_up, w.gate_up_bias))
        stream = _linear(gated, w.down, w.down_bias).add_(stream)
    return stream


def logits(form: PackedForm, hidden: Tensor, eps: float) -> Tensor:
    """Final norm and LM head: float32 ``[num_logits, vocab_size]``."""
    return _linear(rms_norm(hidden, form.norm, eps), form.lm_head, None).float()


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


def _form(weights: Weights, dtype: torch.dtype) -> PackedForm:
    return PackedForm(
        layers=tuple(_layer(layer, dtype) for layer in weights.layers),
        norm=weights.norm.to(dtype).repeat(2),
        lm_head=_reorder(weights.lm_head, dtype),
    )


def _layer(w: LayerWeights, dtype: torch.dtype) -> PackedLayer:
    def cast(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(dtype)

    return PackedLayer(
        input_norm=w.input_norm.to(dtype).repeat(2),
        qkv=_reorder(w.qkv, dtype),
        qkv_bias=cast(w.qkv_bias),
        q_norm=cast(w.q_norm),
        k_norm=cast(w.k_norm),
        o=_reorder(w.o, dtype),
        o_bias=cast(w.o_bias),
        post_norm=w.post_norm.to(dtype).repeat(2),
        gate_up=_reorder(w.gate_up, dtype),
        gate_up_bias=cast(w.gate_up_bias),
        down=_reorder(w.down, dtype),
        down_bias=cast(w.down_bias),
    )


def _reorder(weight: Tensor, dtype: torch.dtype) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous())
    return packed


def _fits_wide(weights: Weights) -> bool:
    numbers = weights.lm_head.numel() + sum(
        w.qkv.numel() + w.o.numel() + w.gate_up.numel() + w.down.numel() for w in weights.layers
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return numbers * 4 <= WIDE_MEMORY_SHARE * memory


def _prefers_float32() -> bool:
    """Whether this processor multiplies float32 clearly faster than bfloat16."""
    best: dict[torch.dtype, float] = {}
    for dtype in (torch.bfloat16, torch.float32) * 3:
        x = torch.ones(32, 512, dtype=dtype)
        weight = _reorder(torch.ones(512, 512), dtype)
        for _ in range(4):
            start = time.perf_counter()
            _linear(x, weight, None)
            took = time.perf_counter() - start
            best[dtype] = min(took, best.get(dtype, took))
    return best[torch.float32] * 1.2 < best[torch.bfloat16]
