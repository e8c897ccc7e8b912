"""``infer memory``: figures worked out by hand, and those of a real allocation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.cli import main
from infer.config import EngineConfig
from infer.errors import CheckpointError, ConfigError
from infer.initialize import init
from infer.loading import load
from infer.memoryplan import find_config, memory_plan
from infer.presets import find_preset
from tests.checkpoint.gguf_make import write
from tests.checkpoint.tiny import save, tiny_model

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def planned(name: str, **options: Any) -> Any:
    return memory_plan(*find_config(name), **options)


def test_qwen3_by_hand() -> None:
    """2 (K and V) x 28 layers x 8 KV heads x 128 x 2 bytes, and what follows from it."""
    plan = planned("qwen3-0.6b", block_size=256, contexts=(4096, 8 * 4096))
    assert plan.kv_bytes_per_token == 114_688 == 112 * KIB
    assert dict(plan.contexts) == {4096: 448 * MIB, 32_768: 3.5 * GIB}
    assert plan.block_bytes == 28 * MIB
    embedding = 151_936 * 1024
    layer = 1024 * (16 + 8 + 8) * 128 + 16 * 128 * 1024 + 3 * 1024 * 3072
    norms = 28 * (2 * 1024 + 2 * 128) + 1024
    assert plan.num_parameters == embedding + 28 * layer + norms == 596_049_920
    assert plan.weight_bytes == 2 * plan.num_parameters


def test_ranks_share_weights_and_kv() -> None:
    one, two = (planned("qwen3-0.6b", tp=tp) for tp in (1, 2))
    assert two.kv_bytes_per_token == 57_344
    assert two.weights["attention"] < one.weights["attention"]
    assert two.weights["feed-forward"] * 2 == one.weights["feed-forward"]
    assert two.weights["norms"] == one.weights["norms"], "every rank has them all"
    # 8 KV heads on 16 ranks: each is on two.
    assert planned("qwen3-0.6b", tp=16).kv_bytes_per_token == 114_688 // 8


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama-biased", "mistral"])
def test_equals_what_an_engine_allocates(name: str, tmp_path: Path) -> None:
    folder = save(tiny_model(name), tmp_path / name)
    model = load(folder, device="cpu", dtype="float32", progress=False)
    config = EngineConfig(num_blocks=9, block_size=4, max_num_seqs=3, max_model_len=32)
    state = init(model, config)
    plan = planned(str(folder), dtype="float32", block_size=4, max_num_seqs=3)
    stored = torch.nn.Module.state_dict(tiny_model(name))
    tied = tiny_model(name).config.tie_word_embeddings
    sizes = [t.numel() for key, t in stored.items() if not (tied and key == "lm_head.weight")]
    assert plan.num_parameters == sum(sizes)
    assert plan.weight_bytes == 4 * sum(sizes)
    pages = sum(t.nbytes for t in (*state.kv.k, *state.kv.v))
    assert pages == (9 + 1) * plan.block_bytes
    edits = state.rows.edits
    tables = (edits.counts, edits.in_prompt, edits.bias, edits.stops)
    assert plan.state_bytes == sum(t.nbytes for t in tables)


def test_what_fits_is_the_budget_and_not_more() -> None:
    plan = planned("qwen3-0.6b", block_size=256, budget=8 * GIB)
    assert plan.num_blocks is not None
    used = plan.weight_bytes + plan.state_bytes + (plan.num_blocks + 1) * plan.block_bytes
    assert used <= 8 * GIB < used + plan.block_bytes
    assert plan.num_tokens == 256 * plan.num_blocks
    assert planned("qwen3-8b", budget=GIB).num_blocks == 0


def test_a_configuration_is_enough(tmp_path: Path) -> None:
    folder = save(tiny_model("qwen3"), tmp_path / "whole")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    assert planned(str(bare)).weight_bytes == planned(str(folder)).weight_bytes
    write(tmp_path / "tiny.gguf", tiny_model("llama"))
    gguf = planned(str(tmp_path / "tiny.gguf"))
    stored = tiny_model("llama").state_dict()
    assert gguf.num_parameters == sum(t.numel() for t in stored.values())


def test_a_preset_needs_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    preset = find_preset("mistral-7b")
    assert preset is not None and preset.config is not None
    assert planned("mistral-7b").num_parameters == 7_248_023_552


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["memory", "--model", "qwen3-0.6b", "--block-size", "256", "--memory", "139"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for figure in ("114,688   112 KiB", "29,360,128   28 MiB", "469,762,048   448 MiB"):
        assert figure in text
    assert main([*arguments, "--json", "--tp", "2", "--context", "100"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_bytes_per_token"] == 57_344
    assert found["contexts"] == {"100": 5_734_400}
    assert found["num_tokens"] == 256 * found["num_blocks"] > 1_000_000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tp", "17"], "at most the number of attention heads (16)"),
        (["--tp", "0"], "tp is 0"),
        (["--dtype", "int8"], "choose float32"),
        (["--memory", "-1"], "above 0"),
        (["--context", "0"], "context is 0"),
        (["--model", "no such model"], "there is no model"),
    ],
)
def test_mistakes(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--model", "qwen3-0.6b", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_errors_are_typed() -> None:
    with pytest.raises(ConfigError):
        planned("qwen3-0.6b", dtype="float8")
    with pytest.raises(CheckpointError):
        planned("owner-less name")
