"""Whole models on a GPU, each backend against transformers there."""

from __future__ import annotations

import pytest
import torch

from infer.errors import ConfigError
from infer.ops import Ops
from infer.ops.backends import make_ops
from tests.model.reference import (
    Driver,
    config_of,
    prompt,
    reference_logits,
    relative_error,
    tiny_model,
    weights_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

BACKENDS = [("torch", 16), ("triton", 16), ("triton", 256), ("flash_attn", 256)]
STEPS = [
    [(0, 30), (1, 250)],
    [(1, 1), (0, 1), (2, 400), (5, 10)],
    [(2, 1), (1, 1), (5, 6), (0, 9)],
    *[[(0, 1), (1, 1), (2, 1), (5, 1)]] * 10,
]
LENGTHS = {0: 50, 1: 262, 2: 411, 5: 26}
SHAPES = [
    ("qwen3", (8, 4), 128, None),
    ("qwen3", (3, 1), 64, None),
    ("qwen2", (8, 2), 64, None),
    ("llama", (2, 2), 128, None),
    ("llama", (8, 1), 64, None),
    ("mistral", (4, 2), 64, 100),
]


def backend(name: str, driver: Driver) -> Ops:
    try:
        return make_ops(name, driver.cfg, "cuda")
    except ConfigError as error:
        pytest.skip(str(error))


def run(driver: Driver) -> dict[int, torch.Tensor]:
    """Mixed steps, then decodes: logits at every position."""
    tokens = {row: prompt(length, seed=row) for row, length in LENGTHS.items()}
    done = dict.fromkeys(tokens, 0)
    got: dict[int, list[torch.Tensor]] = {row: [] for row in tokens}
    for step in STEPS:
        chunks = [(row, tokens[row][done[row] : done[row] + count]) for row, count in step]
        for (row, count), out in zip(step, driver.run(chunks), strict=True):
            got[row].append(out)
            done[row] += count
    assert done == LENGTHS
    return {row: torch.cat(outs) for row, outs in got.items()}


@pytest.mark.parametrize(("architecture", "heads", "head_dim", "window"), SHAPES)
@pytest.mark.parametrize(("name", "block_size"), BACKENDS)
def test_float32(
    name: str,
    block_size: int,
    architecture: str,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
) -> None:
    if name == "flash_attn":
        pytest.skip("flash-attn has no float32")
    model = tiny_model(architecture, heads=heads, head_dim=head_dim, sliding_window=window).cuda()
    driver = Driver(
        cfg=config_of(model), weights=weights_of(model), block_size=block_size, device="cuda"
    )
    driver.ops = backend(name, driver)
    for row, out in run(driver).items():
        want = reference_logits(model, prompt(LENGTHS[row], seed=row))
        assert relative_error(out, want) < 1e-4, row


@pytest.mark.parametrize(("architecture", "heads", "head_dim", "window"), SHAPES)
@pytest.mark.parametrize(("name", "block_size"), BACKENDS)
def test_bfloat16(
    name: str,
    block_size: int,
    architecture: str,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
) -> None:
    shape = {"heads": heads, "head_dim": head_dim, "sliding_window": window}
    half = tiny_model(architecture, **shape).bfloat16().cuda()
    exact = tiny_model(architecture, **shape).cuda()
    exact.load_state_dict({k: v.float() for k, v in half.state_dict().items()})
    driver = Driver(
        cfg=config_of(half), weights=weights_of(half), block_size=block_size, device="cuda"
    )
    driver.ops = backend(name, driver)
    ours = theirs = 0.0
    for row, out in run(driver).items():
        ids = prompt(LENGTHS[row], seed=row)
        want = reference_logits(exact, ids)
        size = want.norm(dim=-1)
        ours += float(((out - want).norm(dim=-1) / size).sum())
        theirs += float(((reference_logits(half, ids) - want).norm(dim=-1) / size).sum())
    assert ours <= 1.25 * theirs
