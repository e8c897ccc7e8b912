"""Describe an engine: one value for banners, ``/health``, info metrics and pages."""

from __future__ import annotations

from dataclasses import asdict

import torch

from infer.config import GenerationDefaults
from infer.initialize import kv_bytes_per_token
from infer.model import Model
from infer.provenance import versions
from infer.state import EngineState
from infer.types import EngineInfo
from infer.weights import Weights


def engine_info(model: Model, state: EngineState) -> EngineInfo:
    """What ``state`` and its model are."""
    limits, config = state.limits, state.config
    return EngineInfo(
        model_name=model.name,
        architecture=model.config.architecture,
        device=_device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        attention_backend=state.runtime.ops.name,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        kv_bytes_per_token=kv_bytes_per_token(model),
        weight_bytes=_weight_bytes(model.weights),
        vocab_size=limits.vocab_size,
        tp_size=model.tp.size,
        pipeline_depth=state.pipeline_depth,
        compiled=bool(config.compile),
        versions=versions(),
        config=asdict(model.config),
        model_path=model.path,
        sampling=_sampling(model.defaults),
    )


def _sampling(defaults: GenerationDefaults) -> dict[str, float]:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: getattr(defaults, name) for name in names}


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def _weight_bytes(weights: Weights) -> int:
    """Bytes of this rank's weights; a tied LM head counts once."""
    tensors = [weights.embed, weights.norm, weights.lm_head]
    for layer in weights.layers:
        tensors += [t for name in layer.__slots__ if (t := getattr(layer, name)) is not None]
    sizes = {t.data_ptr(): t.numel() * t.element_size() for t in tensors}
    return sum(sizes.values())
