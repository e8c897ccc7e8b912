"""bfloat16: no worse than transformers' own bfloat16, measured against float32."""

from __future__ import annotations

import pytest
import torch

from infer.ops.torch_packed import can_pack
from tests.model.reference import (
    driver_of,
    prompt,
    reference_logits,
    tiny_model,
    weights_of,
)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Mean relative L2 error over positions."""
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).mean())


@pytest.mark.parametrize(
    ("form", "kv_dtype"),
    [
        ("dense", torch.bfloat16),
        ("torch", torch.bfloat16),
        ("torch", torch.float32),
        ("native", torch.bfloat16),
        ("native", torch.float32),
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
    if form == "torch" and not can_pack(weights_of(half)):
        pytest.skip("oneDNN has no packed bfloat16 here")
    driver = driver_of(half, form, kv_dtype=kv_dtype)
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
