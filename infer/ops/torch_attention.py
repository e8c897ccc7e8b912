"""Attention over gathered pages in plain torch: the reference, and what runs on a CPU.

``prepare`` cuts a batch into tiles once a step. A tile is either many sequences with one query
each (decode) or one sequence with many (a prefill chunk); all layers share its page list and mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.ops import LayerShape
from infer.ops.torch_dense import rope_rows, rotate

if TYPE_CHECKING:
    from infer.batch import AttentionMeta

WASTE = 1.5  # decode rows of unequal lengths share a tile up to this many times their own pages


@dataclass(frozen=True, slots=True)
class Tile:
    """Sequences that attend together, ``num_pages`` pages each."""

    rows: slice | Tensor  # the queries' tokens, in the tile's order
    num_seqs: int
    decode: bool  # many sequences of one query; else one sequence of many
    blocks: Tensor | slice  # i64[num_seqs * num_pages]
    num_keys: int  # of the gathered positions of a sequence, how many are in the mask
    mask: Tensor | None  # added to scores: [num_seqs, 1, 1, num_keys] or [num_queries, num_keys]


@dataclass(frozen=True, slots=True)
class TorchStep:
    """What every layer of one step shares."""

    cos: Tensor  # [num_tokens, 1, head_dim] in the model's dtype
    sin: Tensor
    slots: Tensor  # i64[num_tokens]
    tiles: tuple[Tile, ...]


def prepare(meta: AttentionMeta, cos_sin: Tensor, k_cache: Tensor, shape: LayerShape) -> TorchStep:
    """Cut the batch into tiles and gather its rotations; see ``infer.ops.Prepare``."""
    cos, sin = rope_rows(cos_sin, meta.positions, k_cache.dtype)
    return TorchStep(cos, sin, meta.slot_mapping.long(), _tiles(meta, k_cache, shape))


def qk_norm_rope_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    step: TorchStep,
    shape: LayerShape,
) -> Tensor:
    """See ``infer.ops.QKNormRopeStore``."""
    num_q, num_kv, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    heads = qkv.view(-1, num_q + 2 * num_kv, dim)
    qk, v = heads.narrow(1, 0, num_q + num_kv), heads.narrow(1, num_q + num_kv, num_kv)
    if q_norm is not None and k_norm is not None:
        q = F.rms_norm(qk[:, :num_q], (dim,), q_norm, shape.eps)
        k = F.rms_norm(qk[:, num_q:], (dim,), k_norm, shape.eps)
        qk = torch.cat((q, k), dim=1)
    rotated = rotate(qk, step.cos, step.sin).to(k_cache.dtype)
    k = rotated.narrow(1, num_q, num_kv)
    k_cache.view(-1, num_kv, dim).index_copy_(0, step.slots, k)
    v_cache.view(-1, num_kv, dim).index_copy_(0, step.slots, v.to(v_cache.dtype))
    return rotated.narrow(1, 0, num_q)


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, step: TorchStep, shape: LayerShape
) -> Tensor:
    """See ``infer.ops.Attention``."""
    return attend(q, k_cache, v_cache, step.tiles, shape)


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: tuple[Tile, ...], shape: LayerShape
) -> Tensor:
    """Attend tile by tile; tokens outside of every tile (padding) get zeros."""
    if len(tiles) == 1 and tiles[0].rows == slice(0, q.shape[0]):
        return _attend(q, k_cache, v_cache, tiles[0], shape)
    out = q.new_zeros(q.shape[0], shape.num_heads * shape.head_dim)
    for tile in tiles:
        out[tile.rows] = _attend(q[tile.rows], k_cache, v_cache, tile, shape)
    return out


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, tile: Tile, shape: LayerShape) -> Tensor:
    num_kv, dim, scale = shape.num_kv_heads, shape.head_dim, shape.scale
    group = shape.num_heads // num_kv
    keys, values = _pages(k_cache, tile), _pages(v_cache, tile)
    if tile.decode:
        # The query heads of a KV head are the rows of one matrix product.
        out = F.scaled_dot_product_attention(
            q.view(tile.num_seqs, num_kv, group, dim),
            keys.view(tile.num_seqs, -1, num_kv, dim).transpose(1, 2),
            values.view(tile.num_seqs, -1, num_kv, dim).transpose(1, 2),
            attn_mask=tile.mask,
            scale=scale,
        )
        return out.reshape(tile.num_seqs, -1)
    # KV heads are the batch, and each one's keys serve its group at stride 0.
    keys, values = (
        x.view(-1, num_kv, dim)[: tile.num_keys].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
        for x in (keys, values)
    )
    out = F.scaled_dot_product_attention(
        q.view(-1, num_kv, group, dim).permute(1, 2, 0, 3),
        keys,
        values,
        attn_mask=tile.mask,
        is_causal=tile.mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(q.shape[0], -1)


def _pages(cache: Tensor, tile: Tile) -> Tensor:
    """The tile's pages ``[num_seqs * num_pages, ...]``: in place where they are neighbours."""
    if isinstance(tile.blocks, slice):
        return cache[tile.blocks]
    return cache.index_select(0, tile.blocks)


def _tiles(meta: AttentionMeta, k_cache: Tensor, shape: LayerShape) -> tuple[Tile, ...]:
    starts = meta.cu_seqlens_q.tolist()
    lengths = meta.context_lens.tolist()
    counts = [end - start for start, end in pairwise(starts)]
    decode = [s for s, count in enumerate(counts) if count == 1]
    tiles = [
        _decode_tile(meta, group, starts, lengths, k_cache, shape)
        for group in _by_length(decode, lengths, k_cache.shape[1], shape)
    ]
    tiles += [
        _prefill_tile(meta, s, starts[s], count, lengths[s], k_cache, shape)
        for s, count in enumerate(counts)
        if count > 1
    ]
    return tuple(tiles)


def _first_page(first_query: int, block_size: int, window: int | None) -> int:
    """The first page the query at this position can see."""
    return 0 if window is None else max(0, first_query - window + 1) // block_size


def _by_length(
    seqs: list[int], lengths: list[int], block_size: int, shape: LayerShape
) -> list[list[int]]:
    """Group decode rows so that padding to the longest of a group costs little."""
    if not seqs:
        return []

    def pages(s: int) -> int:
        first = _first_page(lengths[s] - 1, block_size, shape.sliding_window)
        return -(-lengths[s] // block_size) - first

    if max(map(pages, seqs)) * len(seqs) <= WASTE * sum(map(pages, seqs)) + 8:
        return [seqs]
    groups: dict[int, list[int]] = {}
    for s in seqs:
        groups.setdefault(pages(s).bit_length(), []).append(s)
    return list(groups.values())


def _decode_tile(
    meta: AttentionMeta,
    seqs: list[int],
    starts: list[int],
    lengths: list[int],
    k_cache: Tensor,
    shape: LayerShape,
) -> Tile:
    block_size, window, device = k_cache.shape[1], shape.sliding_window, k_cache.device
    first = starts[seqs[0]]
    adjacent = starts[seqs[-1]] - first == len(seqs) - 1
    rows = (
        slice(first, first + len(seqs))
        if adjacent
        else torch.tensor([starts[s] for s in seqs], device=device)
    )
    lens = torch.tensor([lengths[s] for s in seqs], device=device)
    pages = [_first_page(lengths[s] - 1, block_size, window) for s in seqs]
    width = max(-(-lengths[s] // block_size) - page for s, page in zip(seqs, pages, strict=True))
    first_pages = torch.tensor(pages, device=device)[:, None]
    # Columns past the last page repeat it: a row never reads pages that are not its own.
    columns = first_pages + torch.arange(width, device=device)
    columns = torch.minimum(columns, (lens[:, None] - 1) // block_size)
    table_rows = meta.seq_rows.long()[torch.tensor(seqs, device=device)]
    blocks = meta.block_tables[table_rows[:, None], columns].long().flatten()
    num_keys = width * block_size
    positions = first_pages * block_size + torch.arange(num_keys, device=device)
    hidden = positions >= lens[:, None]
    if window is not None:
        hidden |= positions < lens[:, None] - window
    mask = torch.zeros(hidden.shape, dtype=k_cache.dtype, device=device)
    mask.masked_fill_(hidden, float("-inf"))
    return Tile(rows, len(seqs), True, _neighbours(blocks), num_keys, mask[:, None, None])


def _prefill_tile(
    meta: AttentionMeta,
    seq: int,
    first: int,
    count: int,
    length: int,
    k_cache: Tensor,
    shape: LayerShape,
) -> Tile:
    block_size, window, device = k_cache.shape[1], shape.sliding_window, k_cache.device
    page = _first_page(length - count, block_size, window)
    last = -(-length // block_size)
    blocks = _neighbours(meta.block_tables[meta.seq_rows[seq].long(), page:last].long())
    num_keys = length - page * block_size
    rows = slice(first, first + count)
    if count == length and (window is None or length <= window):
        return Tile(rows, 1, False, blocks, num_keys, None)  # a whole prompt: causal says it all
    queries = torch.arange(length - count, length, device=device)[:, None]
    keys = torch.arange(page * block_size, length, device=device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    mask = torch.zeros(hidden.shape, dtype=k_cache.dtype, device=device)
    mask.masked_fill_(hidden, float("-inf"))
    return Tile(rows, 1, False, blocks, num_keys, mask)


def _neighbours(blocks: Tensor) -> Tensor | slice:
    """Ids that count up by one are a slice: their pages need no copy."""
    first, last = int(blocks[0]), int(blocks[-1])
    if last - first == len(blocks) - 1 and bool((blocks.diff() == 1).all()):
        return slice(first, last + 1)
    return blocks
