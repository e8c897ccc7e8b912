"""Decode attention against plain float32 attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from infer.ops import triton_decode, triton_fused, triton_plan
from tests.gpu import reference

EPS = 1e-6
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
ON_GPU = torch.cuda.is_available()


def _run(
    device, lens, group, kv_heads, head_dim, block_size, dtype, *, fused, norm=True, window=None,
    seed=0, repeat=1, config=None, strided=False, attention=triton_decode.decode_attention,
):  # fmt: skip
    """Return (outputs, reference, pages, new keys and values) of one random case."""
    generator = torch.Generator().manual_seed(seed)
    filled = [n - 1 for n in lens] if fused else lens
    pages = reference.make_pages(
        filled, lens, block_size=block_size, num_kv_heads=kv_heads, head_dim=head_dim,
        dtype=dtype, device=device, generator=generator,
    )  # fmt: skip
    heads, num_seqs = group * kv_heads, len(lens)
    context_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    cos_sin = reference.cos_sin_table(max(lens), head_dim, device)
    width = heads + 2 * kv_heads if fused else heads
    raw = torch.randn(num_seqs, width * head_dim + 64 * strided, generator=generator)
    raw = raw.to(dtype).to(device)[:, : width * head_dim]
    q_norm, k_norm = (1 + torch.randn(2, head_dim, generator=generator) / 4).to(dtype).to(device)
    positions = context_lens - 1
    new = raw.float().view(num_seqs, width, head_dim)
    expected, new_kv = [], []
    q = new[:, :heads]
    if fused:
        k, v = new[:, heads : heads + kv_heads], new[:, heads + kv_heads :]
        if norm:
            q, k = reference.rms_norm(q, q_norm, EPS), reference.rms_norm(k, k_norm, EPS)
        q = reference.rotate(q, cos_sin, positions)
        k = reference.rotate(k, cos_sin, positions)
        new_kv = [k, v]
    for s in range(num_seqs):
        ks, vs = pages.dense_k[s], pages.dense_v[s]
        if fused:
            ks, vs = torch.cat((ks, k[s : s + 1])), torch.cat((vs, v[s : s + 1]))
        expected.append(reference.attend(q[s : s + 1], ks, vs, window))
    slots = torch.stack([pages.slots(s, n - 1, n)[0] for s, n in enumerate(lens)])
    config = config or triton_plan.decode_config(num_seqs, dtype.itemsize * 8)
    plan = triton_plan.plan_decode(
        pages.seq_rows, context_lens, config=config, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, sliding_window=window,
    )  # fmt: skip
    for buffer in (plan.partial, plan.maxima, plan.sums):
        buffer.fill_(float("nan"))
    outs = []
    for _ in range(repeat):
        out = torch.full((num_seqs, heads * head_dim), float("nan"), dtype=dtype, device=device)
        attention(
            out, raw, pages.k, pages.v, pages.block_tables, plan, num_heads=heads,
            scale=head_dim**-0.5, sliding_window=window,
            fused=triton_decode.FusedInput(
                q_norm=q_norm if norm else None, k_norm=k_norm if norm else None, cos_sin=cos_sin,
                slot_mapping=slots.to(torch.int32), eps=EPS,
            ) if fused else None,
        )  # fmt: skip
        outs.append(out)
    assert not plan.counters.any()
    return outs, torch.cat(expected), pages, slots, new_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (2, 128), (3, 64), (4, 64), (8, 128)])
@pytest.mark.parametrize("fused", [False, True])
def test_groups_and_block_boundaries(device, dtype, group, head_dim, fused):
    lens = [1, 15, 16, 17, 33]
    outs, expected, pages, slots, new_kv = _run(
        device, lens, group, 2, head_dim, 16, dtype, fused=fused, strided=True
    )
    assert reference.relative_error(outs[0].view_as(expected), expected) < TOLERANCE[dtype]
    if fused:
        flat = lambda cache: cache.view(-1, *cache.shape[2:])[slots]  # noqa: E731
        assert reference.relative_error(flat(pages.k), new_kv[0]) < TOLERANCE[dtype]
        assert torch.equal(flat(pages.v).float(), new_kv[1])


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize("fused", [False, True])
def test_chunks_of_unequal_sequences(device, stages, window, fused):
    config = triton_plan.DecodeConfig(tile=16, num_warps=4, stages=stages, min_chunk=16, chunks=6)
    lens = [7, 130, 1, 64, 65]
    outs, expected, *_ = _run(
        device, lens, 2, 2, 64, 32, torch.float32,
        fused=fused, norm=stages == 1, window=window, config=config,
    )  # fmt: skip
    assert reference.relative_error(outs[0].view_as(expected), expected) < 2e-6


def test_a_sequence_alone_takes_many_chunks(device):
    config = replace(triton_plan.decode_config(1, 16), min_chunk=32, chunks=8)
    for length in (31, 32, 33, 255, 256, 257):
        outs, expected, *_ = _run(
            device, [length], 2, 2, 64, 16, torch.bfloat16, fused=True, config=config
        )
        assert reference.relative_error(outs[0].view_as(expected), expected) < 1e-2


def _need_fused(device, head_dim=128):
    """Skip where only Triton's kernel runs."""
    cache = torch.empty(1, 16, 1, head_dim, dtype=torch.bfloat16, device=device)
    if not triton_fused.suits_fused(cache, 1):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (2, 128), (3, 64), (8, 128)])
@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize("num_warps", [1, 4])
def test_fused_attention_of_unequal_sequences(device, group, head_dim, window, num_warps):
    _need_fused(device, head_dim)
    config = triton_plan.DecodeConfig(
        tile=16 * num_warps, num_warps=num_warps, stages=2, min_chunk=16 * num_warps, chunks=9
    )
    outs, expected, pages, slots, new_kv = _run(
        device, [1, 15, 16, 17, 33, 700, 7, 130, 64, 65], group, 2, head_dim, 32, torch.bfloat16,
        fused=True, norm=window is None, window=window, config=config, repeat=3, strided=True,
        attention=triton_fused.fused_attention,
    )  # fmt: skip
    assert reference.relative_error(outs[0].view_as(expected), expected) < 1e-2
    assert all(torch.equal(out, outs[0]) for out in outs[1:])
    flat = lambda cache: cache.view(-1, *cache.shape[2:])[slots]  # noqa: E731
    assert reference.relative_error(flat(pages.k), new_kv[0]) < 1e-2
    assert torch.equal(flat(pages.v).float(), new_kv[1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        (torch.float32, triton_decode.decode_attention),
        (torch.bfloat16, triton_decode.decode_attention),
        (torch.bfloat16, triton_fused.fused_attention),
    ],
)
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("like", [1, 8, 32, 64, 256])
def test_real_sizes_are_right_and_stable(device, dtype, attention, block_size, like):
    """Every configuration of the table, whatever the batch it is meant for."""
    config = triton_plan.decode_config(like, dtype.itemsize * 8)
    if attention is triton_fused.fused_attention:
        _need_fused(device)
        config = triton_fused.fused_config(like)
    for lens in ([32768], [100, 4097, 1, 255, 256, 257, 8000], [128 + i for i in range(64)]):
        outs, expected, *_ = _run(
            device, lens, 2, 8, 128, block_size, dtype, fused=True, repeat=10, config=config,
            attention=attention,
        )  # fmt: skip
        assert reference.relative_error(outs[0].view_as(expected), expected) < TOLERANCE[dtype] * 2
        assert all(torch.equal(out, outs[0]) for out in outs[1:])


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("lens", [[5], [40, 7, 300, 300, 1, 90, 0, 120], [64] * 20])
def test_every_position_has_one_place_and_the_longest_sequences_begin(device, lens, mixed):
    num_seqs, tile, chunks = len(lens), 16, 6
    queries = [2 if mixed and s % 3 == 1 else 1 for s in range(num_seqs)]
    ends = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    rows = torch.arange(num_seqs, dtype=torch.int32).flip(0)
    config = triton_plan.DecodeConfig(tile=tile, num_warps=4, stages=1, min_chunk=32, chunks=chunks)
    plan = triton_plan.plan_decode(
        rows.to(device), torch.tensor(lens, dtype=torch.int32, device=device), config=config,
        num_heads=2, num_kv_heads=1, head_dim=64, cu_seqlens_q=ends.to(device) if mixed else None,
    )  # fmt: skip
    found = plan.items.tolist()
    work = [item for item in found if item[7]]
    assert work == found[: len(work)]
    places = []
    for token, row, context, begin, end, seq, chunk, num_chunks in work:
        assert queries[seq] == 1
        assert (row, context) == (rows[seq], lens[seq])
        assert token == (ends[seq] if mixed else seq)
        places.append((seq, chunk, num_chunks, range(begin, end)))
    # The sequences in order, equal ones as they come; each with its positions in order.
    alone = [s for s in range(num_seqs) if queries[s] == 1]
    share = -(-sum(lens[s] for s in alone) // chunks)
    length = max(32, -(-share // tile) * tile)
    for seq in sorted(alone, key=lambda s: -lens[s]):
        own = [places.pop(0)]
        while places and places[0][0] == seq:
            own.append(places.pop(0))
        assert [p[:3] for p in own] == [(seq, i, len(own)) for i in range(len(own))]
        assert [t for p in own for t in p[3]] == list(range(lens[seq]))
        assert max(len(p[3]) for p in own) <= length
    assert not places
