"""``init``: from a model and options to an engine state, every open choice decided."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from infer import host as hosts
from infer import kv as kv_cache
from infer import rows as row_state
from infer.compile import compiled
from infer.config import EngineConfig, Limits, ModelConfig
from infer.errors import ConfigError
from infer.kv import KVCache
from infer.model import Model
from infer.models.decoder import layer_shape
from infer.ops import Ops
from infer.ops.backends import choose, make_ops
from infer.parallel import lowest, opening
from infer.rows import RowState
from infer.runtime import Runtime
from infer.state import EngineState
from infer.weights import local_config

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 1 << 30
CPU_DEFAULTS = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "pipeline_depth": 0}
CUDA_DEFAULTS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "pipeline_depth": 1}
BLOCK_SIZES = {"native": 16, "torch": 16, "triton": 64, "flash_attn": 256}


def init(model: Model, config: EngineConfig | None = None) -> EngineState:
    """Allocate an engine for ``model``; on CUDA also compile and capture all it will run.

    Raises:
        ConfigError: options that contradict each other, the model or the memory there is.
        EngineError: another rank failed; the message names it and the cause.
    """
    config = config or EngineConfig()
    with opening(model.tp, config) as outside:
        state = _init(model, config)
        if outside is not None:
            outside.lease.holds(state.runtime)
        return replace(state, outside=outside)


def _init(model: Model, config: EngineConfig) -> EngineState:
    ops = _ops(model, config)
    config = _with_defaults(model, config, ops)
    if model.device.type == "cuda":
        _warm_up(model, config, ops)
    config = _sized(model, config, ops)
    limits = _limits(model, config)
    with torch.inference_mode():
        kv = allocate_kv(model, limits)
        vocab = local_config(model.config, model.tp).vocab_size
        rows = row_state.make(limits, vocab, model.device)
    return EngineState(
        host=hosts.make(limits),
        kv=kv,
        rows=rows,
        runtime=_runtime(model, ops, kv, rows, limits, config),
        limits=limits,
        config=config,
    )


def _ops(model: Model, config: EngineConfig) -> Ops:
    name, reason = choose(
        config.attention_backend,
        model.device,
        model.dtype,
        num_ranks=model.tp.size,
        compiling=bool(config.compile),
    )
    if reason is not None:
        logger.info("plain torch computes instead of kernels of our own: %s", reason)
    return make_ops(name, model.config, model.device)


def allocate_kv(model: Model, limits: Limits) -> KVCache:
    """Pages for this rank's KV heads."""
    local = local_config(model.config, model.tp)
    return kv_cache.allocate(
        local.num_layers,
        limits.num_blocks,
        limits.block_size,
        local.num_kv_heads,
        local.head_dim,
        dtype=model.dtype,
        device=model.device,
    )


def _runtime(
    model: Model, ops: Ops, kv: KVCache, rows: RowState, limits: Limits, config: EngineConfig
) -> Runtime:
    if config.compile:
        ops, reason = compiled(ops, model.device)
        if reason is not None:
            logger.info("layers run uncompiled: %s", reason)
    if model.device.type != "cuda":
        executable = model
        if ops.layer is None and ops.lay_out is not None and model.tp.size == 1:
            shape = layer_shape(model.config, model.tp)
            executable = replace(model, weights=ops.lay_out(model.weights, shape))
        return Runtime(model, ops, executable=executable)
    from infer import cuda_runtime

    use_graphs = config.cuda_graphs and ops.capturable
    return cuda_runtime.make(model, ops, kv, rows, limits, use_graphs=use_graphs)


def _with_defaults(model: Model, config: EngineConfig, ops: Ops) -> EngineConfig:
    """``config`` with every None filled in that the device and the backend decide."""
    cuda = model.device.type == "cuda"
    defaults = CUDA_DEFAULTS if cuda else CPU_DEFAULTS
    changes: dict[str, Any] = {k: v for k, v in defaults.items() if getattr(config, k) is None}
    seqs = config.max_num_seqs or changes["max_num_seqs"]
    if "max_num_batched_tokens" in changes:
        changes["max_num_batched_tokens"] = max(changes["max_num_batched_tokens"], seqs)
    elif "max_num_seqs" in changes:
        changes["max_num_seqs"] = min(seqs, config.max_num_batched_tokens or seqs)
    changes["block_size"] = config.block_size or BLOCK_SIZES.get(ops.name, 16)
    changes["compile"] = config.compile if config.compile is not None else cuda
    return replace(config, **changes)


def _sized(model: Model, config: EngineConfig, ops: Ops) -> EngineConfig:
    """``config`` with a pool that fits the memory there is, and lengths that fit the pool."""
    assert config.block_size is not None
    num_blocks = config.num_blocks or _num_blocks(model, config, ops)
    model_len = _max_model_len(model.config, config, num_blocks * config.block_size)
    return replace(config, num_blocks=num_blocks, max_model_len=model_len)


def _warm_up(model: Model, config: EngineConfig, ops: Ops) -> None:
    from infer import cuda_runtime

    limits = _profile_limits(model, config)
    use_graphs = config.cuda_graphs and ops.capturable
    cuda_runtime.warm_up(model, ops, allocate_kv(model, limits), limits, use_graphs=use_graphs)


def kv_bytes_per_token(model: Model) -> int:
    """KV bytes a position takes on this rank."""
    local = local_config(model.config, model.tp)
    return kv_cache.bytes_per_token(
        local.num_layers, local.num_kv_heads, local.head_dim, model.dtype
    )


def _num_blocks(model: Model, config: EngineConfig, ops: Ops) -> int:
    assert config.block_size is not None
    per_block = config.block_size * kv_bytes_per_token(model)
    if model.device.type == "cpu":
        return lowest(max(1, CPU_KV_BYTES // per_block), model.tp, model.device)
    from infer import memory

    limits = _profile_limits(model, config)
    working = memory.working_bytes(model, ops, allocate_kv(model, limits), limits, config)
    budget = memory.free_budget(model.device, config.gpu_memory_utilization) - working
    # Ranks share one plan: what the poorest has is what all use, and all complain alike.
    num_blocks = lowest(budget // per_block - 1, model.tp, model.device)
    if num_blocks < 1:
        raise ConfigError(
            f"gpu_memory_utilization {config.gpu_memory_utilization} leaves {budget >> 20} MiB for "
            f"KV beside weights, other processes and {working >> 20} MiB of working memory; one "
            f"block takes {per_block >> 10} KiB. Raise it, free memory on the GPU, or lower "
            "max_num_batched_tokens or max_num_seqs"
        )
    return num_blocks


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


def _profile_limits(model: Model, config: EngineConfig) -> Limits:
    """Limits before the pool is sized. Any will do: the steps are padding and touch one block."""
    length = config.max_model_len or model.config.max_position_embeddings
    return _limits(model, replace(config, num_blocks=1, max_model_len=length))


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
