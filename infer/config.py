"""Configuration values: what a model is and what an engine may use. No torch, nothing allocated.

``ModelConfig`` describes a checkpoint; ``EngineConfig`` holds every engine option under the one
name it has on the command line (dashes), in TOML files and in Python (underscores).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from infer.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base frequency and how it is stretched."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder-only transformer: RMSNorm, GQA with RoPE, SwiGLU."""

    architecture: Literal["qwen3", "qwen2", "llama", "mistral"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k before RoPE (Qwen3)
    sliding_window: int | None = None  # positions a query sees, itself included; None: all
    dtype: str = "bfloat16"  # the checkpoint's own
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        """Columns of q over all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of k (or v) over all heads."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, dtype: str) -> int:
        """KV bytes of one position over all layers."""
        return self.num_layers * 2 * self.kv_size * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling defaults a checkpoint states in ``generation_config.json``."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()


AttentionBackendName = Literal["auto", "native", "torch", "triton", "flash_attn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits and choices of one engine. ``None`` is "derive it" and is filled by ``infer.init``.

    Raises:
        ConfigError: a value is out of range or two of them contradict each other.
    """

    max_model_len: int | None = (
        None  # tokens a sequence may reach; None: model's, capped to the pool
    )
    max_num_seqs: int | None = None  # rows; None: 16 on CPU, 256 on CUDA
    max_num_batched_tokens: int | None = None  # positions a step; None: 128 on CPU, 8192 on CUDA
    block_size: int | None = None  # positions a KV block; None: 16 CPU, 64 triton, 256 flash_attn
    num_blocks: int | None = None  # None: from gpu_memory_utilization (CUDA) or 1 GiB (CPU)
    gpu_memory_utilization: float = 0.9
    prefix_caching: bool = True
    attention_backend: AttentionBackendName = "auto"
    compile: bool | None = None  # None: on for CUDA, off for CPU
    cuda_graphs: bool = True
    pipeline_depth: int | None = None  # steps launched ahead of collect; None: 0 on CPU, 1 on CUDA
    seed: int = 0  # seeds requests that bring none

    def __post_init__(self) -> None:
        for name, low in (
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("block_size", 1),
            ("num_blocks", 1),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < low):
                raise ConfigError(
                    f"{name} is {value!r}, it must be a whole number of at least {low}"
                )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, "
                "it must be above 0 and at most 1"
            )
        if self.pipeline_depth not in (None, 0, 1):
            raise ConfigError(f"pipeline_depth is {self.pipeline_depth}, it must be 0 or 1")
        if self.attention_backend not in get_args(AttentionBackendName):
            raise ConfigError(
                f"attention_backend is {self.attention_backend!r}; "
                f"choose {', '.join(get_args(AttentionBackendName))}"
            )
        budget, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and seqs is not None and budget < seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {budget}, it must be at least max_num_seqs ({seqs}): "
                "every running sequence decodes one position a step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The engine's numbers once everything is derived: what ``schedule`` obeys."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    prefix_caching: bool
    vocab_size: int
    seed: int = 0
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    priority_span: int = 512  # arrivals by which one level of priority moves a request forward

    @property
    def max_blocks_per_seq(self) -> int:
        """Columns of a block table."""
        return -(-self.max_model_len // self.block_size)


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """Build an ``EngineConfig`` from untrusted keys (TOML, command line).

    Raises:
        ConfigError: an unknown key (named, with the known ones) or a bad value.
    """
    known = {f.name for f in fields(EngineConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(
            f"unknown engine option {unknown[0]!r}; the options are {', '.join(sorted(known))}"
        )
    return EngineConfig(**options)
