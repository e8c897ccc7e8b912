"""Rotary position embedding tables: plain, linear, llama3 and YaRN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from infer.config import ModelConfig, RopeConfig
from infer.errors import ConfigError


def cos_sin_table(cfg: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Make the table every step gathers its rows from.

    Row p holds the cosines of position p's head_dim / 2 angles, then their sines, both scaled by
    YaRN's attention factor: float32 ``[num_positions(cfg), head_dim]``.

    Raises:
        ConfigError: the RoPE kind is unknown or lacks a number it needs.
    """
    inv_freq, attention_factor = inverse_frequencies(cfg.rope, cfg.head_dim)
    positions = torch.arange(num_positions(cfg), dtype=torch.float32)
    angles = torch.outer(positions, inv_freq)
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * attention_factor).to(device)


def num_positions(cfg: ModelConfig) -> int:
    """Positions the model is made for: YaRN stretches the original context by its factor."""
    rope = cfg.rope
    if rope.kind != "yarn" or rope.original_max_position_embeddings is None:
        return cfg.max_position_embeddings
    stretched = int(rope.original_max_position_embeddings * rope.factor)
    return max(cfg.max_position_embeddings, stretched)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return float32 ``[head_dim / 2]`` angles a position and the factor on cosines and sines.

    Raises:
        ConfigError: the RoPE kind is unknown or lacks a number it needs.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return inv_freq, 1.0
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq, head_dim), _yarn_attention_factor(rope)
    raise ConfigError(
        f"RoPE kind is {rope.kind!r}, this package knows default, linear, llama3 and yarn"
    )


def _original_context(rope: RopeConfig) -> int:
    if rope.original_max_position_embeddings is None:
        raise ConfigError(
            f"RoPE kind {rope.kind!r} needs original_max_position_embeddings; "
            "add it to rope_parameters in config.json"
        )
    return rope.original_max_position_embeddings


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Divide low frequencies by ``factor``, keep high ones, blend between (Llama 3.1)."""
    rotations = _original_context(rope) * inv_freq / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq * (keep + (1.0 - keep) / rope.factor)


def _yarn(rope: RopeConfig, inv_freq: Tensor, head_dim: int) -> Tensor:
    """Blend plain and stretched frequencies along a ramp over dimensions (arXiv 2309.00071)."""
    original = _original_context(rope)

    def dimension(rotations: float) -> float:
        """The (fractional) dimension that makes this many turns over the original context."""
        turns = math.log(original / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / width
    stretch = ramp.clamp(0.0, 1.0)
    return inv_freq * (1.0 - stretch) + inv_freq / rope.factor * stretch


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scaled(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scaled(rope.mscale) / scaled(rope.mscale_all_dim)
    return scaled(1.0)
