"""q/k norm, RoPE and the KV write of any batch, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.ops.triton_common import next_power_of_2


@triton.jit
def _store_kernel(
    qkv_ptr, qkv_stride, q_out, k_cache, v_cache, q_norm, k_norm, cos_sin, positions,
    slot_mapping, eps,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """ROWS heads (q, then k, then v) of one token."""
    DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, HALF)
    is_q = (heads < NUM_Q)[:, None]
    is_v = (heads >= NUM_Q + NUM_KV)[:, None]
    real = (heads < NUM_Q + 2 * NUM_KV)[:, None]
    where = qkv_ptr + token * qkv_stride + heads[:, None] * DIM + cols[None, :]
    lo = tl.load(where, mask=real, other=0.0).to(tl.float32)
    hi = tl.load(where + HALF, mask=real, other=0.0).to(tl.float32)
    raw_lo, raw_hi = lo, hi
    if NORM:
        mean = (tl.sum(lo * lo, axis=1) + tl.sum(hi * hi, axis=1)) / DIM
        scale = tl.rsqrt(mean + eps)[:, None]
        q_lo = tl.load(q_norm + cols).to(tl.float32)[None, :]
        q_hi = tl.load(q_norm + HALF + cols).to(tl.float32)[None, :]
        k_lo = tl.load(k_norm + cols).to(tl.float32)[None, :]
        k_hi = tl.load(k_norm + HALF + cols).to(tl.float32)[None, :]
        lo = lo * scale * tl.where(is_q, q_lo, k_lo)
        hi = hi * scale * tl.where(is_q, q_hi, k_hi)
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * DIM + cols
    cos = tl.load(angle)[None, :]
    sin = tl.load(angle + HALF)[None, :]
    new_lo = tl.where(is_v, raw_lo, lo * cos - hi * sin).to(q_out.dtype.element_ty)
    new_hi = tl.where(is_v, raw_hi, hi * cos + lo * sin).to(q_out.dtype.element_ty)
    q_where = q_out + token * NUM_Q * DIM + heads[:, None] * DIM + cols[None, :]
    tl.store(q_where, new_lo, mask=is_q)
    tl.store(q_where + HALF, new_hi, mask=is_q)
    slot = tl.load(slot_mapping + token).to(tl.int64) * NUM_KV
    k_where = (slot + heads[:, None] - NUM_Q) * DIM + cols[None, :]
    is_k = (heads[:, None] >= NUM_Q) & (heads[:, None] < NUM_Q + NUM_KV)
    tl.store(k_cache + k_where, new_lo, mask=is_k)
    tl.store(k_cache + k_where + HALF, new_hi, mask=is_k)
    v_where = k_where - NUM_KV * DIM
    tl.store(v_cache + v_where, new_lo, mask=is_v & real)
    tl.store(v_cache + v_where + HALF, new_hi, mask=is_v & real)


def qk_norm_rope_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    eps: float,
) -> Tensor:
    """Normalise (given both norms) and rotate q and k; write k and v to their slots; return q.

    ``qkv`` is ``[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`` with any row stride; the
    result is a fresh ``[num_tokens, num_heads, head_dim]``. Norm and rotation are float32, rounded
    once.
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = k_cache.shape[2:]
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        total = num_heads + 2 * num_kv_heads
        rows = min(next_power_of_2(total), 32)
        norm = q_norm is not None and k_norm is not None
        _store_kernel[(num_tokens, -(-total // rows))](
            qkv, qkv.stride(0), q, k_cache, v_cache,
            q_norm if norm else qkv, k_norm if norm else qkv,
            cos_sin, positions, slot_mapping, eps,
            NUM_Q=num_heads, NUM_KV=num_kv_heads, HALF=head_dim // 2, ROWS=rows, NORM=norm,
            num_warps=4,
        )  # fmt: skip
    return q
