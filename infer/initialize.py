"""``init``: from a model and options to an engine state, every open choice decided."""

from __future__ import annotations

from dataclasses import replace

import torch

from infer import host as hosts
from infer import kv as kv_cache
from infer import rows as row_state
from infer.config import EngineConfig, Limits, ModelConfig
from infer.errors import ConfigError
from infer.model import Model
from infer.ops.backends import make_ops
from infer.runtime import Runtime
from infer.state import EngineState
from infer.weights import local_config

CPU_KV_BYTES = 1 << 30
CPU_DEFAULTS = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "pipeline_depth": 0}
CUDA_DEFAULTS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "pipeline_depth": 1}


def init(model: Model, config: EngineConfig | None = None) -> EngineState:
    """Allocate an engine for ``model``.

    Raises:
        ConfigError: options that contradict each other, the model or the memory there is.
    """
    config = _decided(model, config or EngineConfig())
    limits = _limits(model, config)
    local = local_config(model.config, model.tp)
    assert config.block_size is not None and config.num_blocks is not None
    with torch.inference_mode():
        kv = kv_cache.allocate(
            local.num_layers,
            config.num_blocks,
            config.block_size,
            local.num_kv_heads,
            local.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        rows = row_state.make(limits, model.device)
    ops = make_ops(config.attention_backend, model.config, model.device)
    return EngineState(
        host=hosts.make(limits),
        kv=kv,
        rows=rows,
        runtime=Runtime(ops),
        limits=limits,
        config=config,
    )


def _decided(model: Model, config: EngineConfig) -> EngineConfig:
    """``config`` with every None filled in; lengths and memory agree."""
    defaults = CUDA_DEFAULTS if model.device.type == "cuda" else CPU_DEFAULTS
    changes = {k: v for k, v in defaults.items() if getattr(config, k) is None}
    seqs = config.max_num_seqs or changes["max_num_seqs"]
    if "max_num_batched_tokens" in changes:
        changes["max_num_batched_tokens"] = max(changes["max_num_batched_tokens"], seqs)
    elif "max_num_seqs" in changes:
        changes["max_num_seqs"] = min(seqs, config.max_num_batched_tokens or seqs)
    block_size = config.block_size or (256 if config.attention_backend == "flash_attn" else 16)
    per_block = block_size * kv_bytes_per_token(model)
    num_blocks = config.num_blocks or _num_blocks(model, config, per_block)
    model_len = _max_model_len(model.config, config, num_blocks * block_size)
    return replace(
        config,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=model_len,
        compile=config.compile if config.compile is not None else model.device.type == "cuda",
        **changes,
    )


def kv_bytes_per_token(model: Model) -> int:
    """KV bytes a position takes on this rank."""
    local = local_config(model.config, model.tp)
    return kv_cache.bytes_per_token(
        local.num_layers, local.num_kv_heads, local.head_dim, model.dtype
    )


def _num_blocks(model: Model, config: EngineConfig, per_block: int) -> int:
    if model.device.type == "cpu":
        return max(1, CPU_KV_BYTES // per_block)
    free, total = torch.cuda.mem_get_info(model.device)
    budget = int(total * config.gpu_memory_utilization) - (total - free)
    if budget < 2 * per_block:
        raise ConfigError(
            f"gpu_memory_utilization {config.gpu_memory_utilization} of {total >> 20} MiB leaves "
            f"{budget >> 20} MiB for KV, one block takes {per_block >> 10} KiB; raise it, free "
            "memory on the GPU, or lower block_size"
        )
    return budget // per_block - 1


def _max_model_len(model: ModelConfig, config: EngineConfig, pool: int) -> int:
    asked, most = config.max_model_len, model.max_position_embeddings
    if asked is None:
        return min(most, pool)
    if asked > most:
        raise ConfigError(f"max_model_len is {asked}, the model was made for at most {most}")
    if asked > pool:
        raise ConfigError(
            f"max_model_len is {asked}, the KV pool holds {pool} tokens; raise num_blocks or "
            "gpu_memory_utilization, or lower max_model_len"
        )
    return asked


def _limits(model: Model, config: EngineConfig) -> Limits:
    assert config.max_model_len and config.max_num_seqs and config.max_num_batched_tokens
    assert config.block_size and config.num_blocks
    return Limits(
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        prefix_caching=config.prefix_caching,
        vocab_size=model.config.vocab_size,
        seed=config.seed,
        defaults=model.defaults,
    )
