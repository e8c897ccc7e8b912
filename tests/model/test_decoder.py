"""The decoder against transformers' own models, position by position, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.model.reference import (
    Driver,
    config_of,
    driver_of,
    prompt,
    reference_logits,
    relative_error,
    tiny_model,
)

FORMS = ["dense", "torch", "native"]  # torch: packed for oneDNN
ARCHITECTURES = ["qwen3", "qwen2", "llama", "mistral"]
TOLERANCE = 1e-4
MIXED = [
    [(0, 30), (1, 32)],
    [(1, 1), (0, 1), (2, 40), (5, 10)],  # decodes first, then a prompt and a first chunk
    [(2, 1), (5, 6), (0, 9)],  # decode beside two chunks over cached context
    [(5, 1), (2, 49)],
]
MIXED_LENGTHS = {0: 40, 1: 33, 2: 90, 5: 17}


def check(
    driver: Driver,
    model: Any,
    schedule: list[list[tuple[int, int]]],
    lengths: dict[int, int],
    pad: int = 0,
) -> None:
    """Run a schedule of steps of (row, number of tokens) and compare every position."""
    tokens = {row: prompt(length, seed=row) for row, length in lengths.items()}
    done = dict.fromkeys(lengths, 0)
    got: dict[int, list[torch.Tensor]] = {row: [] for row in lengths}
    for step in schedule:
        chunks = [(row, tokens[row][done[row] : done[row] + count]) for row, count in step]
        for (row, count), out in zip(step, driver.run(chunks, pad), strict=True):
            got[row].append(out)
            done[row] += count
    for row, ids in tokens.items():
        assert done[row] == len(ids), "the schedule must run every token"
        error = relative_error(torch.cat(got[row]), reference_logits(model, ids))
        assert error < TOLERANCE, f"row {row}: {error}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_size", [7, 16, 256])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefill_whole_chunked_and_decode(architecture: str, block_size: int, form: str) -> None:
    model = tiny_model(architecture)
    driver = driver_of(model, form, block_size=block_size)
    check(driver, model, [[(0, 50)]], {0: 50})
    check(driver, model, [[(1, 7)], [(1, 16)], [(1, 2)], [(1, 25)]], {1: 50})
    check(driver, model, [[(2, 1)]] * 20, {2: 20})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixed_batches(architecture: str, form: str) -> None:
    model = tiny_model(architecture)
    driver = driver_of(model, form)
    check(driver, model, MIXED, MIXED_LENGTHS, pad=3)


@pytest.mark.parametrize("form", ["dense", "native"])
@pytest.mark.parametrize("head_dim", [20, 64, 128])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1), (8, 2), (8, 1)])
def test_head_groups(heads: tuple[int, int], head_dim: int, form: str) -> None:
    model = tiny_model("qwen3", heads=heads, head_dim=head_dim)
    check(driver_of(model, form), model, MIXED, MIXED_LENGTHS)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("form", ["dense", "native"])
def test_rope_kinds(form: str, rope: dict[str, Any]) -> None:
    model = tiny_model("llama", rope=rope)
    check(driver_of(model, form), model, MIXED, MIXED_LENGTHS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3"])
def test_sliding_window(architecture: str, form: str) -> None:
    model = tiny_model(architecture, sliding_window=24)
    cfg = config_of(model)
    assert cfg.sliding_window == 24
    assert model.config.sliding_window == 24
    driver = driver_of(model, form)
    check(driver, model, MIXED, MIXED_LENGTHS)
    check(driver, model, [[(3, 20)], *[[(3, 1)]] * 30], {3: 50})


@pytest.mark.parametrize("form", FORMS)
def test_tied_embeddings_and_all_biases(form: str) -> None:
    model = tiny_model("llama", tied=True, biases=True)
    cfg = config_of(model)
    assert cfg.tie_word_embeddings
    assert cfg.qkv_bias
    assert cfg.o_bias
    assert cfg.mlp_bias
    check(driver_of(model, form), model, MIXED, MIXED_LENGTHS)


@pytest.mark.parametrize("form", ["dense", "native"])
def test_sampled_tokens_come_from_the_device(form: str) -> None:
    model = tiny_model("llama")
    ids = prompt(9)
    driver = driver_of(model, form)
    driver.run([(4, ids[:8])])
    out = driver.run([(4, ids[8:])], from_device=True)[0]
    assert relative_error(out, reference_logits(model, ids)[8:]) < TOLERANCE


@pytest.mark.parametrize("form", ["dense", "native"])
def test_the_cache_is_donated_not_copied(form: str) -> None:
    model = tiny_model("llama")
    driver = driver_of(model, form)
    before = [tensor.data_ptr() for tensor in (*driver.kv.k, *driver.kv.v)]
    driver.run([(0, prompt(20))])
    assert [tensor.data_ptr() for tensor in (*driver.kv.k, *driver.kv.v)] == before
    written = driver.tables[0, :2].long()
    others = torch.ones(driver.kv.num_blocks + 1, dtype=torch.bool)
    others[written] = False
    assert not driver.kv.k[1][others].any(), "only the row's own blocks are written"
    assert driver.kv.k[1][written].any()
