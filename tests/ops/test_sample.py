"""Sampling: frequencies, independence of the batch, shards, and broken logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper

from infer.ops.sample import best_shard, sample
from infer.ops.sampling import Sampled, SampleFlags, SamplingRows
from tests.ops.sampling import flags_of, kept_tokens, random_rows, rows_of

I32 = torch.int32


def index(count: int) -> Tensor:
    return torch.arange(count, dtype=I32)


def draw(logits: Tensor, rows: SamplingRows, positions: Tensor | None = None) -> Sampled:
    """One token for each row of logits."""
    count = logits.shape[0]
    positions = index(count) if positions is None else positions
    return sample(logits, index(count), positions, rows, flags_of(rows))


def frequencies(logits: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    """Counts i64[V] of many samples of one row of logits."""
    count = positions.shape[0]
    shared = torch.zeros(count, dtype=I32)
    picked = sample(logits[None], shared, positions, rows, flags_of(rows))
    return torch.bincount(picked.tokens, minlength=logits.shape[0])


def assert_follows(counts: Tensor, probabilities: Tensor) -> None:
    """Chi-square test, five standard deviations; impossible tokens must not occur."""
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    likely = expected > 5
    rest = torch.stack([(counts * ~likely).sum().double(), (expected * ~likely).sum()])
    observed = torch.cat([counts[likely].double(), rest[:1]])
    expected = torch.cat([expected[likely], rest[1:]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = max(len(observed) - 1, 1)
    chi = float(((observed - expected) ** 2 / expected).sum())
    assert chi < freedom + 5 * math.sqrt(2 * freedom), (chi, freedom)


CASES = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("vary", ["position", "seed", "choice"])
def test_frequencies(case: dict[str, float], vary: str) -> None:
    vocab, count = 60, 20_000
    logits = torch.randn(vocab, generator=torch.manual_seed(5)) * 2
    counts = torch.zeros(vocab, dtype=torch.int64)
    varied = np.arange(count)
    rows = rows_of(count, **case, **({vary: varied} if vary != "position" else {"seed": 11}))
    positions = index(count) if vary == "position" else torch.full((count,), 17, dtype=I32)
    counts = frequencies(logits, rows, positions)
    scaled = TemperatureLogitsWarper(case.get("temperature", 1.0))(None, logits[None])[0]
    kept = kept_tokens(
        scaled.tolist(), int(case.get("top_k", 0)), case.get("top_p", 1.0), case.get("min_p", 0.0)
    )
    inside = torch.tensor([i in kept for i in range(vocab)])
    probabilities = torch.softmax(scaled.double().masked_fill(~inside, -math.inf), -1)
    assert_follows(counts, probabilities)


def test_rare_tokens_are_drawn() -> None:
    """A flat tail of 5,000 tokens, a millionth of the probability each."""
    logits = torch.zeros(5001)
    logits[0] = math.log(199 * 5000)
    rows = rows_of(20_000, seed=3)
    tail = sum(
        int(frequencies(logits, rows.select(part), part)[1:].sum())
        for part in index(20_000).split(1000)
    )
    assert abs(tail - 100) < 5 * math.sqrt(100)


def test_successive_tokens_are_independent() -> None:
    logits = torch.zeros(1, 8)
    count = 40_000
    rows = rows_of(count, seed=1)
    tokens = sample(logits, torch.zeros(count, dtype=I32), index(count), rows, SampleFlags()).tokens
    pairs = torch.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
    assert_follows(pairs, torch.full((64,), 1 / 64, dtype=torch.float64))


# --- greedy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_largest_and_of_equals_the_first(dtype: torch.dtype) -> None:
    logits = torch.randn(30, 2000, generator=torch.manual_seed(0)).to(dtype)
    expected = logits.float().numpy().argmax(-1)  # numpy promises the first
    rows = rows_of(30, temperature=0)
    alone = draw(logits, rows)
    assert alone.tokens.tolist() == expected.tolist()
    assert alone.tokens.dtype == I32
    # The same beside rows that sample, and with a temperature that is as good as zero.
    mixed = rows_of(30, temperature=[0.0, 1.0] * 15, top_k=[0, 5] * 15)
    assert draw(logits, mixed).tokens[::2].tolist() == expected[::2].tolist()
    tiny = draw(logits, rows_of(30, temperature=1e-6))
    assert tiny.tokens.tolist() == expected.tolist()


def test_top_k_of_one_is_greedy() -> None:
    logits = torch.randn(50, 500, generator=torch.manual_seed(0)).bfloat16()
    rows = rows_of(50, temperature=2.0, top_k=1)
    assert torch.equal(draw(logits, rows).tokens, draw(logits, rows_of(50, temperature=0)).tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_more_and_fewer_logits_than_samples(temperature: float) -> None:
    logits = torch.randn(5, 300, generator=torch.manual_seed(0))
    for sources in ([3], [4, 4, 0, 1, 4, 2, 2], [0, 1, 2, 3, 4]):
        count = len(sources)
        rows = rows_of(count, temperature=temperature, seed=np.arange(count))
        flags = flags_of(rows)
        got = sample(logits, torch.tensor(sources, dtype=I32), index(count), rows, flags)
        assert torch.equal(got.tokens, draw(logits[sources], rows).tokens)


# --- independence -------------------------------------------------------------------------------


def fixed_shape(logits: Tensor, rows: SamplingRows, positions: Tensor) -> Sampled:
    """The path of other devices: no look at values, one graph."""
    compiled = torch.compile(sample, backend="eager", fullgraph=True)
    return compiled(logits, index(logits.shape[0]), positions, rows, flags_of(rows))


@pytest.mark.parametrize("coarse", [False, True], ids=["floats", "many equal logits"])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_both_paths_draw_the_same(coarse: bool, scale: float) -> None:
    for seed in range(3):
        logits = torch.randn(48, 3000, generator=torch.manual_seed(seed)) * scale
        logits = logits.bfloat16().float() if coarse else logits
        rows = random_rows(48, seed)
        positions = index(48) * 37
        one, other = draw(logits, rows, positions), fixed_shape(logits, rows, positions)
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.scores, other.scores)


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = torch.randn(32, 1000, generator=torch.manual_seed(2)) * 2
    rows, positions = random_rows(32, 4), index(32) + 100
    together = draw(logits, rows, positions).tokens
    order = torch.randperm(32, generator=torch.manual_seed(3))
    shuffled = draw(logits[order], rows.select(order), positions[order]).tokens
    assert torch.equal(shuffled, together[order])
    for row in range(32):
        one = torch.tensor([row])
        alone = rows.select(one)
        # Flags may say more than a row needs.
        everything = SampleFlags(top_k=True, top_p=True, min_p=True)
        for flags in (flags_of(alone), everything):
            got = sample(logits[one], index(1), positions[one], alone, flags).tokens
            assert got.item() == together[row].item()


def test_seed_choice_and_position_all_matter() -> None:
    logits = torch.zeros(1, 10_000)
    base = rows_of(1, seed=1)
    first = draw(logits, base, index(1)).tokens
    assert torch.equal(first, draw(logits, base, index(1)).tokens)
    others = [
        draw(logits, rows_of(1, seed=2), index(1)),
        draw(logits, rows_of(1, seed=1 + (1 << 40)), index(1)),
        draw(logits, rows_of(1, seed=1, choice=1), index(1)),
        draw(logits, base, index(1) + 1),
    ]
    assert len({first.item(), *(other.tokens.item() for other in others)}) == 5


@pytest.mark.parametrize("num_shards", [2, 3, 8])
def test_shards_of_the_vocabulary_draw_the_same(num_shards: int) -> None:
    logits = torch.randn(40, 999, generator=torch.manual_seed(6)).bfloat16().float()
    rows = rows_of(40, temperature=[0.0, 0.7, 1.0, 1.5] * 10, seed=9)
    whole = draw(logits, rows)
    parts, offset = [], 0
    for shard in logits.tensor_split(num_shards, dim=-1):
        parts.append(sample(shard, index(40), index(40), rows, flags_of(rows), vocab_offset=offset))
        offset += shard.shape[-1]
    tokens = torch.stack([part.tokens for part in parts])
    scores = torch.stack([part.scores for part in parts])
    assert torch.equal(best_shard(tokens, scores), whole.tokens)
    greedy = [
        sample(
            shard,
            index(40),
            index(40),
            rows_of(40, temperature=0),
            SampleFlags(greedy=True),
            vocab_offset=at,
        )
        for shard, at in ((logits[:, :500], 0), (logits[:, 500:], 500))
    ]
    joined = best_shard(
        torch.stack([g.tokens for g in greedy]), torch.stack([g.scores for g in greedy])
    )
    assert joined.tolist() == logits.argmax(-1).tolist()


# --- broken logits ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_broken_logits_give_valid_ids_and_are_reported(
    bad: float, whole: bool, compiled: bool
) -> None:
    logits = torch.randn(24, 400, generator=torch.manual_seed(0))
    logits[3 if not whole else slice(None), 7 if not whole else slice(None)] = bad
    for rows in (random_rows(24, 0), rows_of(24), rows_of(24, temperature=0)):
        got = (fixed_shape if compiled else draw)(logits, rows, index(24))
        assert ((got.tokens >= 0) & (got.tokens < 400)).all()
        broken = math.isnan(bad) & ((torch.arange(24) == 3) | torch.tensor(whole))
        assert torch.equal(got.nan, broken)


def test_one_broken_row_harms_no_other() -> None:
    logits = torch.randn(16, 400, generator=torch.manual_seed(0))
    rows = random_rows(16, 2)
    expected = draw(logits, rows).tokens
    logits[5] = float("nan")
    got = draw(logits, rows).tokens
    others = torch.arange(16) != 5
    assert torch.equal(got[others], expected[others])


def test_extreme_parameters() -> None:
    logits = torch.randn(6, 300, generator=torch.manual_seed(0)) * 50
    rows = rows_of(
        6,
        temperature=[100.0, 1e-4, 1.0, 1.0, 1.0, 1e-5],
        top_k=[1_000_000, 0, 300, 299, -1, 0],
        top_p=[1.0, 1e-7, 0.9999999, 1.0, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
    )
    one, other = draw(logits, rows), fixed_shape(logits, rows, index(6))
    assert torch.equal(one.tokens, other.tokens)
    best = logits.argmax(-1)
    assert one.tokens[[1, 4]].tolist() == best[[1, 4]].tolist()


def test_a_different_number_of_rows_does_not_recompile_more_than_once() -> None:
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(sample, backend=counted, fullgraph=True, dynamic=True)
    for count in (5, 6, 9, 17):
        rows = rows_of(count, top_p=0.9)
        compiled(torch.randn(count, 100), index(count), index(count), rows, flags_of(rows))
    assert counted.frame_count == 1
