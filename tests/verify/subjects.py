"""Tiny random models to verify."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from infer.config import RopeConfig
from infer.trace.setup import TINY_CONFIG
from infer.verify.subject import Subject

TINY = replace(TINY_CONFIG, vocab_size=211, intermediate_size=96, max_position_embeddings=512)
LLAMA3 = RopeConfig(
    theta=5e5,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=64)
CONFIGS = {
    "qwen3": TINY,
    "qwen2": replace(TINY, architecture="qwen2", qk_norm=False, qkv_bias=True, rope=YARN),
    "llama": replace(
        TINY,
        architecture="llama",
        qk_norm=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope=LLAMA3,
    ),
    "mistral": replace(TINY, architecture="mistral", qk_norm=False, sliding_window=24),
}


def subject(name: str = "qwen3", **changes: Any) -> Subject:
    """Random weights of a tiny model on the CPU."""
    options = {"load_format": "random", "device": "cpu"}
    return Subject(model=name, config=replace(CONFIGS[name], **changes), options=options)
