"""Sampling from shards against sampling from the whole row, without processes: ranks in turn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from infer.ops import sharded
from infer.ops.sample import sample
from infer.ops.sampling import Sampled, SampleFlags, SamplingRows
from infer.ops.sharded import Shard, sample_sharded
from infer.parallel import TP

ROWS = 24
TRUNCATES = SampleFlags(top_k=True, top_p=True, min_p=True)


def params(seed: int, *, top_k: bool) -> SamplingRows:
    rng = np.random.default_rng(seed)

    def pick(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(rng.choice(values, ROWS).tolist(), dtype=dtype)

    truncated = torch.arange(ROWS) % 3 > 0
    k = pick([1, 2, 5, 16] if top_k else [0, 3, 16], torch.int32)
    return SamplingRows(
        temperature=pick([0.0, 0.5, 1.0, 3.0], torch.float32),
        top_k=torch.where(truncated, k, 0),
        top_p=torch.where(truncated, pick([1.0, 0.9, 0.3], torch.float32), 1.0),
        min_p=torch.where(truncated, pick([0.0, 0.02, 0.3], torch.float32), 0.0),
        seed=torch.from_numpy(rng.integers(-(2**31), 2**31, (ROWS, 2)).astype(np.int32)),
        choice=torch.arange(ROWS, dtype=torch.int32) % 2,
    )


def by_ranks(
    monkeypatch: pytest.MonkeyPatch,
    logits: Tensor,
    size: int,
    rows: SamplingRows,
    flags: SampleFlags,
    most: int | None,
) -> list[Sampled]:
    """What every rank of ``size`` samples. Collectives are replayed until all ranks have spoken."""
    vocab = logits.shape[1]
    share = -(-vocab // size)
    source = torch.arange(ROWS, dtype=torch.int32)
    said: list[list[Tensor]] = [[] for _ in range(size)]

    class Waiting(Exception):
        """A collective needs what another rank has not said yet."""

    def run(rank: int) -> Sampled:
        start, turn = rank * share, iter(range(100))
        held = logits[:, start : start + share]
        local = torch.nn.functional.pad(held, (0, share - held.shape[1]))

        def gather(x: Tensor, tp: TP) -> Tensor:
            n = next(turn)
            if n == len(said[rank]):
                said[rank].append(x.clone())
            if any(len(others) <= n for others in said):
                raise Waiting
            return torch.stack([others[n] for others in said])

        monkeypatch.setattr(sharded, "all_gather", gather)
        shard = Shard(TP(rank, size), start, held.shape[1], share, vocab)
        return sample_sharded(local, source, source + 7, rows, flags, shard, most)

    def rounds() -> Iterator[list[Sampled]]:
        for _ in range(8):
            found = []
            for rank in range(size):
                try:
                    found.append(run(rank))
                except Waiting:
                    pass
            if len(found) == size:
                yield found

    return next(rounds())


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("most", [16, None, 4096], ids=str)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_shards_sample_what_the_whole_row_samples(
    monkeypatch: pytest.MonkeyPatch, size: int, most: int | None, ties: bool
) -> None:
    for seed in range(6):
        logits = 4 * torch.randn(ROWS, 131, generator=torch.Generator().manual_seed(seed))
        if ties:
            logits = logits.round()
        rows = params(seed, top_k=most == 16)
        source = torch.arange(ROWS, dtype=torch.int32)
        expected = sample(logits, source, source + 7, rows, TRUNCATES)
        for found in by_ranks(monkeypatch, logits, size, rows, TRUNCATES, most):
            assert torch.equal(found.tokens, expected.tokens)
            assert torch.equal(found.scores, expected.scores)
            assert not found.nan.any()


@pytest.mark.parametrize("flags", [SampleFlags(greedy=True), SampleFlags()], ids=["greedy", "all"])
def test_plain_rows_and_broken_ones(monkeypatch: pytest.MonkeyPatch, flags: SampleFlags) -> None:
    logits = torch.randn(ROWS, 131, generator=torch.Generator().manual_seed(1)).round()
    logits[3, 120] = torch.nan  # in the shard of the last rank
    rows = params(1, top_k=True)
    rows = SamplingRows(
        temperature=rows.temperature * (not flags.greedy),
        top_k=torch.zeros_like(rows.top_k),
        top_p=torch.ones_like(rows.top_p),
        min_p=torch.zeros_like(rows.min_p),
        seed=rows.seed,
        choice=rows.choice,
    )
    source = torch.arange(ROWS, dtype=torch.int32)
    expected = sample(logits, source, source + 7, rows, flags)
    whole = torch.arange(ROWS) != 3
    for found in by_ranks(monkeypatch, logits, 4, rows, flags, None):
        assert torch.equal(found.tokens[whole], expected.tokens[whole])
        assert found.nan.tolist() == [row == 3 for row in range(ROWS)]
        assert 0 <= int(found.tokens[3]) < 131
