"""GGUF files of our own making against the transformers models they were made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from infer.errors import CheckpointError
from infer.loading import load
from tests.checkpoint.gguf_make import write
from tests.checkpoint.test_loading import assert_fused
from tests.checkpoint.tiny import tiny_model

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "progress": False}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "purestep"


def matrices_as(kind: Type) -> Any:
    """Quantize what llama.cpp would: matrices, and not norms or biases."""
    return lambda name: kind if "norm" not in name and "bias" not in name else None


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0])
@pytest.mark.parametrize("case", ["llama", "llama-biased", "qwen2", "qwen3"])
def test_a_file_holds_the_models_tensors(case: str, kind: Type, tmp_path: Path) -> None:
    hf = tiny_model(case, intermediate_size=64)
    path = tmp_path / "tiny.gguf"
    kept = write(path, hf, quantize=matrices_as(kind))
    model = load(path, **CPU)
    if hf.config.tie_word_embeddings:
        kept["lm_head.weight"] = kept["model.embed_tokens.weight"]
    assert_fused(model.weights, kept)
    config = hf.config
    assert model.config.architecture == config.model_type
    assert model.config.rms_norm_eps == config.rms_norm_eps
    assert model.config.rope.theta == config.rope_parameters["rope_theta"]
    assert model.config.head_dim == hf.model.layers[0].self_attn.head_dim
    assert model.config.tie_word_embeddings == config.tie_word_embeddings
    assert (model.config.bos_token_id, model.config.eos_token_ids) == (1, (2,))
    assert model.tokenizer is None


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        (Type.F32, torch.float32),
        (Type.F16, torch.float16),
        (Type.BF16, torch.bfloat16),
        (Type.Q4_1, torch.float32),
    ],
)
def test_nothing_is_lost_in_the_cache(
    kind: Type, stored: torch.dtype, tmp_path: Path, cache: Path
) -> None:
    kept = write(tmp_path / "tiny.gguf", tiny_model("qwen3", intermediate_size=64),
                 quantize=matrices_as(kind))  # fmt: skip
    load(tmp_path / "tiny.gguf", **CPU)
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype == stored
    assert tensors["model.norm.weight"].dtype == torch.float32
    assert set(tensors) == set(kept)
    for name, values in kept.items():
        assert torch.equal(tensors[name].float(), values), name


def test_the_folder_is_a_checkpoint_for_transformers_too(tmp_path: Path, cache: Path) -> None:
    from transformers import AutoModelForCausalLM

    hf = tiny_model("llama")
    write(tmp_path / "tiny.gguf", hf)
    path = load(tmp_path / "tiny.gguf", **CPU).path
    again = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, hf(ids).logits)


def test_a_second_load_converts_nothing(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, tiny_model("llama"))
    first = load(path, **CPU).path
    assert first is not None
    before = (Path(first) / "model.safetensors").stat()
    elsewhere = tmp_path / "elsewhere" / path.name
    elsewhere.parent.mkdir()
    shutil.copy(path, elsewhere)
    assert load(elsewhere, **CPU).path == first
    assert (Path(first) / "model.safetensors").stat() == before
    write(path, tiny_model("qwen3"))
    assert load(path, **CPU).path != first


def test_large_tensors_are_converted_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.gguf_file.CHUNK_ELEMENTS", 100)
    hf = tiny_model("llama", intermediate_size=64)
    kept = write(tmp_path / "tiny.gguf", hf, quantize=matrices_as(Type.Q8_0))
    assert_fused(load(tmp_path / "tiny.gguf", **CPU).weights, kept)


# --- RoPE -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies_are_recognised(factor: float, tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": factor, "rope_theta": 500000.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    hf = tiny_model("llama", rope_parameters=rope, head_dim=64)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](hf.config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    write(
        tmp_path / "tiny.gguf",
        hf,
        tensors={"rope_freqs.weight": (plain / scaled).float().numpy()},
    )
    found = load(tmp_path / "tiny.gguf", **CPU).config.rope
    assert (found.kind, found.factor) == ("llama3", factor)
    assert (found.low_freq_factor, found.high_freq_factor) == (1.0, 4.0)
    assert found.original_max_position_embeddings == 8192


def test_other_frequency_tables_are_refused(tmp_path: Path) -> None:
    table = np.linspace(1, 3, 4, dtype=np.float32)
    write(tmp_path / "tiny.gguf", tiny_model("llama"), tensors={"rope_freqs.weight": table})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        load(tmp_path / "tiny.gguf", **CPU)


def test_yarn_and_linear_scaling(tmp_path: Path) -> None:
    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    write(tmp_path / "yarn.gguf", tiny_model("qwen3"), extra=yarn)
    rope = load(tmp_path / "yarn.gguf", **CPU).config.rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 64)
    write(tmp_path / "linear.gguf", tiny_model("qwen3"), extra=linear)
    rope = load(tmp_path / "linear.gguf", **CPU).config.rope
    assert (rope.kind, rope.factor) == ("linear", 2.0)


# --- what is refused ------------------------------------------------------------------------------


def split(writer: gguf.GGUFWriter) -> None:
    writer.add_uint16("split.count", 2)


def experts(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_count(8)


def longrope(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)


@pytest.mark.parametrize(
    ("extra", "message"),
    [(split, "2 parts"), (experts, "8 experts"), (longrope, "longrope")],
)
def test_unsupported_kinds_are_named(extra: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", tiny_model("llama"), extra=extra)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "tiny.gguf", **CPU)


def test_another_architecture_is_named(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "tiny.gguf", tiny_model("llama"), architecture="gemma3")
    with pytest.raises(CheckpointError, match="'gemma3'"):
        load(tmp_path / "tiny.gguf", **CPU)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_an_unknown_tensor_is_named_before_anything_is_written(tmp_path: Path, cache: Path) -> None:
    write(
        tmp_path / "tiny.gguf",
        tiny_model("llama"),
        tensors={"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)},
    )
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_sinks\.weight"):
        load(tmp_path / "tiny.gguf", **CPU)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, tiny_model("llama"))
    data = path.read_bytes()
    for keep in [0, 3, 4, 10, 30, *range(50, len(data), len(data) // 40), len(data) - 1]:
        path.write_bytes(data[:keep])
        with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
            load(path, **CPU)
    assert not cache.exists() or not [folder for folder in cache.iterdir() if folder.is_dir()]


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_text(json.dumps({"not": "gguf"}) * 100)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        load(path, **CPU)
    with pytest.raises(CheckpointError, match=r"none\.gguf"):
        load(tmp_path / "none.gguf", **CPU)
