"""RoPE tables against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from infer.config import ModelConfig, RopeConfig
from infer.errors import ConfigError
from infer.rope import cos_sin_table, num_positions

KINDS: list[dict[str, Any]] = [
    {"kind": "default", "theta": 1e6},
    {"kind": "linear", "theta": 1e4, "factor": 4.0},
    {
        "kind": "llama3",
        "theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"kind": "yarn", "theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512},
    {
        "kind": "yarn",
        "theta": 1e4,
        "factor": 2.5,
        "original_max_position_embeddings": 512,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    {
        "kind": "yarn",
        "theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    {
        "kind": "yarn",
        "theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.3,
    },
]


def model_config(rope: RopeConfig, head_dim: int = 64, positions: int = 2048) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=8,
        hidden_size=2 * head_dim,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=rope,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind['kind']}-{kind.get('factor', 1)}")
def test_table_is_transformers(kind: dict[str, Any], head_dim: int) -> None:
    options = dict(kind)
    options["rope_type"], options["rope_theta"] = options.pop("kind"), options.pop("theta")
    hf = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=2048,
        rope_parameters=options,
    )
    positions = torch.arange(2048)[None]
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), positions)
    table = cos_sin_table(model_config(RopeConfig(**kind), head_dim))
    half = head_dim // 2
    assert table.dtype == torch.float32
    assert torch.equal(cos[0, :, :half], cos[0, :, half:])
    # An angle of 2,000 radians in float32 carries an error of 1e-4.
    torch.testing.assert_close(table[:2048, :half], cos[0, :, :half], atol=3e-4, rtol=0)
    torch.testing.assert_close(table[:2048, half:], sin[0, :, :half], atol=3e-4, rtol=0)
    torch.testing.assert_close(table[:64, :half], cos[0, :64, :half], atol=1e-5, rtol=0)


def test_yarn_stretches_the_number_of_positions() -> None:
    yarn = RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=512)
    assert num_positions(model_config(yarn, positions=512)) == 2048
    assert num_positions(model_config(yarn, positions=4096)) == 4096
    assert num_positions(model_config(RopeConfig(), positions=512)) == 512


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_missing_original_context_is_a_config_error(kind: Any) -> None:
    with pytest.raises(ConfigError, match="original_max_position_embeddings"):
        cos_sin_table(model_config(RopeConfig(kind=kind, factor=2.0)))


def test_unknown_kind_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'spiral'"):
        cos_sin_table(model_config(RopeConfig(kind="spiral")))  # type: ignore[arg-type]
