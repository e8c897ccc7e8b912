"""The decoder against transformers' own models, position by position."""

from __future__ import annotations

import pytest
import torch
from tests.model.reference import (
    Driver,
    config_of,
    prompt,
    reference_logits,
    relative_error,
    tiny_model,
    weights_of,
)

ARCHITECTURES = ["qwen3", "qwen2", "llama", "mistral"]
TOLERANCE = 1e-4


def check(driver: Driver, model, schedule, tokens: dict[int, list[int]], pad: int = 0) -> None:
    """Run a schedule of steps (row, number of tokens) and compare every position."""
    done = dict.fromkeys(tokens, 0)
    got: dict[int, list[torch.Tensor]] = {row: [] for row in tokens}
    for step in schedule:
        chunks = [(row, tokens[row][done[row] : done[row] + count]) for row, count in step]
        for (row, count), out in zip(step, driver.run(chunks, pad), strict=True):
            got[row].append(out)
            done[row] += count
    for row, ids in tokens.items():
        assert done[row] == len(ids), "the schedule must run every token"
        error = relative_error(torch.cat(got[row]), reference_logits(model, ids))
        assert error < TOLERANCE, f"row {row}: {error}"


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefill_whole_chunked_and_decode(architecture: str, block_size: int) -> None:
    model = tiny_model(architecture)
    driver = Driver(cfg=config_of(model), weights=weights_of(model), block_size=block_size)
    tokens = {row: prompt(50, seed=row) for row in range(3)}
    check(driver, model, [[(0, 50)]], {0: tokens[0]})
    check(driver, model, [[(1, 7)], [(1, 16)], [(1, 2)], [(1, 25)]], {1: tokens[1]})
    check(driver, model, [[(2, 1)]] * 50, {2: tokens[2]})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixed_batches(architecture: str) -> None:
    model = tiny_model(architecture)
    driver = Driver(cfg=config_of(model), weights=weights_of(model))
    tokens = {0: prompt(40, 1), 1: prompt(33, 2), 2: prompt(90, 3), 5: prompt(17, 4)}
    schedule = [
        [(0, 30), (1, 32)],
        [(1, 1), (0, 1), (2, 40), (5, 10)],  # decodes first, then a prompt and a first chunk
        [(2, 1), (5, 6), (0, 9)],  # decode beside two chunks over cached context
        [(5, 1), (2, 49)],
    ]
    check(driver, model, schedule, tokens, pad=3)
