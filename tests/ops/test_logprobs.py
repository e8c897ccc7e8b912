"""Log-probabilities against log_softmax, exact ties, bounded slices."""

from __future__ import annotations

import pytest
import torch

from infer.ops.logprobs import Logprobs, logprobs, logprobs_in_slices

I32 = torch.int32


def reference(logits: torch.Tensor, tokens: list[int], top_n: int) -> list[tuple[object, ...]]:
    rows = []
    for values, token in zip(logits.float(), tokens, strict=True):
        normal = torch.log_softmax(values.double(), -1)
        order = sorted(range(len(values)), key=lambda i: (-values[i].item(), i))
        rank = 1 + sum(1 for other in values.tolist() if other > values[token].item())
        rows.append((normal[token].item(), rank, order[:top_n], normal[order[:top_n]].tolist()))
    return rows


@pytest.mark.parametrize("top_n", [0, 1, 5, 20, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_log_softmax(top_n: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(6, 40, generator=torch.manual_seed(0)) * 2).to(dtype)
    logits = torch.round(logits) if dtype == torch.bfloat16 else logits  # many equal ones
    sources = [0, 1, 1, 5, 2, 2, 4]
    tokens = [3, 0, 39, 7, 7, 8, 20]
    got = logprobs(logits, torch.tensor(sources, dtype=I32), torch.tensor(tokens, dtype=I32), top_n)
    for row, expected in enumerate(reference(logits[sources], tokens, top_n)):
        own, rank, ids, tops = expected
        assert got.token[row].item() == pytest.approx(own, abs=1e-5)
        assert got.rank[row].item() == rank
        assert got.top_ids[row].tolist() == ids
        assert got.top[row].tolist() == pytest.approx(tops, abs=1e-5)


def test_the_first_alternative_of_equals_is_the_greedy_token() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, [900, 500, 100]] = 1.0
    got = logprobs(logits, torch.zeros(1, dtype=I32), torch.tensor([500], dtype=I32), 4)
    assert got.top_ids.tolist() == [[100, 500, 900, 0]]
    assert got.rank.tolist() == [1]


def test_broken_rows_give_valid_ids() -> None:
    logits = torch.full((2, 30), float("nan"))
    logits[1] = float("-inf")
    got = logprobs(logits, torch.tensor([0, 1], dtype=I32), torch.tensor([3, 4], dtype=I32), 5)
    assert ((got.top_ids >= 0) & (got.top_ids < 30)).all()


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
def test_slices_equal_the_whole_and_stay_small(rows: int) -> None:
    logits = torch.randn(100, 80, generator=torch.manual_seed(2))
    tokens = torch.randint(0, 80, (100,), generator=torch.manual_seed(3), dtype=I32)
    asked: list[int] = []

    def logits_of(start: int, end: int) -> torch.Tensor:
        asked.append(end - start)
        return logits[start:end]

    got = logprobs_in_slices(logits_of, tokens, 3, rows=rows)
    expected = logprobs(logits, torch.arange(100, dtype=I32), tokens, 3)
    for name in Logprobs.__dataclass_fields__:
        torch.testing.assert_close(getattr(got, name), getattr(expected, name))
    assert max(asked) <= rows
    assert sum(asked) == 100
