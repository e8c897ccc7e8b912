"""The kept set against its definition and against transformers' warpers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from infer.ops.truncate import truncate
from tests.ops.sampling import kept_tokens


def kept(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    rows = logits.shape[0]
    result = truncate(
        logits,
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )
    inside = torch.isfinite(result)
    assert torch.equal(result[inside], logits[inside])
    return {int(i) for i in inside[0].nonzero()}


@pytest.mark.parametrize("coarse", [False, True], ids=["floats", "many equal logits"])
@pytest.mark.parametrize("top_k", [0, 1, 7, 40, 1000])
@pytest.mark.parametrize("top_p", [0.001, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_equals_the_definition(coarse: bool, top_k: int, top_p: float, min_p: float) -> None:
    draw = np.random.default_rng(top_k + int(1000 * top_p))
    for vocab in (1, 5, 300):
        values = draw.normal(0, 2, vocab).astype(np.float32)
        # p and min_p are float32 on the device.
        p, low = float(np.float32(top_p)), float(np.float32(min_p))
        if coarse:
            values = np.round(values)
        got = kept(torch.from_numpy(values)[None], top_k, top_p, min_p)
        assert got == kept_tokens(values.tolist(), top_k, p, low)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1), (30, 0.8, 0.0), (30, 0.95, 0.02)],
)
def test_equals_transformers(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(50, 500, generator=torch.manual_seed(0)) * 2
    ids = torch.zeros(50, 1, dtype=torch.long)
    expected = logits
    if min_p:
        expected = MinPLogitsWarper(min_p)(ids, expected)
    if top_k:
        expected = TopKLogitsWarper(top_k)(ids, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(ids, expected)
    got = truncate(
        logits,
        torch.full((50,), top_k, dtype=torch.int32),
        torch.full((50,), top_p),
        torch.full((50,), min_p),
    )
    assert torch.equal(torch.isfinite(got), torch.isfinite(expected))


def test_equal_logits_are_kept_by_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0]])
    assert kept(logits, top_k=1) == {1}
    assert kept(logits, top_k=3) == {0, 1, 3}
    assert kept(logits, top_k=4) == {0, 1, 2, 3}
    zeros = torch.tensor([[0.0, -0.0, 0.0, -0.0]])
    assert kept(zeros, top_k=3) == {0, 1, 2}
    assert kept(zeros, top_p=0.5) == {0, 1}


def test_exact_boundary_of_top_p() -> None:
    """Four equal tokens: a half is two of them, a little more is three."""
    logits = torch.zeros(1, 4)
    assert kept(logits, top_p=0.5) == {0, 1}
    assert kept(logits, top_p=0.5000001) == {0, 1, 2}
    assert kept(logits, top_p=1e-30) == {0}


@pytest.mark.parametrize(
    "values",
    [
        [3e38, -3e38, 0.0],
        [float("-inf"), 1.0, float("-inf")],
        [float("inf"), 1.0, 0.0],
        [float("-inf")] * 3,
        [float("nan"), 1.0, 0.0],
        [1e-40, 0.0, -1e-40],
    ],
)
def test_extreme_logits_keep_something_or_nothing_harmful(values: list[float]) -> None:
    logits = torch.tensor([values])
    for options in ({"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
        defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
        result = truncate(
            logits,
            torch.tensor([defaults["top_k"]], dtype=torch.int32),
            torch.tensor([defaults["top_p"]]),
            torch.tensor([defaults["min_p"]]),
        )
        best = logits[0].nan_to_num(nan=float("-inf")).argmax()
        if not any(np.isnan(values)):
            assert result[0, best] == logits[0, best]


def test_rows_do_not_see_each_other() -> None:
    logits = torch.randn(6, 200, generator=torch.manual_seed(1)) * 3
    top_k = torch.tensor([0, 5, 0, 50, 1, 200], dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.9, 0.3, 0.95, 1.0, 0.5])
    min_p = torch.tensor([0.0, 0.0, 0.1, 0.01, 0.0, 0.2])
    together = truncate(logits, top_k, top_p, min_p)
    for row in range(6):
        one = slice(row, row + 1)
        alone = truncate(logits[one], top_k[one], top_p[one], min_p[one])
        assert torch.equal(alone[0], together[row])
        needed = truncate(
            logits[one],
            top_k[one] if top_k[row] > 0 else None,
            top_p[one] if top_p[row] < 1 else None,
            min_p[one] if min_p[row] > 0 else None,
        )
        assert torch.equal(needed[0], together[row])
