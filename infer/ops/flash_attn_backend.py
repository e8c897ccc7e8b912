"""Attention by the flash-attn 2 package over paged KV; the other stages are the Triton backend's.

The package wants pages of a multiple of 256 positions, 16-bit numbers and block tables in batch
order. Its two functions are declared operators here, so that a traced layer may hold them; they
read the caches and return a fresh tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infer.batch import AttentionMeta
from infer.errors import ConfigError
from infer.ops import LayerShape

PAGE = 256  # flash-attn's page is a multiple of this


@dataclass(frozen=True, slots=True)
class FlashStep:
    """What every layer of one step shares."""

    meta: AttentionMeta
    cos_sin: Tensor
    block_tables: Tensor  # i32[num_seqs, max_blocks], in batch order
    cu_seqlens_k: Tensor | None  # i32[num_seqs + 1]; None: one query position a sequence


def prepare(meta: AttentionMeta, cos_sin: Tensor, k_cache: Tensor, shape: LayerShape) -> FlashStep:
    """Put block tables in batch order; see ``infer.ops.Prepare``.

    Raises:
        ConfigError: flash-attn cannot read these pages.
    """
    if k_cache.shape[1] % PAGE:
        raise ConfigError(
            f"block_size is {k_cache.shape[1]}, flash-attn needs a multiple of {PAGE}; set "
            f"block_size={PAGE} or attention_backend='triton'"
        )
    if k_cache.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"dtype is {k_cache.dtype}, flash-attn computes in bfloat16 or float16; choose one of "
            "them or attention_backend='triton'"
        )
    tables = meta.block_tables.index_select(0, meta.seq_rows)
    if meta.decode:
        return FlashStep(meta, cos_sin, tables, None)
    zero = meta.context_lens.new_zeros(1)
    ends = meta.context_lens.cumsum(0, dtype=torch.int32)
    return FlashStep(meta, cos_sin, tables, torch.cat((zero, ends)))


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, step: FlashStep, shape: LayerShape
) -> Tensor:
    """See ``infer.ops.Attention``."""
    window = -1 if shape.sliding_window is None else shape.sliding_window - 1
    meta = step.meta
    if step.cu_seqlens_k is None:
        out: Tensor = torch.ops.purestep.flash_decode(
            q, k_cache, v_cache, meta.context_lens, step.block_tables, shape.scale, window
        )
    else:
        out = torch.ops.purestep.flash_varlen(
            q,
            k_cache,
            v_cache,
            meta.cu_seqlens_q,
            step.cu_seqlens_k,
            meta.max_seqlen_q,
            meta.max_seqlen_k,
            step.block_tables,
            shape.scale,
            window,
        )
    return out.view(q.shape[0], -1)


@torch.library.custom_op("purestep::flash_decode", mutates_args=())
def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """One query position a sequence: q ``[num_seqs, num_heads, head_dim]`` to the same shape.

    ``window`` is how many earlier positions a query sees; -1: all.
    """
    from flash_attn import flash_attn_with_kvcache

    out: Tensor = flash_attn_with_kvcache(
        q.unsqueeze(1),
        k_cache,
        v_cache,
        cache_seqlens=context_lens,
        block_table=block_tables,
        softmax_scale=scale,
        causal=True,
        window_size=(window, 0 if window >= 0 else -1),
    )
    return out.squeeze(1)


@torch.library.custom_op("purestep::flash_varlen", mutates_args=())
def flash_varlen(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_tables: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """Any number of query positions a sequence, the last of its context; see ``flash_decode``."""
    from flash_attn import flash_attn_varlen_func

    out: Tensor = flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=scale,
        causal=True,
        window_size=(window, 0 if window >= 0 else -1),
        block_table=block_tables,
    )
    return out


def _like_q(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q)


flash_decode.register_fake(_like_q)
flash_varlen.register_fake(_like_q)
