"""Paged attention in plain torch against a loop over queries in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from infer.batch import AttentionMeta
from infer.ops import LayerShape
from infer.ops.torch_attention import attention, prepare


def brute_force(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, shape: LayerShape
) -> Tensor:
    """Every query by itself, every key found through its slot."""
    block_size, group = k_cache.shape[1], shape.num_heads // shape.num_kv_heads
    out = torch.zeros(q.shape[0], shape.num_heads, shape.head_dim, dtype=torch.float64)
    starts = meta.cu_seqlens_q.tolist()
    for s, row in enumerate(meta.seq_rows.tolist()):
        for t in range(starts[s], starts[s + 1]):
            last = int(meta.positions[t])
            first = 0 if shape.sliding_window is None else max(0, last + 1 - shape.sliding_window)
            where = [
                (int(meta.block_tables[row, p // block_size]), p % block_size)
                for p in range(first, last + 1)
            ]
            keys = torch.stack([k_cache[b, o] for b, o in where]).double()
            values = torch.stack([v_cache[b, o] for b, o in where]).double()
            for head in range(shape.num_heads):
                scores = keys[:, head // group] @ q[t, head].double() * shape.head_dim**-0.5
                out[t, head] = scores.softmax(0) @ values[:, head // group]
    return out.flatten(1)


def case(
    chunks: list[tuple[int, int]],
    shape: LayerShape,
    block_size: int,
    *,
    pad: int = 0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, AttentionMeta]:
    """Random q and pages for sequences of (query positions, context length); poison elsewhere."""
    rng = np.random.default_rng(seed)
    max_blocks = max(-(-length // block_size) for _, length in chunks) + 1
    total = len(chunks) * max_blocks
    tables = rng.permutation(total).reshape(len(chunks), max_blocks).astype(np.int32)
    torch.manual_seed(seed)
    pages = (total + 1, block_size, shape.num_kv_heads, shape.head_dim)
    k_cache, v_cache = torch.full(pages, 1e4), torch.full(pages, 1e4)
    for row, (_, length) in enumerate(chunks):
        for p in range(length):
            k_cache[tables[row, p // block_size], p % block_size] = torch.randn(pages[2:])
            v_cache[tables[row, p // block_size], p % block_size] = torch.randn(pages[2:])
    positions = np.concatenate([np.arange(n - count, n) for count, n in chunks])
    starts = np.cumsum([0] + [count for count, _ in chunks])
    q = torch.randn(len(positions) + pad, shape.num_heads, shape.head_dim)

    def i32(values: object) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int32))

    meta = AttentionMeta(
        positions=i32(np.pad(positions, (0, pad))),
        slot_mapping=i32(np.zeros(len(q))),
        seq_rows=i32(np.arange(len(chunks))),
        cu_seqlens_q=i32(starts),
        context_lens=i32([n for _, n in chunks]),
        block_tables=i32(np.concatenate([tables, tables[:1]])),
        max_seqlen_q=max(count for count, _ in chunks),
        max_seqlen_k=max(n for _, n in chunks),
        decode=all(count == 1 for count, _ in chunks),
    )
    return q, k_cache, v_cache, meta


def check(
    chunks: list[tuple[int, int]], shape: LayerShape, block_size: int, *, pad: int = 0
) -> None:
    q, k_cache, v_cache, meta = case(chunks, shape, block_size, pad=pad)
    table = torch.zeros(int(meta.positions.max()) + 1, shape.head_dim)
    before = k_cache.clone(), v_cache.clone()
    out = attention(q, k_cache, v_cache, prepare(meta, table, k_cache, shape), shape)
    want = brute_force(q, k_cache, v_cache, meta, shape)
    real = int(meta.cu_seqlens_q[-1])
    torch.testing.assert_close(out[:real].double(), want[:real], atol=1e-5, rtol=1e-4)
    assert torch.isfinite(out).all()
    assert torch.equal(before[0], k_cache)
    assert torch.equal(before[1], v_cache)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("block_size", [16, 256])
def test_mixed_batch(block_size: int, group: int, head_dim: int) -> None:
    shape = LayerShape(2 * group, 2, head_dim, 1e-6, None)
    check([(1, 15), (1, 16), (1, 17), (5, 5), (3, 33), (1, 1)], shape, block_size, pad=2)


@pytest.mark.parametrize("window", [1, 7, 16, 40])
@pytest.mark.parametrize("block_size", [16, 256])
def test_sliding_window(block_size: int, window: int) -> None:
    shape = LayerShape(4, 2, 64, 1e-6, window)
    check([(1, 60), (1, 5), (1, 33), (20, 20), (30, 61)], shape, block_size)


def test_decode_rows_of_very_different_lengths() -> None:
    shape = LayerShape(4, 2, 64, 1e-6, None)
    check([(1, 300), (1, 3), (1, 5), (1, 120), (1, 2), (1, 280), (1, 1), (1, 4)], shape, 16)


def test_one_row_over_neighbouring_pages_reads_them_in_place() -> None:
    shape = LayerShape(4, 2, 64, 1e-6, None)
    q, k_cache, v_cache, meta = case([(1, 60)], shape, 16)
    order = torch.tensor([*meta.block_tables[0].tolist()])
    moved_k, moved_v = torch.zeros_like(k_cache), torch.zeros_like(v_cache)
    moved_k[: len(order)], moved_v[: len(order)] = k_cache[order], v_cache[order]
    in_place = meta.block_tables.clone()
    in_place[0] = torch.arange(len(order))
    meta2 = AttentionMeta(
        meta.positions,
        meta.slot_mapping,
        meta.seq_rows,
        meta.cu_seqlens_q,
        meta.context_lens,
        in_place,
        1,
        60,
        True,
    )
    table = torch.zeros(64, 64)
    step = prepare(meta2, table, moved_k, shape)
    assert isinstance(step.tiles[0].blocks, slice)
    out = attention(q, moved_k, moved_v, step, shape)
    want = brute_force(q, k_cache, v_cache, meta, shape)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-4)
