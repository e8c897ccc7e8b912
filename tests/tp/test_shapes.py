"""What a rank of Qwen3-0.6B holds: the shapes of a well-known implementation at two ranks."""

from __future__ import annotations

import pytest
import torch

from infer import kv
from infer.config import ModelConfig
from infer.errors import ConfigError
from infer.modelconfig import model_config
from infer.parallel import TP
from infer.presets import find_preset
from infer.weights import abstract, local_config, vocab_range


@pytest.fixture(scope="module")
def qwen() -> ModelConfig:
    preset = find_preset("qwen3-0.6b")
    assert preset is not None
    assert preset.config is not None
    return model_config(preset.config)


@pytest.mark.parametrize("rank", [0, 1])
def test_shapes_of_two_ranks(qwen: ModelConfig, rank: int) -> None:
    tp = TP(rank=rank, size=2)
    local, params = local_config(qwen, tp), abstract(qwen, tp)
    assert (local.num_heads, local.num_kv_heads) == (8, 4)
    assert params["layers.0.qkv"].shape == (2048, 1024)
    assert params["layers.27.o"].shape == (1024, 1024)
    assert params["layers.0.gate_up"].shape == (3072, 1024)
    assert params["layers.0.down"].shape == (1024, 1536)
    assert params["embed"].shape == (75_968, 1024)
    assert vocab_range(qwen, tp) == range(75_968 * rank, 75_968 * (rank + 1))


def test_kv_of_two_ranks(qwen: ModelConfig) -> None:
    def per_token(tp: TP) -> int:
        local = local_config(qwen, tp)
        return kv.bytes_per_token(
            local.num_layers, local.num_kv_heads, local.head_dim, torch.bfloat16
        )

    assert per_token(TP()) == 112 * 1024
    assert per_token(TP(rank=1, size=2)) == 56 * 1024


def test_what_cannot_be_split(qwen: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"tp is 17, it must be at most .* attention heads"):
        local_config(qwen, TP(rank=0, size=17))
