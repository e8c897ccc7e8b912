"""The torch backend as torch.compile can take it: what it cannot see through is a declared op.

The KV write is the one op that mutates, attention only reads, and the rest is traced. Lengths
travel as tensors, because a Python number that changes from step to step would recompile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.ops import LayerShape
from infer.ops import torch_attention as eager
from infer.ops.torch_attention import Tile, TorchStep
from infer.ops.torch_dense import rotate

if TYPE_CHECKING:
    from infer.batch import AttentionMeta

SPARE = 2  # entries behind each list, because sizes 0 and 1 would be compiled on their own


@dataclass(frozen=True, slots=True)
class TracedStep:
    """``TorchStep`` with its tiles laid end to end."""

    cos: Tensor  # [num_tokens, 1, head_dim] in the model's dtype
    sin: Tensor
    slots: Tensor  # i64[num_tokens]
    tiles: Tensor  # i64[num_tiles + SPARE, 6] on the CPU: a tile's sizes, see ``_flatten``
    rows: Tensor  # i64: the tiles' query tokens
    blocks: Tensor  # i64: the tiles' pages
    masks: Tensor  # the tiles' masks in the cache's dtype


def prepare(meta: AttentionMeta, cos_sin: Tensor, k_cache: Tensor, shape: LayerShape) -> TracedStep:
    """See ``infer.ops.Prepare``."""
    return _flatten(eager.prepare(meta, cos_sin, k_cache, shape))


def qk_norm_rope_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    step: TracedStep,
    shape: LayerShape,
) -> Tensor:
    """See ``infer.ops.QKNormRopeStore``."""
    num_q, num_kv, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    heads = qkv.view(-1, num_q + 2 * num_kv, dim)
    q, k, v = heads[:, :num_q], heads[:, num_q:-num_kv], heads[:, -num_kv:]
    if q_norm is not None and k_norm is not None:
        q = F.rms_norm(q, (dim,), q_norm, shape.eps)
        k = F.rms_norm(k, (dim,), k_norm, shape.eps)
    store_kv(k_cache, v_cache, rotate(k, step.cos, step.sin), v, step.slots)
    return rotate(q, step.cos, step.sin)


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, step: TracedStep, shape: LayerShape
) -> Tensor:
    """See ``infer.ops.Attention``."""
    out: Tensor = paged_attention(
        q,
        k_cache,
        v_cache,
        step.tiles,
        step.rows,
        step.blocks,
        step.masks,
        shape.num_kv_heads,
        shape.eps,
    )
    return out


@torch.library.custom_op("infer::store_kv", mutates_args=("k_cache", "v_cache"))
def store_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write k and v ``[num_tokens, num_kv_heads, head_dim]`` to slots of the caches."""
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slots, v)


@store_kv.register_fake
def _(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    return None


@torch.library.custom_op("infer::paged_attention", mutates_args=())
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    rows: Tensor,
    blocks: Tensor,
    masks: Tensor,
    num_kv_heads: int,
    eps: float,
) -> Tensor:
    """``infer.ops.torch_attention.attention`` over a ``TracedStep``'s tensors."""
    shape = LayerShape(q.shape[1], num_kv_heads, q.shape[2], eps, None)  # windows are in masks
    return eager.attend(q, k_cache, v_cache, _tiles(tiles, rows, blocks, masks), shape)


@paged_attention.register_fake
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    rows: Tensor,
    blocks: Tensor,
    masks: Tensor,
    num_kv_heads: int,
    eps: float,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


def _flatten(step: TorchStep) -> TracedStep:
    device, dtype = step.cos.device, step.cos.dtype
    index = torch.zeros(SPARE, dtype=torch.int64, device=device)
    sizes, rows, blocks, masks = [], [], [], []
    for tile in step.tiles:
        rows.append(_indices(tile.rows, device))
        blocks.append(_indices(tile.blocks, device))
        if tile.mask is not None:
            masks.append(tile.mask.flatten())
        counts = (len(rows[-1]), len(blocks[-1]), tile.num_seqs, tile.num_keys)
        sizes.append((*counts, int(tile.decode), int(tile.mask is not None)))
    return TracedStep(
        cos=step.cos,
        sin=step.sin,
        slots=step.slots,
        tiles=torch.tensor([*sizes, *[(0,) * 6] * SPARE]),
        rows=torch.cat((*rows, index)),
        blocks=torch.cat((*blocks, index)),
        masks=torch.cat((*masks, index.to(dtype))),
    )


def _indices(where: slice | Tensor, device: torch.device) -> Tensor:
    if isinstance(where, slice):
        return torch.arange(where.start, where.stop, device=device)
    return where


def _tiles(tiles: Tensor, rows: Tensor, blocks: Tensor, masks: Tensor) -> tuple[Tile, ...]:
    """Undo ``_flatten``."""
    found = []
    row = block = cell = 0
    for num_rows, num_blocks, num_seqs, num_keys, decode, masked in tiles[:-SPARE].tolist():
        mask = None
        if masked:
            mask = masks[cell : cell + num_rows * num_keys].view(num_rows, num_keys)
            cell += num_rows * num_keys
        found.append(
            Tile(
                rows=rows[row : row + num_rows],
                num_seqs=num_seqs,
                decode=bool(decode),
                blocks=blocks[block : block + num_blocks],
                num_keys=num_keys,
                mask=mask[:, None, None] if mask is not None and decode else mask,
            )
        )
        row, block = row + num_rows, block + num_blocks
    return tuple(found)
