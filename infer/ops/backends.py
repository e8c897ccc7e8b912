"""Backends by name: which there are, which one a device gets, and how one is made."""

from __future__ import annotations

import torch

from infer.config import ModelConfig
from infer.errors import ConfigError
from infer.ops import Ops, torch_attention, torch_dense
from infer.rope import cos_sin_table


def make_ops(name: str, cfg: ModelConfig, device: torch.device | str) -> Ops:
    """Make the backend ``name`` (``auto``: the device's default) for one model on one device.

    Raises:
        ConfigError: no such backend, or one that cannot run on this device.
    """
    if name in ("auto", "torch"):
        return torch_ops(cfg, device)
    raise ConfigError(f"attention_backend is {name!r}; on {device} there is: torch")


def torch_ops(cfg: ModelConfig, device: torch.device | str) -> Ops:
    """Plain torch, on any device."""
    return Ops(
        name="torch",
        cos_sin=cos_sin_table(cfg, device),
        prepare=torch_attention.prepare,
        linear=torch_dense.linear,
        add_rms_norm=torch_dense.add_rms_norm,
        qk_norm_rope_store=torch_attention.qk_norm_rope_store,
        attention=torch_attention.attention,
        silu_mul=torch_dense.silu_mul,
    )
