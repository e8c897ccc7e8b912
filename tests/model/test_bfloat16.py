"""bfloat16: no worse than transformers' own bfloat16, measured against float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infer.ops.torch_packed import PackedWeights, pack
from infer.weights import Weights
from tests.model.reference import (
    Driver,
    config_of,
    prompt,
    reference_logits,
    tiny_model,
    weights_of,
)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Mean relative L2 error over positions."""
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).mean())


def form_of(model: Any, form: str) -> Weights:
    weights = weights_of(model)
    if form == "dense":
        return weights
    packed = pack(weights, wide=form == "wide")
    if not isinstance(packed, PackedWeights):
        pytest.skip("oneDNN has no packed bfloat16 here")
    return packed


@pytest.mark.parametrize(
    ("form", "kv_dtype"),
    [
        ("dense", torch.bfloat16),
        ("packed", torch.bfloat16),
        ("packed", torch.float32),
        ("wide", torch.bfloat16),
        ("wide", torch.float32),
    ],
)
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "mistral"])
def test_error_against_float32(form: str, kv_dtype: torch.dtype, architecture: str) -> None:
    rows = {row: prompt(60, seed=row) for row in range(6)}
    model = tiny_model(architecture)
    half = tiny_model(architecture).bfloat16()
    # Round the weights once, so that only arithmetic is compared.
    model.load_state_dict({k: v.float() for k, v in half.state_dict().items()})
    exact = {row: reference_logits(model, ids) for row, ids in rows.items()}
    theirs = [error(reference_logits(half, ids), exact[row]) for row, ids in rows.items()]
    driver = Driver(cfg=config_of(half), weights=form_of(half, form), kv_dtype=kv_dtype)
    outs: dict[int, list[torch.Tensor]] = {row: [] for row in rows}
    for first, last in [(0, 40), *[(i, i + 1) for i in range(40, 60)]]:
        # Two steps each: the rows together, and by themselves (fewer tokens: another kernel).
        for some in ((0, 1, 2, 3), (4,), (5,)):
            for row, out in zip(
                some, driver.run([(row, rows[row][first:last]) for row in some]), strict=True
            ):
                outs[row].append(out)
    ours = [error(torch.cat(outs[row]), exact[row]) for row in rows]
    assert sum(ours) <= 1.25 * sum(theirs), (ours, theirs)
