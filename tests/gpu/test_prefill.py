"""Varlen paged attention, the KV write and the elementwise kernels against plain float32."""

from __future__ import annotations

import itertools

import pytest
import torch

from infer.batch import AttentionMeta
from infer.ops import LayerShape, triton_norm, triton_prefill, triton_store
from tests.gpu import reference

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def _meta(device, queries, contexts, seq_rows, block_tables):
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    spans = [range(m - n, m) for n, m in zip(queries, contexts, strict=True)]
    positions = ints([*itertools.chain.from_iterable(spans)])
    return AttentionMeta(
        positions=positions, slot_mapping=positions, seq_rows=seq_rows,
        cu_seqlens_q=ints([0, *itertools.accumulate(queries)]), context_lens=ints(contexts),
        block_tables=block_tables, max_seqlen_q=max(queries), max_seqlen_k=max(contexts),
        decode=False,
    )  # fmt: skip


def _prefill(device, queries, contexts, group, kv_heads, head_dim, block_size, dtype, **options):
    """Outputs of ``repeat`` runs, and what they should be."""
    generator = torch.Generator().manual_seed(1)
    repeat = options.pop("repeat", 1)
    window = options.pop("sliding_window", None)
    pages = reference.make_pages(
        contexts, contexts, block_size=block_size, num_kv_heads=kv_heads, head_dim=head_dim,
        dtype=dtype, device=device, generator=generator,
    )  # fmt: skip
    q = torch.randn(sum(queries), group * kv_heads, head_dim, generator=generator)
    q = q.to(dtype).to(device)
    expected = torch.cat(
        [
            reference.attend(part, k, v, window)
            for part, k, v in zip(q.split(queries), pages.dense_k, pages.dense_v, strict=True)
        ]
    )
    meta = _meta(device, queries, contexts, pages.seq_rows, pages.block_tables)
    shape = LayerShape(
        num_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim=head_dim, eps=1e-6,
        sliding_window=window,
    )  # fmt: skip
    skip_single = options.pop("skip_single", False)
    config = options.pop("config", None)
    if config is None:
        plan = triton_prefill.plan_prefill(meta, pages.k, shape, skip_single=skip_single)
    else:
        plan = triton_prefill.make_plan(meta, config, shape, skip_single=skip_single)
    outs = []
    for _ in range(repeat):
        out = torch.full_like(q, float("nan"))
        triton_prefill.prefill_attention(
            out, q, pages.k, pages.v, pages.block_tables, plan, scale=head_dim**-0.5,
            sliding_window=window,
        )  # fmt: skip
        outs.append(out)
    return outs, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (2, 128), (3, 64), (4, 64), (8, 64)])
def test_prefill_groups(device, dtype, group, head_dim):
    outs, expected = _prefill(
        device, [17, 1, 32, 5], [17, 40, 48, 69], group, 2, head_dim, 16, dtype
    )
    assert reference.relative_error(outs[0], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("block_size", [16, 64])
def test_prefill_windows_and_blocks(device, window, block_size):
    config = triton_prefill.PrefillConfig(rows=32, tile=32, num_warps=4, num_stages=1)
    outs, expected = _prefill(
        device, [33, 2, 64, 31], [33, 66, 64, 129], 2, 2, 64, block_size, torch.float32,
        sliding_window=window, config=config,
    )  # fmt: skip
    assert reference.relative_error(outs[0], expected) < 2e-6


def test_prefill_leaves_single_queries_alone(device):
    outs, expected = _prefill(
        device, [1, 9, 1], [5, 9, 40], 2, 2, 64, 16, torch.float32, skip_single=True
    )
    assert outs[0][0].isnan().all()
    assert outs[0][-1].isnan().all()
    assert reference.relative_error(outs[0][1:-1], expected[1:-1]) < 2e-6


@pytest.mark.parametrize("skip_single", [False, True])
def test_plan_covers_every_query_once_and_starts_with_the_longest(device, skip_single):
    queries, contexts = [5, 1, 0, 40, 16, 0], [5, 70, 0, 41, 300, 0]
    rows = torch.tensor([3, 0, 9, 1, 2, 9], dtype=torch.int32, device=device)
    shape = LayerShape(
        num_heads=8, num_kv_heads=4, head_dim=64, eps=1e-6, sliding_window=None
    )  # fmt: skip
    config = triton_prefill.PrefillConfig(rows=32, tile=32, num_warps=4, num_stages=1)
    meta = _meta(device, queries, contexts, rows, rows)
    plan = triton_prefill.make_plan(meta, config, shape, skip_single=skip_single)
    items = plan.items.tolist()
    used = [item for item in items if item[2]]
    assert items[: len(used)] == used, "unused items come last"
    assert not items[-1][2], "the last one ends the list"
    seen = [
        (row, token + i, position + i)
        for row, token, count, position in used
        for i in range(count)
    ]  # fmt: skip
    token, expected = 0, []
    for row, n, m in zip(rows.tolist(), queries, contexts, strict=True):
        if n > skip_single:
            expected += [(row, token + i, m - n + i) for i in range(n)]
        token += n
    assert sorted(seen) == sorted(expected)
    assert all(count <= 16 for _, _, count, _ in used)
    starts = [position for *_, position in used]
    assert starts == sorted(starts, reverse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("window", [None, 300])
def test_prefill_real_sizes_are_right_and_stable(device, dtype, block_size, window):
    outs, expected = _prefill(
        device, [1000, 1, 129, 64, 300], [1000, 511, 129, 3000, 8192], 2, 8, 128, block_size,
        dtype, sliding_window=window, repeat=10,
    )  # fmt: skip
    assert reference.relative_error(outs[0], expected) < TOLERANCE[dtype] * 2
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (9, 3, 64), (40, 8, 64)])
def test_store(device, dtype, norm, heads, kv_heads, head_dim):
    generator = torch.Generator().manual_seed(2)
    tokens, width = 5, heads + 2 * kv_heads
    raw = torch.randn(tokens, width * head_dim + 8, generator=generator).to(dtype).to(device)
    raw = raw[:, : width * head_dim]
    q_norm, k_norm = (1 + torch.randn(2, head_dim, generator=generator) / 4).to(dtype).to(device)
    caches = torch.full((2, 3, 16, kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
    positions = torch.tensor([0, 7, 99, 31, 32], dtype=torch.int32, device=device)
    slots = torch.tensor([47, 0, 16, 15, 33], dtype=torch.int32, device=device)
    cos_sin = reference.cos_sin_table(100, head_dim, device)
    q = triton_store.qk_norm_rope_store(
        raw, q_norm if norm else None, k_norm if norm else None, caches[0], caches[1], cos_sin,
        positions, slots, heads, 1e-6,
    )  # fmt: skip
    dense = raw.float().view(tokens, width, head_dim)
    eq, ek, ev = dense.split((heads, kv_heads, kv_heads), dim=1)
    if norm:
        eq, ek = reference.rms_norm(eq, q_norm, 1e-6), reference.rms_norm(ek, k_norm, 1e-6)
    eq, ek = (reference.rotate(x, cos_sin, positions) for x in (eq, ek))
    stored_k, stored_v = (cache.view(48, kv_heads, head_dim)[slots.long()] for cache in caches)
    assert reference.relative_error(q, eq) < TOLERANCE[dtype]
    assert reference.relative_error(stored_k, ek) < TOLERANCE[dtype]
    assert torch.equal(stored_v.float(), ev)
    assert int(caches.isnan().sum()) == 2 * 43 * kv_heads * head_dim, "wrote beside its slots"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [576, 1024])
@pytest.mark.parametrize("with_residual", [False, True])
def test_add_rms_norm(device, dtype, hidden, with_residual):
    generator = torch.Generator().manual_seed(3)
    x, residual = torch.randn(2, 4, hidden, generator=generator).to(dtype).to(device)
    weight = (1 + torch.randn(hidden, generator=generator) / 4).to(dtype).to(device)
    normed, total = triton_norm.add_rms_norm(x, residual if with_residual else None, weight, 1e-5)
    added = x + residual if with_residual else x
    # The interpreter truncates to bfloat16 where the device rounds.
    assert torch.allclose(total, added, rtol=2**-7 if dtype == torch.bfloat16 else 0, atol=0)
    expected = reference.rms_norm(added, weight, 1e-5)
    assert reference.relative_error(normed, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul(device, dtype):
    x = torch.randn(3, 3072, generator=torch.Generator().manual_seed(4)).to(dtype).to(device)
    gate, up = x.double().chunk(2, dim=1)
    expected = gate / (1 + (-gate).exp()) * up
    assert reference.relative_error(triton_norm.silu_mul(x), expected) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("group", "head_dim", "block_size", "dtype"),
    [
        (1, 128, 64, torch.bfloat16),
        (2, 128, 16, torch.bfloat16),
        (2, 128, 64, torch.bfloat16),
        (2, 128, 256, torch.float16),
        (3, 64, 32, torch.bfloat16),
        (4, 64, 128, torch.bfloat16),
        (4, 128, 64, torch.float16),
        (8, 64, 64, torch.bfloat16),
        (8, 128, 16, torch.bfloat16),
        (16, 128, 64, torch.bfloat16),
    ],
)
def test_prefill_of_16_bits(device, group, head_dim, block_size, dtype):
    queries, contexts = [257, 1, 64, 130, 0, 500, 128], [257, 90, 1000, 131, 0, 777, 128]
    outs, expected = _prefill(
        device, queries, contexts, group, 3, head_dim, block_size, dtype, repeat=10
    )
    assert reference.relative_error(outs[0], expected) < 1e-2
    assert all(torch.equal(out, outs[0]) for out in outs[1:])
