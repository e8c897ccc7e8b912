"""The flash-attn backend: its calls against plain attention, and what it refuses.

Where the package is absent a stand-in with its two signatures takes its place, so that the paging,
the masks and the argument order are tested anyway.
"""

from __future__ import annotations

import sys
import types
from itertools import pairwise

import pytest
import torch

from infer.batch import AttentionMeta
from infer.errors import ConfigError
from infer.ops import LayerShape, flash_attn_backend
from tests.gpu import reference


def _paged(cache, table, length):
    return cache[table.long()].flatten(0, 1)[:length]


def _varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), block_table=None,
):  # fmt: skip
    """``flash_attn.flash_attn_varlen_func`` over pages."""
    assert causal
    assert dropout_p == 0
    assert k.shape[1] % 256 == 0
    starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert max_seqlen_q >= max(b - a for a, b in pairwise(starts))
    window = None if window_size == (-1, -1) else window_size[0] + 1
    outs = []
    for s, table in enumerate(block_table):
        length = ends[s + 1] - ends[s]
        assert length <= max_seqlen_k
        part = q[starts[s] : starts[s + 1]] * (softmax_scale * q.shape[-1] ** 0.5)
        keys, values = (_paged(cache, table, length) for cache in (k, v))
        outs.append(reference.attend(part, keys, values, window))
    return torch.cat(outs).to(q.dtype)


def _with_kvcache(
    q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1),
):  # fmt: skip
    """``flash_attn.flash_attn_with_kvcache`` without new keys."""
    ones = torch.arange(q.shape[0] + 1)
    ends = torch.cat((cache_seqlens.new_zeros(1), cache_seqlens.cumsum(0)))
    out = _varlen(
        q[:, 0], k_cache, v_cache, ones, ends, 1, 1 << 20, softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, block_table=block_table,
    )  # fmt: skip
    return out[:, None]


@pytest.fixture
def package(device, monkeypatch):
    """flash-attn, or the stand-in."""
    if device.type == "cuda":
        return pytest.importorskip("flash_attn")
    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = _varlen  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = _with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


def _batch(device, queries, contexts, *, window=None, dtype=torch.bfloat16, block_size=256):
    generator = torch.Generator().manual_seed(3)
    pages = reference.make_pages(
        contexts, contexts, block_size=block_size, num_kv_heads=2, head_dim=64, dtype=dtype,
        device=device, generator=generator,
    )  # fmt: skip
    q = torch.randn(sum(queries), 4, 64, generator=generator).to(dtype).to(device)
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    starts = [0]
    for count in queries:
        starts.append(starts[-1] + count)
    meta = AttentionMeta(
        positions=ints([0] * len(q)), slot_mapping=ints([0] * len(q)), seq_rows=pages.seq_rows,
        cu_seqlens_q=ints(starts), context_lens=ints(contexts), block_tables=pages.block_tables,
        max_seqlen_q=max(queries), max_seqlen_k=max(contexts), decode=max(queries) == 1,
    )  # fmt: skip
    parts = zip(q.split(queries), pages.dense_k, pages.dense_v, strict=True)
    expected = torch.cat([reference.attend(part, k, v, window) for part, k, v in parts])
    return pages, q, meta, expected, LayerShape(4, 2, 64, 1e-6, window)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [7, 1, 256, 30]])
def test_attention(device, package, queries, window):
    pages, q, meta, expected, shape = _batch(device, queries, [7, 255, 256, 300], window=window)
    step = flash_attn_backend.prepare(meta, torch.zeros(1, 64, device=device), pages.k, shape)
    out = flash_attn_backend.attention(q, pages.k, pages.v, step, shape)
    assert out.shape == (len(q), 4 * 64)
    assert reference.relative_error(out.view_as(expected), expected) < 1e-2


def test_operators_are_declared_rightly(device, package):
    pages, q, meta, *_ = _batch(device, [1, 1, 1, 1], [7, 255, 256, 300])
    tables = meta.block_tables.index_select(0, meta.seq_rows)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        flash_attn_backend.flash_decode,
        (q, pages.k.nan_to_num(), pages.v.nan_to_num(), meta.context_lens, tables, 0.125, -1),
        test_utils=checks,
    )
    ends = torch.tensor([0, 7, 262, 518, 818], dtype=torch.int32, device=device)
    torch.library.opcheck(
        flash_attn_backend.flash_varlen,
        (q, pages.k.nan_to_num(), pages.v.nan_to_num(), meta.cu_seqlens_q, ends, 1, 300, tables,
         0.125, 39),
        test_utils=checks,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "block_size", "named"),
    [(torch.float32, 256, "float32"), (torch.bfloat16, 16, "block_size is 16")],
)
def test_what_it_cannot_read_is_refused(device, dtype, block_size, named):
    pages, _, meta, _, shape = _batch(device, [1], [5], dtype=dtype, block_size=block_size)
    with pytest.raises(ConfigError, match=named):
        flash_attn_backend.prepare(meta, torch.zeros(1, 64, device=device), pages.k, shape)
