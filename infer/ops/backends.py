"""Backends by name: which there are, which one a device gets, and how one is made."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from infer.config import ModelConfig
from infer.errors import ConfigError
from infer.native import weights as native
from infer.native.weights import native_library
from infer.ops import LayerShape, Ops, torch_attention, torch_dense, torch_packed
from infer.rope import cos_sin_table
from infer.weights import Weights

LEAST_CAPABILITY = (8, 0)  # bfloat16 products


def choose(
    name: str, device: torch.device, dtype: torch.dtype, *, num_ranks: int, compiling: bool
) -> tuple[str, str | None]:
    """The backend that ``name`` means here; and why it is not the device's fastest, if it is not.

    Raises:
        ConfigError: kernels of our own were asked for where they cannot run.
    """
    best = "triton" if device.type == "cuda" else "native"
    ours = ("auto", "triton", "flash_attn") if device.type == "cuda" else ("auto", "native")
    if name not in ours:
        return name, None  # make_ops refuses what is not for this device
    if device.type == "cuda":
        reason = _triton_obstacle(device)
    else:
        reason = _native_obstacle(device, dtype, num_ranks)
        if reason is None and name == "auto" and compiling:
            reason = "the layers are compiled"
    if reason is None:
        return best if name == "auto" else name, None
    if name != "auto":
        raise ConfigError(
            f"attention_backend is {name!r}, but {reason}; use attention_backend='torch'"
        )
    return "torch", reason


def _triton_obstacle(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= LEAST_CAPABILITY:
        return None
    least = ".".join(map(str, LEAST_CAPABILITY))
    return f"the GPU's compute capability is {major}.{minor} and the kernels need {least}"


def make_ops(name: str, cfg: ModelConfig, device: torch.device | str) -> Ops:
    """Make the backend ``name`` for one model on one device; ``choose`` says what auto is.

    Raises:
        ConfigError: no such backend, or one that cannot run on this device.
    """
    device = torch.device(device)
    if name == "torch":
        return torch_ops(cfg, device)
    if name == "native":
        return native_ops(cfg, device)
    if device.type != "cuda":
        raise ConfigError(f"attention_backend is {name!r}, which needs a CUDA GPU; use torch")
    if name == "triton":
        return triton_ops(cfg, device)
    if name == "flash_attn":
        return flash_attn_ops(cfg, device)
    raise ConfigError(f"attention_backend is {name!r}; choose native, torch, triton or flash_attn")


def native_ops(cfg: ModelConfig, device: torch.device | str) -> Ops:
    """A CPU's kernels of our own; single stages, where they are asked for, are plain torch."""
    library = native_library()
    if torch.device(device).type != "cpu":
        raise ConfigError("attention_backend is 'native', which is for a CPU; use triton")
    if isinstance(library, str):
        raise ConfigError(
            f"attention_backend is 'native', but {library}; use attention_backend='torch'"
        )
    plain = torch_ops(cfg, device)

    def lay_out(weights: Weights, shape: LayerShape) -> Weights:
        return native.lay_out(weights, shape, plain.cos_sin, library)

    return replace(plain, name="native", lay_out=lay_out)


def _native_obstacle(device: torch.device, dtype: torch.dtype, num_ranks: int) -> str | None:
    """Why native kernels cannot run; None if they can."""
    if device.type != "cpu":
        return f"the device is {device} and native kernels are for a CPU"
    if dtype not in native.DTYPES:
        return f"the dtype is {dtype} and native kernels compute in float32 and bfloat16"
    if num_ranks > 1:
        return f"{num_ranks} ranks share the model and native kernels need all of it"
    library = native_library()
    return library if isinstance(library, str) else None


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
        attention=flash_attn_backend.attention,
        fused_decode=None,
    )


def torch_ops(cfg: ModelConfig, device: torch.device | str) -> Ops:
    """Plain torch, on any device; on a CPU over weights packed for oneDNN."""
    return Ops(
        name="torch",
        cos_sin=cos_sin_table(cfg, device),
        prepare=torch_attention.prepare,
        linear=torch_dense.linear,
        add_rms_norm=torch_dense.add_rms_norm,
        qk_norm_rope_store=torch_attention.qk_norm_rope_store,
        attention=torch_attention.attention,
        silu_mul=torch_dense.silu_mul,
        lay_out=torch_packed.pack,
    )
