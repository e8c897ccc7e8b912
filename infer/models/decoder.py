"""One dense decoder for Qwen3, Qwen2, Llama and Mistral: they differ in configuration only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.batch import Batch, merge_ids
from infer.config import ModelConfig
from infer.kv import KVCache
from infer.ops import LayerShape, Ops, WholeWeights
from infer.parallel import TP, all_reduce
from infer.weights import LayerWeights, Weights, local_config, vocab_range


def forward(
    cfg: ModelConfig,
    tp: TP,
    weights: Weights,
    kv: KVCache,
    batch: Batch,
    last_token: Tensor,
    ops: Ops,
) -> tuple[Tensor, KVCache]:
    """Run every token of ``batch`` through the layers and write its K and V.

    ``last_token`` is ``[rows]``, the token each row sampled last. Returns the residual stream
    ``[num_tokens, hidden_size]`` before the final norm (``logits`` takes it from there), and
    ``kv``, which is donated.
    """
    shape = layer_shape(cfg, tp)
    if isinstance(weights, WholeWeights):
        return weights.run(kv, batch, last_token, ops, shape), kv
    step = ops.prepare(batch.attention, ops.cos_sin, kv.k[0], shape)
    residual = embed(cfg, tp, weights, merge_ids(batch, last_token))
    hidden = torch.zeros_like(residual)
    run = ops.layer or layer
    for index, w in enumerate(weights.layers):
        hidden, residual = run(shape, tp, ops, w, kv.k[index], kv.v[index], hidden, residual, step)
    return hidden + residual, kv


def layer(
    shape: LayerShape,
    tp: TP,
    ops: Ops,
    w: LayerWeights,
    k_cache: Tensor,
    v_cache: Tensor,
    hidden: Tensor,
    residual: Tensor,
    step: object,
) -> tuple[Tensor, Tensor]:
    """Run one layer; ``hidden + residual`` is the stream before it, and after it."""
    hidden, residual = ops.add_rms_norm(hidden, residual, w.input_norm, shape.eps)
    qkv = ops.linear(hidden, w.qkv, w.qkv_bias)
    q = ops.qk_norm_rope_store(qkv, w.q_norm, w.k_norm, k_cache, v_cache, step, shape)
    hidden = ops.attention(q, k_cache, v_cache, step, shape)
    hidden = all_reduce(ops.linear(hidden, w.o, w.o_bias), tp)
    hidden, residual = ops.add_rms_norm(hidden, residual, w.post_norm, shape.eps)
    hidden = ops.silu_mul(ops.linear(hidden, w.gate_up, w.gate_up_bias))
    return all_reduce(ops.linear(hidden, w.down, w.down_bias), tp), residual


def logits(
    cfg: ModelConfig, tp: TP, weights: Weights, hidden: Tensor, logits_rows: Tensor, ops: Ops
) -> Tensor:
    """Return this rank's logits of the chosen tokens: float32 ``[num_logits, local vocab_size]``.

    ``hidden`` is what ``forward`` returned; the final norm is applied to the chosen rows only.
    """
    if isinstance(weights, WholeWeights):
        return weights.logits(hidden, logits_rows, cfg.rms_norm_eps)
    chosen = hidden.index_select(0, logits_rows)
    normed, _ = ops.add_rms_norm(chosen, None, weights.norm, cfg.rms_norm_eps)
    return ops.linear(normed, weights.lm_head, None).float()


def layer_shape(cfg: ModelConfig, tp: TP) -> LayerShape:
    """The numbers every layer of this rank shares."""
    local = local_config(cfg, tp)
    return LayerShape(
        num_heads=local.num_heads,
        num_kv_heads=local.num_kv_heads,
        head_dim=local.head_dim,
        eps=local.rms_norm_eps,
        sliding_window=local.sliding_window,
    )


def embed(cfg: ModelConfig, tp: TP, weights: Weights, input_ids: Tensor) -> Tensor:
    """Look up ``[num_tokens, hidden_size]``; ranks hold their share of rows and sum."""
    if tp.size == 1:
        return F.embedding(input_ids, weights.embed)
    held = vocab_range(cfg, tp)
    local = input_ids - held.start
    outside = (local < 0) | (local >= len(held))
    rows = F.embedding(local.masked_fill(outside, 0), weights.embed)
    return all_reduce(rows.masked_fill(outside[:, None], 0.0), tp)
