"""From a checkpoint's ``config.json`` to a ``ModelConfig``. What cannot be honoured is refused.

Both spellings of RoPE are read: ``rope_theta`` with ``rope_scaling``, and the newer
``rope_parameters``. Defaults of absent keys are those of the architecture in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from infer.config import DTYPE_BYTES, GenerationDefaults, ModelConfig, RopeConfig
from infer.errors import CheckpointError

Architecture = Literal["qwen3", "qwen2", "llama", "mistral"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]
Number = TypeVar("Number", int, float)

ARCHITECTURES: Mapping[str, Architecture] = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
}
MAX_POSITIONS: Mapping[Architecture, int] = {  # where config.json says nothing
    "qwen3": 32768,
    "qwen2": 32768,
    "llama": 2048,
    "mistral": 131072,
}
ROPE_KINDS: Mapping[str, RopeKind] = {
    "default": "default",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
}
# Keys of a RoPE description, beyond those of RopeConfig, that change nothing.
ROPE_IGNORED = {"type", "rope_type", "rope_theta", "finetuned", "partial_rotary_factor"}
ROPE_KEYS: Mapping[RopeKind, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        }
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config mapping.

    ``rope.original_max_position_embeddings`` is filled from ``max_position_embeddings`` where a
    llama3 or yarn description leaves it out, as transformers does.

    Raises:
        CheckpointError: an unknown architecture, activation or RoPE type, quantized weights, layers
            that differ in attention, or a key that is missing or not a usable number.
    """
    architecture = _architecture(hf)
    quantization = hf.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise CheckpointError(
            f"the checkpoint is quantized (quantization_config, {method or 'no method named'}); "
            "load an unquantized checkpoint or a GGUF file"
        )
    activation = hf.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act is {activation!r}; only silu is supported")

    hidden_size = _number(hf, "hidden_size", int)
    num_heads = _number(hf, "num_attention_heads", int)
    num_layers = _number(hf, "num_hidden_layers", int)
    head_dim = _head_dim(hf, architecture, hidden_size, num_heads)
    grouped = architecture != "llama" and "num_key_value_heads" not in hf
    num_kv_heads = _number(hf, "num_key_value_heads", int, None if grouped else num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads is {num_heads}, it must be a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    max_positions = _number(hf, "max_position_embeddings", int, MAX_POSITIONS[architecture])
    biased = bool(hf.get("attention_bias", False)) and architecture in ("llama", "qwen3")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_number(hf, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=_number(hf, "intermediate_size", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(hf, "rms_norm_eps", float, 1e-6),
        rope=_rope(hf, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=biased or architecture == "qwen2",
        o_bias=biased,
        mlp_bias=bool(hf.get("mlp_bias", False)) and architecture == "llama",
        qk_norm=architecture == "qwen3",
        sliding_window=_sliding_window(hf, architecture, num_layers),
        dtype=_dtype(hf),
        bos_token_id=_first(token_ids(hf.get("bos_token_id"), "bos_token_id")),
        eos_token_ids=token_ids(hf.get("eos_token_id"), "eos_token_id"),
    )


def generation_defaults(hf: Mapping[str, Any], eos: tuple[int, ...] = ()) -> GenerationDefaults:
    """Read a ``generation_config.json`` mapping; ``eos`` stands in where it names no EOS.

    Values are taken as they are written, whether or not sampling is switched on, as vLLM does. An
    explicit ``do_sample: false`` makes greedy decoding (temperature 0) the default, which is what
    transformers would run.

    Raises:
        CheckpointError: a value is not a usable number.
    """
    greedy = hf.get("do_sample") is False
    return GenerationDefaults(
        temperature=0.0 if greedy else _number(hf, "temperature", float, 1.0, low=0),
        top_k=max(0, _number(hf, "top_k", int, 0, low=-1)),
        top_p=_number(hf, "top_p", float, 1.0),
        min_p=_number(hf, "min_p", float, 0.0, low=0),
        repetition_penalty=_number(hf, "repetition_penalty", float, 1.0),
        eos_token_ids=token_ids(hf.get("eos_token_id"), "eos_token_id") or eos,
    )


def token_ids(value: object, name: str) -> tuple[int, ...]:
    """Token ids that a config gives as null, a number or a list of numbers."""
    values = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    for item in values:
        if not isinstance(item, int) or isinstance(item, bool):
            raise CheckpointError(f"{name} is {value!r}, it must be a token id or a list of them")
    return tuple(item for item in values if item >= 0)  # -1 is an old spelling of "none"


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def _architecture(hf: Mapping[str, Any]) -> Architecture:
    names = hf.get("architectures") or ()
    if names:
        found = ARCHITECTURES.get(names[0])
    else:  # a bare configuration has only its model_type
        found = next((a for a in ARCHITECTURES.values() if a == hf.get("model_type")), None)
    if found is None:
        raise CheckpointError(
            f"unknown architecture {names[0] if names else hf.get('model_type')!r}; "
            f"this package runs {', '.join(ARCHITECTURES)}"
        )
    return found


def _number(
    hf: Mapping[str, Any],
    key: str,
    kind: type[Number],
    default: Number | None = None,
    *,
    low: float | None = None,
) -> Number:
    """``hf[key]`` as a number above 0, or of at least ``low``; null counts as absent."""
    value = hf.get(key)
    if value is None:
        if default is None:
            raise CheckpointError(f"the model configuration has no {key!r}")
        return default
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or (kind is int and value != int(value)):
        raise CheckpointError(f"{key} is {value!r}, it must be a {kind.__name__}")
    if (low is None and value <= 0) or (low is not None and value < low):
        limit = "above 0" if low is None else f"at least {low:g}"
        raise CheckpointError(f"{key} is {value!r}, it must be {limit}")
    return kind(value)


def _head_dim(
    hf: Mapping[str, Any], architecture: Architecture, hidden_size: int, num_heads: int
) -> int:
    if architecture == "qwen3":
        return _number(hf, "head_dim", int, 128)
    # transformers' Qwen2 has no such field, but reads the attribute if a config carries it.
    head_dim = _number(hf, "head_dim", int, max(1, hidden_size // num_heads))
    if hf.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"hidden_size is {hidden_size}, it must be a multiple of num_attention_heads "
            f"({num_heads}) when head_dim is not given"
        )
    return head_dim


def _dtype(hf: Mapping[str, Any]) -> str:
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"dtype is {name!r}; it must be one of {', '.join(DTYPE_BYTES)}")
    return name


def _sliding_window(
    hf: Mapping[str, Any], architecture: Architecture, num_layers: int
) -> int | None:
    """One window for all layers, or None. Layers that differ are refused."""
    window = hf.get("sliding_window")
    if architecture == "llama" or window is None:
        return None
    kinds = hf.get("layer_types")
    if architecture == "mistral":
        # transformers applies the window to every layer of a Mistral, whatever layer_types says;
        # a config in which the two disagree is ambiguous.
        sliding = [True] * num_layers
        if kinds is not None and any(kind != "sliding_attention" for kind in kinds):
            raise CheckpointError(
                f"sliding_window is {window} but layer_types names layers with full attention; "
                "layers of different attention are not supported"
            )
    elif not hf.get("use_sliding_window", False):
        return None
    elif kinds is not None:
        sliding = [kind == "sliding_attention" for kind in kinds]
    else:
        first = hf.get("max_window_layers", 28)
        sliding = [layer >= first for layer in range(num_layers)]
    if not any(sliding):
        return None
    if not all(sliding):
        raise CheckpointError(
            f"{sum(sliding)} of {num_layers} layers have a sliding window of {window}; layers of "
            "different attention are not supported"
        )
    return _number(hf, "sliding_window", int)


def _rope_description(hf: Mapping[str, Any]) -> tuple[Mapping[str, Any], RopeKind]:
    """The mapping that describes RoPE, in either spelling, and its kind; all its keys are known."""
    described = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(described, Mapping):
        raise CheckpointError(f"RoPE is described by {described!r}, it must be a mapping")
    nested = [key for key, value in described.items() if isinstance(value, Mapping)]
    if nested:
        raise CheckpointError(
            f"RoPE differs between layers ({', '.join(nested)}), which is not supported"
        )
    name = described.get("rope_type", described.get("type", "default"))
    kind = ROPE_KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise CheckpointError(
            f"unknown RoPE type {name!r}; this package runs {', '.join(ROPE_KINDS)}"
        )
    unknown = {k for k in set(described) - ROPE_IGNORED - ROPE_KEYS[kind] if described[k]}
    # A plain description may carry the fields of the kind it once was stretched by.
    if unknown and not (kind == "default" and unknown <= set().union(*ROPE_KEYS.values())):
        raise CheckpointError(f"RoPE type {kind} does not know the key {sorted(unknown)[0]!r}")
    partial = described.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"partial_rotary_factor is {partial!r}; only 1 is supported")
    return described, kind


def _rope(hf: Mapping[str, Any], max_positions: int) -> RopeConfig:
    described, kind = _rope_description(hf)
    theta = _number(described, "rope_theta", float, _number(hf, "rope_theta", float, 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=_number(described, "factor", float))
    original = _number(
        {**described, **_top_level_original(hf)},
        "original_max_position_embeddings",
        int,
        max_positions,
    )
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=_number(described, "factor", float),
            original_max_position_embeddings=original,
            low_freq_factor=_number(described, "low_freq_factor", float),
            high_freq_factor=_number(described, "high_freq_factor", float),
        )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=_number(described, "factor", float, max_positions / original),
        original_max_position_embeddings=original,
        beta_fast=_number(described, "beta_fast", float, 32.0),
        beta_slow=_number(described, "beta_slow", float, 1.0),
        attention_factor=_optional(described, "attention_factor"),
        mscale=_optional(described, "mscale"),
        mscale_all_dim=_optional(described, "mscale_all_dim"),
        truncate=bool(described.get("truncate", True)),
    )


def _top_level_original(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Where the field stands outside the RoPE description, it wins, as in transformers."""
    key = "original_max_position_embeddings"
    return {key: hf[key]} if hf.get(key) is not None else {}


def _optional(described: Mapping[str, Any], key: str) -> float | None:
    return None if described.get(key) is None else _number(described, key, float)
