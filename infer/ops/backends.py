"""Backends by name: which there are, which one a device gets, and how one is made."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from infer.config import ModelConfig
from infer.errors import ConfigError
from infer.ops import Ops, torch_attention, torch_dense
from infer.rope import cos_sin_table


def make_ops(name: str, cfg: ModelConfig, device: torch.device | str) -> Ops:
    """Make the backend ``name`` (``auto``: the device's default) for one model on one device.

    Raises:
        ConfigError: no such backend, or one that cannot run on this device.
    """
    device = torch.device(device)
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name == "torch":
        return torch_ops(cfg, device)
    if device.type != "cuda":
        raise ConfigError(f"attention_backend is {name!r}, which needs a CUDA GPU; use torch")
    if name == "triton":
        return triton_ops(cfg, device)
    if name == "flash_attn":
        return flash_attn_ops(cfg, device)
    raise ConfigError(f"attention_backend is {name!r}; choose auto, torch, triton or flash_attn")


def triton_ops(cfg: ModelConfig, device: torch.device) -> Ops:
    """Kernels of our own. Triton is imported here: a CPU installation goes without it."""
    try:
        from infer.ops import triton_backend, triton_norm
    except ImportError as error:
        raise ConfigError(
            f"attention_backend 'triton' needs the package triton ({error}); "
            "install purestep[gpu] or use attention_backend='torch'"
        ) from error
    cos_sin = cos_sin_table(cfg, device)
    return Ops(
        name="triton",
        cos_sin=cos_sin,
        prepare=triton_backend.prepare,
        linear=F.linear,
        add_rms_norm=triton_norm.add_rms_norm,
        qk_norm_rope_store=triton_backend.qk_norm_rope_store,
        attention=triton_backend.attention,
        silu_mul=triton_norm.silu_mul,
        fused_decode=triton_backend.fused_decode(cos_sin),
        capturable=True,
    )


def flash_attn_ops(cfg: ModelConfig, device: torch.device) -> Ops:
    """Attention by the flash-attn package, the other stages by kernels of our own."""
    try:
        import flash_attn  # noqa: F401 - built for another torch it fails here, not in a step

        from infer.ops import flash_attn_backend
    except ImportError as error:
        raise ConfigError(
            f"attention_backend 'flash_attn' needs the package flash-attn, built for this torch "
            f"({error}); install purestep[gpu] or use attention_backend='triton'"
        ) from error
    return replace(
        triton_ops(cfg, device),
        name="flash_attn",
        prepare=flash_attn_backend.prepare,
        qk_norm_rope_store=flash_attn_backend.qk_norm_rope_store,
        attention=flash_attn_backend.attention,
        fused_decode=None,
    )


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
