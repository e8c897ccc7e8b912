"""The projections, the sampling head and whole decode layers against plain references."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from infer.batch import AttentionMeta, Batch
from infer.ops import (
    LayerShape,
    noise,
    triton_matrix,
    triton_plan,
    triton_rows,
    triton_step,
    triton_tiles,
    triton_vector,
)
from infer.ops.sample import sample
from infer.ops.sampling import SampleFlags, SamplingRows
from infer.ops.triton_begin import begin_step
from infer.ops.triton_common import dependent_launch
from infer.ops.triton_head import best_tiles, finish_step, score_head, score_logits
from infer.ops.triton_head_hopper import MAX_ROWS, MIN_ROWS, suits_hopper_head
from infer.weights import LayerWeights, Weights
from tests.gpu import reference

EPS = 1e-6
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def _swiglu(x, gate_up, bias):
    gate, up = (x @ gate_up.float().T + bias.float()).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _check_few_rows(linear, device, dtype, rows, size_n, size_k):
    """With all that such a projection can do, and with as little as possible."""
    generator = torch.Generator().manual_seed(rows)
    make = lambda *s: torch.randn(s, generator=generator).to(dtype).to(device)  # noqa: E731
    x, norm, residual = make(rows, size_k), 1 + make(size_k) / 4, make(rows, size_n)
    weight, bias = make(2 * size_n, size_k) / size_k**0.5, make(2 * size_n)
    out = torch.full((rows, size_n), float("nan"), dtype=dtype, device=device)
    linear(x, weight, out, bias=bias, norm=norm, eps=EPS, swiglu=True)
    expected = _swiglu(reference.rms_norm(x, norm, EPS), weight, bias)
    assert reference.relative_error(out, expected) < TOLERANCE[dtype]
    linear(x, weight[:size_n], out, residual=residual)
    expected = residual.float() + x.float() @ weight[:size_n].float().T
    assert reference.relative_error(out, expected) < TOLERANCE[dtype]


FEW_SHAPES = pytest.mark.parametrize(
    ("rows", "size_n", "size_k"), [(1, 40, 576), (3, 24, 1024), (5, 12, 3072)]
)


@DTYPES
@FEW_SHAPES
def test_vector_linear(device, dtype, rows, size_n, size_k):
    _check_few_rows(triton_vector.vector_linear, device, dtype, rows, size_n, size_k)


@pytest.mark.gpu
@FEW_SHAPES
@pytest.mark.parametrize("shared", [False, True])
def test_rows_linear(device, rows, size_n, size_k, shared):
    x = torch.empty(rows, size_k, dtype=torch.bfloat16, device=device)
    if not triton_rows.suits_rows(x):
        pytest.skip("needs a Hopper GPU")
    config = triton_rows.RowsConfig(block_n=16, num_warps=8, shared=shared)
    linear = partial(triton_rows.rows_linear, config=config)
    _check_few_rows(linear, device, torch.bfloat16, rows, size_n, size_k)
    _check_few_rows(triton_rows.rows_linear, device, torch.bfloat16, rows, 128 * size_n, size_k)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 33, 70, 130, 256])
@pytest.mark.parametrize(("size_n", "size_k"), [(96, 576), (1000, 1024), (80, 5000)])
@pytest.mark.parametrize("memory", [{}, {"shared_kib": 144, "weight_kib": 64}])
def test_tiles_linear(device, rows, size_n, size_k, memory):
    """Columns and rows that fill no tile, and more weights than shared memory holds."""
    generator = torch.Generator().manual_seed(rows)
    make = lambda *s: torch.randn(s, generator=generator).bfloat16().to(device)  # noqa: E731
    x, weight, bias = make(rows, size_k), make(2 * size_n, size_k) / size_k**0.5, make(2 * size_n)
    if not triton_tiles.suits_tiles(x, weight):
        pytest.skip("needs a Hopper GPU")
    expected = x.float() @ weight.float().T + bias.float()
    wanted = {True: _swiglu(x.float(), weight, bias), False: expected}
    for swiglu, result in wanted.items():
        config = triton_tiles.tiles_config(rows, size_k, swiglu=swiglu, parts=False)
        config = replace(config, **memory)
        out = torch.full_like(result, float("nan"), dtype=torch.bfloat16)
        triton_tiles.tiles_linear(x, weight, out, bias=bias, swiglu=swiglu, config=config)
        assert reference.relative_error(out, result) < TOLERANCE[torch.bfloat16]
    config = triton_tiles.tiles_config(rows, size_k, swiglu=False, parts=True)
    config = replace(config, **memory)
    parts = torch.full((config.split, *expected.shape), float("nan"), device=device)
    triton_tiles.tiles_linear(x, weight, parts, config=config)
    assert reference.relative_error(parts.sum(0) + bias.float(), expected) < 1e-5


@DTYPES
@pytest.mark.parametrize(("rows", "size_n", "size_k"), [(9, 96, 576), (33, 80, 512), (70, 48, 192)])
def test_matrix_linear(device, dtype, rows, size_n, size_k):
    generator = torch.Generator().manual_seed(rows)
    make = lambda *s: torch.randn(s, generator=generator).to(dtype).to(device)  # noqa: E731
    x, norm, residual = make(rows, size_k), 1 + make(size_n) / 4, make(rows, size_n)
    weight, bias = make(2 * size_n, size_k) / size_k**0.5, make(2 * size_n)
    bits = dtype.itemsize * 8
    out = torch.full((rows, size_n), float("nan"), dtype=dtype, device=device)
    config = triton_matrix.matrix_config(rows, size_n, size_k, bits, swiglu=True)
    triton_matrix.matrix_linear(x, weight, out, bias=bias, swiglu=True, config=config)
    assert reference.relative_error(out, _swiglu(x.float(), weight, bias)) < TOLERANCE[dtype]
    for split in (1, 3):
        config = triton_matrix.MatrixConfig(
            block_m=16, block_n=32, block_k=64, split=split, num_warps=4, num_stages=2
        )
        parts = torch.full((split, rows, size_n), float("nan"), device=device)
        triton_matrix.matrix_linear(x, weight[:size_n], parts, config=config)
        total = torch.full_like(out, float("nan"))
        triton_matrix.sum_norm(
            parts, norm, out, total, residual=residual, bias=bias[:size_n], eps=EPS
        )
        expected = residual.float() + x.float() @ weight[:size_n].float().T + bias[:size_n].float()
        assert reference.relative_error(total, expected) < TOLERANCE[dtype]
        assert (
            reference.relative_error(out, reference.rms_norm(expected, norm, EPS))
            < (TOLERANCE[dtype])
        )


def _params(rows: int, device: torch.device, generator: torch.Generator) -> SamplingRows:
    temperature = torch.rand(rows, generator=generator) + 0.3
    temperature[::3] = 0.0
    words = torch.randint(-(2**31), 2**31, (rows, 2), generator=generator).to(torch.int32)
    return SamplingRows(
        temperature=temperature.to(device),
        top_k=torch.zeros(rows, dtype=torch.int32, device=device),
        top_p=torch.ones(rows, device=device),
        min_p=torch.zeros(rows, device=device),
        seed=words.to(device),
        choice=torch.arange(rows, dtype=torch.int32, device=device) % 3,
    )


@pytest.mark.parametrize("rows", [1, 7, 20])
def test_sample_head_draws_what_the_sampler_draws(device, rows):
    generator = torch.Generator().manual_seed(rows)
    vocab, hidden = 403, 64
    x = torch.randn(rows, hidden, generator=generator).to(device)
    head = torch.randn(vocab, hidden, generator=generator).to(device) / 4
    norm = 1 + torch.randn(hidden, generator=generator).to(device) / 4
    table = _params(rows + 2, device, generator)
    sample_rows = torch.randperm(rows + 2, generator=generator)[:rows].to(torch.int32).to(device)
    positions = torch.randint(0, 1 << 20, (rows,), generator=generator).to(torch.int32).to(device)
    normed = reference.rms_norm(x, norm, EPS)
    got = best_tiles(score_head(normed, head, sample_rows, positions, table, vocab_offset=5))
    expected = sample(
        (normed @ head.T).cpu(), torch.arange(rows), positions.cpu(),
        _cpu(table).select(sample_rows.cpu()), SampleFlags(), vocab_offset=5,
    )  # fmt: skip
    assert torch.equal(got.tokens.cpu(), expected.tokens)
    assert torch.allclose(got.scores.cpu(), expected.scores, rtol=1e-5, atol=1e-5)
    assert not got.nan.any()


@pytest.mark.parametrize("scale", [0.5, 20.0])
def test_blocks_without_hope_are_skipped_in_vain(device, scale):
    """Scores of later blocks are left out where they cannot win: the tokens are the same."""
    generator = torch.Generator().manual_seed(3)
    rows, vocab = 8, 4000
    logits = torch.randn(rows, vocab, generator=generator) * scale
    logits[4] = 3.0  # greedy or not, every score that ties must be looked at
    logits[5, ::7] = float("-inf")
    logits[6] = torch.arange(vocab) / 100.0  # every block beats the one before
    table = _params(rows, device, generator)
    index = torch.arange(rows, dtype=torch.int32, device=device)
    positions = (1000 * index).to(torch.int32)
    of = partial(score_logits, block=256, programs=2 * rows)
    got = best_tiles(of(logits.to(device), index, positions, table, vocab_offset=9))
    expected = sample(
        logits, index.cpu(), positions.cpu(), _cpu(table), SampleFlags(), vocab_offset=9
    )
    assert torch.equal(got.tokens.cpu(), expected.tokens)
    assert torch.allclose(got.scores.cpu(), expected.scores, rtol=1e-5, atol=1e-5)
    logits[2, 3900] = float("nan")
    logits[7] = float("-inf")
    got = best_tiles(of(logits.to(device), index, positions, table))
    assert got.nan.tolist() == [row == 2 for row in range(rows)]
    assert ((got.tokens >= 0) & (got.tokens < vocab)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [MIN_ROWS, 64, 65, 128, 130, MAX_ROWS])
@pytest.mark.parametrize(("vocab", "hidden"), [(403, 64), (20_000, 1024), (40_001, 584)])
def test_hopper_head_draws_what_the_sampler_draws(device, rows, vocab, hidden):
    """Of small integers every sum is exact, so logits, and equal ones, are the reference's."""
    generator = torch.Generator().manual_seed(rows)
    ints = lambda *s: torch.randint(-2, 3, s, generator=generator).bfloat16()  # noqa: E731
    x, head = ints(rows, hidden), ints(vocab, hidden)
    if not suits_hopper_head(x.to(device), head.to(device)):
        pytest.skip("needs a Hopper GPU")
    table = _params(rows + 2, device, generator)
    table.temperature.mul_(2.0 * hidden**0.5)
    sample_rows = torch.randperm(rows + 2, generator=generator)[:rows].to(torch.int32)
    positions = torch.randint(0, 1 << 20, (rows,), generator=generator).to(torch.int32)
    given = (head.to(device), sample_rows.to(device), positions.to(device), table)
    expected = sample(
        x.float() @ head.float().T, torch.arange(rows), positions, _cpu(table).select(sample_rows),
        SampleFlags(), vocab_offset=5,
    )  # fmt: skip
    for _ in range(10):
        got = best_tiles(score_head(x.to(device), *given, vocab_offset=5))
        assert torch.equal(got.tokens.cpu(), expected.tokens)
        assert torch.allclose(got.scores.cpu(), expected.scores, rtol=1e-5, atol=2e-5)
        assert not got.nan.any()
    x[rows - 1, 3] = float("nan")
    got = best_tiles(score_head(x.to(device), *given))
    assert got.nan.tolist() == [row == rows - 1 for row in range(rows)]


@pytest.mark.parametrize("rows", [1, 5])
def test_what_a_step_begins_and_ends_with(device, rows):
    generator = torch.Generator().manual_seed(rows)
    ints = lambda high, *s: torch.randint(0, high, s, generator=generator).to(torch.int32)  # noqa: E731
    count, hidden, vocab = rows + 2, 24, 50
    embed = torch.randn(vocab, hidden, generator=generator)
    words = ints(vocab, 16 * count)
    src_rows = torch.randperm(count, generator=generator)[:rows].to(torch.int32)
    src_rows[1::3] = -1
    # The last token of the first row changes in this step, and so does a word behind all of them.
    places = torch.full((rows,), 9 * count, dtype=torch.int32)
    places[:1] = src_rows[:1]
    new_words = torch.full((rows,), 17, dtype=torch.int32)
    new_words[:1] = 3
    input_ids, seq_rows, lens = ints(vocab, rows), ints(count, rows), 1 + ints(900, rows)
    expected_words = words.clone()
    expected_words[places.long()] = new_words
    token_ids = torch.where(
        src_rows < 0, input_ids, expected_words[:count][src_rows.clamp_min(0).long()]
    )
    on = lambda t: t.to(device)  # noqa: E731
    words, embed = on(words), on(embed)
    nothing = on(lens)[:0]
    meta = AttentionMeta(
        positions=nothing, slot_mapping=nothing, seq_rows=on(seq_rows), cu_seqlens_q=nothing,
        context_lens=on(lens), block_tables=nothing, max_seqlen_q=1, max_seqlen_k=900, decode=True,
    )  # fmt: skip
    batch = Batch(
        input_ids=on(input_ids), src_rows=on(src_rows), attention=meta, logits_rows=nothing,
        sample_logits=nothing, sample_rows=nothing, sample_positions=nothing, prompt_rows=nothing,
        prompt_targets=nothing,
    )  # fmt: skip
    config = triton_plan.decode_config(rows, 32)
    shape = {"config": config, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    plan = triton_plan.empty_plan(rows, device=device, **shape)
    plan.counters.fill_(7)
    out = torch.full((rows, hidden), float("nan"), device=device)
    begin_step(
        out, embed, batch, words[:count], words, on(places), on(new_words), plan,
        sliding_window=None, pdl=dependent_launch(device),
    )  # fmt: skip
    assert torch.equal(out, embed[on(token_ids).long()])
    assert torch.equal(words.cpu(), expected_words)
    wanted = triton_plan.plan_decode(meta.seq_rows, meta.context_lens, **shape)
    assert torch.equal(plan.items, wanted.items)
    assert not plan.counters.any()

    best, ids = torch.randn(rows, 9, generator=generator), ints(vocab, rows, 9)
    best[rows - 1, 4] = float("nan")
    sample_rows = torch.randperm(count, generator=generator)[:rows].to(torch.int32)
    last_token = on(torch.full((count,), -1, dtype=torch.int32))
    tokens, broken = finish_step((on(best), on(ids)), on(sample_rows), last_token, pdl=False)
    assert broken.tolist() == [int(row == rows - 1) for row in range(rows)]
    assert tokens[: rows - 1].tolist() == [int(ids[r, best[r].argmax()]) for r in range(rows - 1)]
    remembered = torch.full((count,), -1, dtype=torch.int32)
    remembered[sample_rows.long()] = tokens.cpu()
    assert torch.equal(last_token.cpu(), remembered)


def _cpu(p: SamplingRows) -> SamplingRows:
    return SamplingRows(
        temperature=p.temperature.cpu(), top_k=p.top_k.cpu(), top_p=p.top_p.cpu(),
        min_p=p.min_p.cpu(), seed=p.seed.cpu(), choice=p.choice.cpu(),
    )  # fmt: skip


@pytest.mark.parametrize("rows", [2, 18])
def test_sample_head_reports_nan_and_breaks_ties_low(device, rows):
    hidden, vocab = 32, 300
    x = torch.ones(rows, hidden, device=device)
    head = torch.zeros(vocab, hidden, device=device)
    head[[111, 250]] = 1.0
    params = _params(rows, device, torch.Generator().manual_seed(0))
    params.temperature.zero_()
    index = torch.arange(rows, dtype=torch.int32, device=device)
    got = best_tiles(score_head(x, head, index, index, params))
    assert got.tokens.tolist() == [111] * rows
    x[1] = float("nan")
    got = best_tiles(score_head(x, head, index, index, params))
    assert got.nan.tolist() == [i == 1 for i in range(rows)]
    assert (got.tokens >= 0).all()
    assert (got.tokens < vocab).all()


def test_noise_constants_fit_the_kernels():
    """The kernels fold these into 32-bit arithmetic."""
    assert all(-(2**31) <= c < 2**31 for c in (noise.GOLDEN, noise.MUL_1, noise.MUL_2))


def make_weights(layers, hidden, heads, kv_heads, head_dim, inner, vocab, dtype, device, bias):
    """Random weights of a small model with q/k norm, and with biases or without."""
    generator = torch.Generator().manual_seed(7)
    make = lambda *s, scale=1.0: (  # noqa: E731
        (torch.randn(s, generator=generator) * scale).to(dtype).to(device)
    )
    near_one = lambda n: 1 + make(n, scale=0.2)  # noqa: E731
    qkv = (heads + 2 * kv_heads) * head_dim
    return Weights(
        embed=make(vocab, hidden),
        layers=tuple(
            LayerWeights(
                input_norm=near_one(hidden),
                qkv=make(qkv, hidden, scale=hidden**-0.5),
                qkv_bias=make(qkv) if bias else None,
                q_norm=None if bias else near_one(head_dim),
                k_norm=None if bias else near_one(head_dim),
                o=make(hidden, heads * head_dim, scale=(heads * head_dim) ** -0.5),
                o_bias=make(hidden) if bias else None,
                post_norm=near_one(hidden),
                gate_up=make(2 * inner, hidden, scale=hidden**-0.5),
                gate_up_bias=make(2 * inner) if bias else None,
                down=make(hidden, inner, scale=inner**-0.5),
                down_bias=make(hidden) if bias else None,
            )
            for _ in range(layers)
        ),
        norm=near_one(hidden),
        lm_head=make(vocab, hidden, scale=hidden**-0.5),
    )


def _naive_layer(w, x, k, v, cos_sin, shape, n):
    """One layer for one new position after ``n`` cached ones, float32."""
    add = lambda y, b: y if b is None else y + b.float()  # noqa: E731
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    normed = reference.rms_norm(x, w.input_norm, EPS)
    qkv = add(normed @ w.qkv.float().T, w.qkv_bias).view(1, -1, dim)
    q, new_k, new_v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if w.q_norm is not None:
        q = reference.rms_norm(q, w.q_norm, EPS)
        new_k = reference.rms_norm(new_k, w.k_norm, EPS)
    position = torch.tensor([n], device=x.device)
    q, new_k = (reference.rotate(y, cos_sin, position) for y in (q, new_k))
    attended = reference.attend(q, torch.cat((k, new_k)), torch.cat((v, new_v)))
    x = x + add(attended.reshape(1, -1) @ w.o.float().T, w.o_bias)
    normed = reference.rms_norm(x, w.post_norm, EPS)
    gate, up = add(normed @ w.gate_up.float().T, w.gate_up_bias).chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * up
    return x + add(inner @ w.down.float().T, w.down_bias)


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize(
    "rows", [1, 3, 9, *(pytest.param(n, marks=pytest.mark.gpu) for n in (60, 130, 300))]
)
def test_layers(device, dtype, bias, rows):
    generator = torch.Generator().manual_seed(8)
    shape = LayerShape(4, 2, 64, EPS, None)
    # The interpreter is slow: the smallest sizes that still have several programs and layers.
    hidden, inner, layers = (128, 192, 2) if device.type == "cuda" else (48, 64, 2)
    weights = make_weights(layers, hidden, 4, 2, 64, inner, 64, dtype, device, bias)
    lens = [1 + 7 * i % 50 for i in range(rows)]
    pages = [
        reference.make_pages(
            [n - 1 for n in lens], lens, block_size=16, num_kv_heads=2, head_dim=64, dtype=dtype,
            device=device, generator=torch.Generator().manual_seed(9),
        )
        for _ in range(layers)
    ]  # fmt: skip
    x = torch.randn(rows, hidden, generator=generator).to(dtype).to(device)
    cos_sin = reference.cos_sin_table(64, 64, device)
    expected = []
    for s, n in enumerate(lens):
        row = x[s : s + 1].float()
        for w, p in zip(weights.layers, pages, strict=True):
            row = _naive_layer(w, row, p.dense_k[s], p.dense_v[s], cos_sin, shape, n - 1)
        expected.append(row)
    context_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    config = triton_step.step_config(rows, pages[0].k, shape)
    plan = triton_plan.plan_decode(
        pages[0].seq_rows, context_lens, config=config, num_heads=4, num_kv_heads=2, head_dim=64
    )
    slots = torch.stack([pages[0].slots(s, n - 1, n)[0] for s, n in enumerate(lens)])
    step = triton_step.DecodeInputs(
        plan=plan, block_tables=pages[0].block_tables, cos_sin=cos_sin,
        slot_mapping=slots.to(torch.int32), shape=shape,
        pdl=dependent_launch(device),
    )  # fmt: skip
    buffers = triton_step.decode_buffers(x, weights.layers[0], shape)
    for buffer in (buffers.normed, buffers.qkv, buffers.attended, buffers.activated):
        buffer.fill_(float("nan"))
    triton_step.decode_layers(
        weights, tuple(p.k for p in pages), tuple(p.v for p in pages), buffers, step
    )
    tolerance = TOLERANCE[dtype] * 2
    assert reference.relative_error(buffers.hidden, torch.cat(expected)) < tolerance
    normed = reference.rms_norm(torch.cat(expected), weights.norm, EPS)
    assert reference.relative_error(buffers.normed, normed) < tolerance
