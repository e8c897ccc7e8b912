"""GGUF files read as Hugging Face checkpoints: configuration, tensor names, values.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Values are
dequantized by the ``gguf`` package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from infer.errors import CheckpointError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
STORED = {"F32": "F32", "F16": "F16", "BF16": "BF16"}  # kept as they are; all else becomes F32
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
CHUNK_ELEMENTS = 1 << 20  # dequantized at once

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor under its checkpoint name."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name of how its values are stored: F32, F16 or BF16
    heads: int  # > 0: its rows are interleaved within each of so many heads, as llama.cpp wants
    raw: Any  # gguf.ReaderTensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the converted values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def chunks(self) -> Iterator[Array]:
        """The values in row order, a bounded part at a time."""
        rows, columns = self.shape[0], math.prod(self.shape[1:])
        unit = rows // self.heads if self.heads else 1  # a head's rows stay together
        step = max(1, CHUNK_ELEMENTS // (unit * columns)) * unit
        for start in range(0, rows, step):
            values = self._values(self.raw.data[start : start + step])
            heads = values.shape[0] // unit if self.heads else 0
            yield np.ascontiguousarray(_rows_to_halves(values, heads))

    def _values(self, data: Array) -> Array:
        if self.dtype == "BF16":
            return data.view(np.uint16).reshape(-1, *self.shape[1:])
        if self.raw.tensor_type.name in STORED:
            return data
        try:
            # In one long row: the package would else go through it a few rows at a time.
            values: Array = gguf.quants.dequantize(data.reshape(1, -1), self.raw.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"tensor {self.raw.name} is quantized as {self.raw.tensor_type.name}, which cannot "
                "be dequantized here; use a file of another quantization"
            ) from error
        return values.astype(np.float32, copy=False).reshape(-1, *self.shape[1:])


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """A reader over a plain array: a memmap's views cost ten times as much to make."""

    @property
    def data(self) -> Array:
        """The file's bytes, mapped."""
        return self._data

    @data.setter
    def data(self, mapped: Array) -> None:
        self._data = np.asarray(mapped)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF file of a supported architecture."""

    path: Path
    metadata: Mapping[str, Any]
    config: Mapping[str, Any]  # a Hugging Face config
    tensors: tuple[GGUFTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all converted tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def open_gguf(path: Path) -> GGUFFile:
    """Read a file's metadata; values stay in the file until ``chunks`` is called.

    Raises:
        CheckpointError: the file is damaged, truncated, one part of several, or of an architecture,
            RoPE type or tensor this package does not know.
    """
    try:
        reader = _Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}") from error
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is not a GGUF file, or damaged or truncated ({error}); download it again"
        ) from error
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise CheckpointError(f"{path} is a big-endian GGUF file; only little-endian is read")
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path} holds a model of architecture {architecture!r}; "
            f"GGUF files of {', '.join(ARCHITECTURES)} are supported"
        )
    if metadata.get("split.count", 0) > 1:
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts; merge them with gguf-split first"
        )
    shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    config = _hf_config(metadata, shapes, _rope_factors(reader))
    tensors = tuple(
        _tensor(raw, shapes[raw.name], config) for raw in reader.tensors if raw.name != ROPE_FACTORS
    )
    return GGUFFile(path=path, metadata=metadata, config=config, tensors=tensors)


def _tensor(raw: Any, shape: tuple[int, ...], config: Mapping[str, Any]) -> GGUFTensor:
    stored = STORED.get(raw.tensor_type.name, "F32")
    if raw.tensor_type.name in ("I8", "I16", "I32", "I64"):
        raise CheckpointError(f"tensor {raw.name} holds integers; only weights are supported")
    heads = 0
    if config["model_type"] == "llama":
        kind = raw.name.split(".")[-2]
        heads = {
            "attn_q": config["num_attention_heads"],
            "attn_k": config["num_key_value_heads"],
        }.get(kind, 0)
    return GGUFTensor(_hf_name(raw.name), shape, stored, heads, raw)


def _hf_name(name: str) -> str:
    """The checkpoint name of a GGUF tensor; an unknown one keeps its own, for the strict check."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{kind}"
    return name


def _rows_to_halves(values: Array, heads: int) -> Array:
    """Undo llama.cpp's row order of q and k.

    Its rotary embedding turns neighbouring rows (2i, 2i + 1) of a head together; here it is rows i
    and i + head_dim / 2.
    """
    if not heads:
        return values
    halves = values.shape[0] // heads // 2
    paired = values.reshape(heads, halves, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


# --- configuration --------------------------------------------------------------------------------


def _hf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Array | None
) -> dict[str, Any]:
    architecture = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if isinstance(value, list):  # some numbers may be given layer by layer
            if len(set(value)) > 1:
                raise CheckpointError(f"{architecture}.{key} differs between layers: {value}")
            value = value[0] if value else default
        return value

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise CheckpointError(f"the GGUF file has no {architecture}.{key}")
        return value

    if get("expert_count", 0):
        raise CheckpointError(f"the model has {get('expert_count')} experts; only dense ones run")
    if "token_embd.weight" not in shapes:
        raise CheckpointError("the GGUF file has no tensor token_embd.weight")
    hidden_size, num_heads = need("embedding_length"), need("attention.head_count")
    head_dim = get("attention.key_length", hidden_size // num_heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(
            f"RoPE turns {get('rope.dimension_count')} of {head_dim} dimensions; only whole heads "
            "are supported"
        )
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes and architecture != "qwen2",
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "rope_parameters": _rope(get, head_dim, factors),
        "dtype": "float32",
        **_special_tokens(metadata),
    }
    if architecture == "llama" and get("attention.sliding_window"):
        # llama.cpp stores Mistral under the name llama; only Mistral has a window.
        config |= {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": get("attention.sliding_window"),
        }
    return config


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """BOS and EOS ids; the end of a turn ends an answer too."""
    token = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot")}
    eos = [i for i in dict.fromkeys((token["eos"], token["eot"])) if i is not None]
    return {
        "bos_token_id": token["bos"],
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }


def _shortest(value: float) -> float:
    """The shortest decimal with the same float32 value: 1e-05, not 9.999999747378752e-06."""
    return float(np.format_float_scientific(np.float32(value), unique=True))


def _rope(get: Any, head_dim: int, factors: Array | None) -> dict[str, Any]:
    theta = _shortest(get("rope.freq_base", 10_000.0))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = get("rope.scaling.type", "none")
    if factors is not None:
        return rope | _llama3(theta, head_dim, factors)
    if kind in ("none", "linear"):
        factor = _shortest(get("rope.scaling.factor", get("rope.scale_linear", 1.0)))
        return rope if factor == 1 else rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        if get("rope.scaling.attn_factor", 1) != 1 or get("rope.scaling.yarn_log_multiplier"):
            raise CheckpointError("the YaRN attention factor of this GGUF file is not supported")
        rope |= {"rope_type": "yarn", "factor": get("rope.scaling.factor")}
        rope["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if get(f"rope.scaling.yarn_{key}") is not None:
                rope[key] = get(f"rope.scaling.yarn_{key}")
        return rope
    raise CheckpointError(f"unknown RoPE scaling {kind!r}; none, linear and yarn are supported")


def _rope_factors(reader: Any) -> Array | None:
    found = [t for t in reader.tensors if t.name == ROPE_FACTORS]
    return np.array(found[0].data, dtype=np.float64) if found else None


def _llama3(theta: float, head_dim: int, factors: Array) -> dict[str, Any]:
    """The Llama 3 description that a table of frequency divisors came from.

    A GGUF file keeps only the table. Every Llama 3 release uses the same bounds and length and
    differs in the factor, which is the largest divisor.
    """
    rope: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0, 1)
    expected = 1 / ((1 - smooth) / rope["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise CheckpointError(
            f"{ROPE_FACTORS} does not hold the frequency factors of a Llama 3 model; "
            "other tables are not supported"
        )
    return rope
