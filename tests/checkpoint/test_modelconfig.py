"""config.json to ModelConfig, against transformers' reading of the same file."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import transformers

from infer.config import GenerationDefaults, RopeConfig
from infer.errors import CheckpointError
from infer.modelconfig import generation_defaults, model_config
from tests.checkpoint.tiny import CASES, SIZES, tiny_model

LLAMA: dict[str, Any] = {**SIZES, "architectures": ["LlamaForCausalLM"]}
QWEN2: dict[str, Any] = {**SIZES, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}
MISTRAL: dict[str, Any] = {**SIZES, "architectures": ["MistralForCausalLM"]}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize("case", CASES)
def test_reads_what_transformers_writes(case: str) -> None:
    model = tiny_model(case)
    hf = model.config
    cfg = model_config(hf.to_diff_dict() | {"architectures": [type(model).__name__]})
    assert cfg.vocab_size == hf.vocab_size
    assert cfg.hidden_size == hf.hidden_size
    assert cfg.intermediate_size == hf.intermediate_size
    assert cfg.num_layers == hf.num_hidden_layers
    assert cfg.num_heads == hf.num_attention_heads
    assert cfg.num_kv_heads == hf.num_key_value_heads
    assert cfg.head_dim == model.model.layers[0].self_attn.head_dim
    assert cfg.rms_norm_eps == hf.rms_norm_eps
    assert cfg.rope == RopeConfig(theta=10_000.0)
    assert cfg.max_position_embeddings == hf.max_position_embeddings
    assert cfg.tie_word_embeddings == hf.tie_word_embeddings
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert cfg.qkv_bias == (attention.q_proj.bias is not None)
    assert cfg.o_bias == (attention.o_proj.bias is not None)
    assert cfg.mlp_bias == (mlp.down_proj.bias is not None)
    assert cfg.qk_norm == hasattr(attention, "q_norm")
    assert cfg.sliding_window == (8 if case == "mistral" else None)
    assert (cfg.bos_token_id, cfg.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Llama", "Mistral"])
def test_absent_keys_have_the_architectures_defaults(family: str) -> None:
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    needed = {key: SIZES[key] for key in keys} | {"num_attention_heads": 4}
    needed |= {} if family == "Llama" else {"num_key_value_heads": 2}
    hf = getattr(transformers, f"{family}Config")(**needed)
    cfg = model_config(needed | {"architectures": [f"{family}ForCausalLM"]})
    assert cfg.max_position_embeddings == hf.max_position_embeddings
    assert cfg.rms_norm_eps == hf.rms_norm_eps
    assert cfg.num_kv_heads == hf.num_key_value_heads
    assert cfg.tie_word_embeddings == hf.tie_word_embeddings
    assert cfg.head_dim == getattr(hf, "head_dim", 8)


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, RopeConfig(theta=5e5, kind="linear", factor=2.0)),
        (
            {"rope_type": "llama3", **LLAMA3},
            RopeConfig(theta=5e5, kind="llama3", **LLAMA3),  # type: ignore[arg-type]
        ),
        (
            {"rope_type": "yarn", "factor": 4.0},
            RopeConfig(theta=5e5, kind="yarn", factor=4.0, original_max_position_embeddings=256),
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
            | {"beta_fast": 16, "attention_factor": 1.5, "truncate": False},
            RopeConfig(
                theta=5e5,
                kind="yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                beta_fast=16.0,
                attention_factor=1.5,
                truncate=False,
            ),
        ),
        ({"rope_type": "default"}, RopeConfig(theta=5e5)),
        (None, RopeConfig(theta=5e5)),
    ],
)
def test_both_rope_spellings(described: dict[str, Any] | None, expected: RopeConfig) -> None:
    old = model_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": described})
    new = model_config({**LLAMA, "rope_parameters": {**(described or {}), "rope_theta": 5e5}})
    assert old.rope == expected
    assert new.rope == expected


@pytest.mark.parametrize("described", [{"rope_type": "yarn", "factor": 4.0}, LLAMA3])
def test_rope_fields_agree_with_transformers(described: dict[str, Any]) -> None:
    """transformers' normalised description holds the same numbers as ours."""
    described = {"rope_type": "llama3", **described}
    hf = transformers.LlamaConfig(
        **SIZES, rope_scaling=dict(described), rope_theta=7e4
    ).rope_parameters
    rope = model_config({**LLAMA, "rope_scaling": described, "rope_theta": 7e4}).rope
    ours = {f.name: getattr(rope, f.name) for f in fields(rope)} | {"rope_theta": rope.theta}
    ours["rope_type"] = rope.kind
    assert {key: ours[key] for key in hf} == hf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": None, "model_type": "mixtral"}, "mixtral"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": ["yarn"]}}, "unknown RoPE type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope"),
        ({"rope_scaling": "yarn"}, "'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "between layers"),
        ({"partial_rotary_factor": 0.5}, "0.5"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"hidden_size": 30}, "multiple of num_attention_heads"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"vocab_size": "many"}, "'many'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"num_hidden_layers": 2.5}, "2.5"),
        ({"dtype": "int8"}, "int8"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message.replace("[", r"\[")):
        model_config(LLAMA | changes)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        model_config({k: v for k, v in LLAMA.items() if k != key})


@pytest.mark.parametrize(
    ("hf", "window"),
    [
        (MISTRAL, None),
        (MISTRAL | {"sliding_window": None}, None),
        (MISTRAL | {"sliding_window": 64}, 64),
        (QWEN2, None),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, 64),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 2}, None),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 64),
        (LLAMA | {"sliding_window": 64}, None),
    ],
)
def test_sliding_window_is_honoured(hf: dict[str, Any], window: int | None) -> None:
    assert model_config(hf).sliding_window == window


@pytest.mark.parametrize(
    "hf",
    [
        QWEN2 | {"use_sliding_window": True, "max_window_layers": 1},
        QWEN2
        | {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
        MISTRAL | {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_mixed_attention_layers_are_refused(hf: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="layers"):
        model_config(hf)


def test_qwen2_layers_are_counted_as_transformers_does() -> None:
    """The window's layers by transformers are those by which we accept or refuse."""
    for first in (0, 1, 2, 28):
        changes = {"use_sliding_window": True, "max_window_layers": first, "sliding_window": 64}
        kinds = set(transformers.Qwen2Config(**SIZES | changes).layer_types)
        if len(kinds) > 1:
            with pytest.raises(CheckpointError):
                model_config(QWEN2 | changes)
        else:
            window = model_config(QWEN2 | changes).sliding_window
            assert (window is not None) == (kinds == {"sliding_attention"})


def test_generation_defaults() -> None:
    full = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}
    full |= {"eos_token_id": [7, 8], "repetition_penalty": 1.1, "min_p": 0.05}
    assert generation_defaults(full, (2,)) == GenerationDefaults(
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
        eos_token_ids=(7, 8),
    )
    assert generation_defaults({}, (2,)) == GenerationDefaults(eos_token_ids=(2,))
    greedy = generation_defaults({"do_sample": False, "temperature": 0.6})
    assert greedy.temperature == 0
    assert generation_defaults({"temperature": None, "top_k": None}) == GenerationDefaults()
    with pytest.raises(CheckpointError, match="temperature"):
        generation_defaults({"temperature": -1})
