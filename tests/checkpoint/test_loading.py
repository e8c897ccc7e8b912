"""Folders, state dicts and random weights to a model, against transformers' tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor

from infer import loading
from infer.errors import CheckpointError, ConfigError
from infer.loading import load, pick_device, pick_dtype
from infer.parallel import TP
from infer.weights import Weights, abstract, weight_bytes
from tests.checkpoint.tiny import CASES, save, tiny_model

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "progress": False}


def assert_fused(weights: Weights, state: Mapping[str, Tensor]) -> None:
    """Every tensor of the tree is the one transformers has, or rows of several in order."""

    def equal(ours: Tensor | None, *names: str) -> None:
        found = [state[name] for name in names if name in state]
        assert len(found) in (0, len(names))
        if not found:
            assert ours is None, names
        else:
            assert ours is not None, names
            assert torch.equal(ours, torch.cat(found).to(ours.dtype)), names

    equal(weights.embed, "model.embed_tokens.weight")
    equal(weights.norm, "model.norm.weight")
    equal(weights.lm_head, "lm_head.weight")
    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}"
        q, k, v, o = (f"{at}.self_attn.{name}_proj" for name in "qkvo")
        gate, up, down = (f"{at}.mlp.{name}_proj" for name in ("gate", "up", "down"))
        equal(layer.input_norm, f"{at}.input_layernorm.weight")
        equal(layer.post_norm, f"{at}.post_attention_layernorm.weight")
        equal(layer.qkv, f"{q}.weight", f"{k}.weight", f"{v}.weight")
        equal(layer.qkv_bias, f"{q}.bias", f"{k}.bias", f"{v}.bias")
        equal(layer.q_norm, f"{at}.self_attn.q_norm.weight")
        equal(layer.k_norm, f"{at}.self_attn.k_norm.weight")
        equal(layer.o, f"{o}.weight")
        equal(layer.o_bias, f"{o}.bias")
        equal(layer.gate_up, f"{gate}.weight", f"{up}.weight")
        equal(layer.gate_up_bias, f"{gate}.bias", f"{up}.bias")
        equal(layer.down, f"{down}.weight")
        equal(layer.down_bias, f"{down}.bias")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(tiny_model("llama"), tmp_path / "llama")


def rewrite(folder: Path, **changes: Any) -> None:
    """Change keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit(folder: Path, add: Mapping[str, Tensor] | None = None, drop: str | None = None) -> None:
    """Add tensors to a folder's single weights file, or drop one."""
    tensors = load_file(folder / "model.safetensors") | dict(add or {})
    save_file({k: v for k, v in tensors.items() if k != drop}, folder / "model.safetensors")


# --- what loads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("case", CASES)
def test_a_saved_folder_round_trips(case: str, shard_size: str, tmp_path: Path) -> None:
    hf = tiny_model(case)
    folder = save(hf, tmp_path, shard_size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard_size == "20KB")
    model = load(folder, **CPU)
    assert_fused(model.weights, hf.state_dict())
    assert len(model.weights.layers) == 2
    tied = model.weights.lm_head.data_ptr() == model.weights.embed.data_ptr()
    assert tied == hf.config.tie_word_embeddings
    assert model.path == str(folder)
    assert model.tokenizer is None
    assert model.config.eos_token_ids == model.defaults.eos_token_ids == (2,)


@pytest.mark.parametrize("case", CASES)
def test_a_state_dict_loads(case: str) -> None:
    hf = tiny_model(case)
    config = hf.config.to_diff_dict() | {"architectures": [type(hf).__name__]}
    model = load(state_dict=hf.state_dict(), config=config, **CPU)
    assert_fused(model.weights, hf.state_dict())
    assert model.path is None
    again = load("mine", state_dict=hf.state_dict(), config=model.config, **CPU)
    assert again.name == "mine"
    assert torch.equal(again.weights.embed, model.weights.embed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_are_converted(llama: Path, dtype: str) -> None:
    model = load(llama, device="cpu", dtype=dtype, progress=False)
    assert model.weights.embed.dtype == model.dtype == getattr(torch, dtype)
    assert_fused(model.weights, load_file(llama / "model.safetensors"))


def test_a_half_precision_checkpoint_loads_in_float32(tmp_path: Path) -> None:
    hf = tiny_model("llama").to(torch.bfloat16)
    model = load(save(hf, tmp_path), **CPU)
    assert model.config.dtype == "bfloat16"
    assert_fused(model.weights, {k: v.float() for k, v in hf.state_dict().items()})


def test_weights_made_for_inference_only(llama: Path) -> None:
    assert load(llama, **CPU).weights.layers[0].qkv.is_inference()


def test_redundant_tensors_are_ignored(tmp_path: Path) -> None:
    folder = save(tiny_model("qwen2"), tmp_path)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit(folder, {"lm_head.weight": torch.zeros(97, 32), **buffer})
    model = load(folder, **CPU)
    assert torch.equal(model.weights.lm_head, model.weights.embed)
    assert model.weights.embed.abs().sum() > 0


def test_several_eos_ids_come_from_the_generation_config(llama: Path) -> None:
    hf = {"eos_token_id": [5, 6], "temperature": 0.5, "top_k": 7}
    (llama / "generation_config.json").write_text(json.dumps(hf))
    model = load(llama, **CPU)
    assert model.config.eos_token_ids == model.defaults.eos_token_ids == (5, 6)
    assert (model.defaults.temperature, model.defaults.top_k) == (0.5, 7)


def test_progress_counts_every_byte(llama: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    model = load(llama, device="cpu", dtype="float32", progress=lambda *call: seen.append(call))
    total = weight_bytes(model.config, torch.float32)
    assert {(what, of) for what, _, of in seen} == {(f"Loading {llama}", total)}
    done = [count for _, count, _ in seen]
    assert done == sorted(done)
    assert done[-1] == total == sum(p.numel() * 4 for p in tiny_model("llama").parameters())


# --- what is refused ------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(llama: Path) -> None:
    edit(llama, drop="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(llama, **CPU)


def test_an_extra_tensor_is_named(llama: Path) -> None:
    edit(llama, {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.q_norm\.weight"):
        load(llama, **CPU)


def test_a_layer_too_many_is_an_extra_tensor(llama: Path) -> None:
    rewrite(llama, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.\S+ \(and 8 more\)"):
        load(llama, **CPU)


def test_a_misshapen_tensor_is_named_with_both_shapes(llama: Path) -> None:
    edit(llama, {"model.layers.0.self_attn.k_proj.weight": torch.ones(16, 31)})
    with pytest.raises(CheckpointError, match=r"k_proj\.weight has shape \[16, 31\].*\[16, 32\]"):
        load(llama, **CPU)


def test_a_tied_head_must_not_be_missing_when_untied(tmp_path: Path) -> None:
    folder = save(tiny_model("qwen2"), tmp_path)
    rewrite(folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(folder, **CPU)


def test_quantized_tensors_are_refused(llama: Path) -> None:
    edit(llama, {"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* I8"):
        load(llama, **CPU)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path, "20KB")
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        load(folder, **CPU)


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path, "20KB")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(folder, **CPU)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot read"),
        ("[]", "must be a JSON object"),
        ("{}", "weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', r"\.\./model\.safetensors"),
        ('{"weight_map": {"a": 3}}', "not a file name"),
        ('{"weight_map": {"a": "model.safetensors"}}', "does not hold the tensor a"),
    ],
)
def test_a_damaged_index_is_refused(llama: Path, index: str, message: str) -> None:
    (llama / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        load(llama, **CPU)


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.999])
def test_a_truncated_file_is_refused(llama: Path, keep: float) -> None:
    path = llama / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        load(llama, **CPU)


def test_pickled_weights_are_never_loaded(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*never loaded"):
        load(llama, **CPU)


def test_a_folder_without_weights_or_config(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(llama, **CPU)
    (llama / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(llama, **CPU)


def test_a_damaged_config_is_refused(llama: Path) -> None:
    (llama / "config.json").write_text("{broken")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(llama, **CPU)


def test_a_damaged_tokenizer_is_refused(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{broken")
    with pytest.raises(CheckpointError, match="tokenizer"):
        load(llama, **CPU)


def test_state_dict_and_config_go_together() -> None:
    hf = tiny_model("llama")
    with pytest.raises(ConfigError, match="config"):
        load(state_dict=hf.state_dict(), **CPU)
    with pytest.raises(ConfigError, match="state_dict"):
        load(config=hf.config.to_dict(), **CPU)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.touch()
    with pytest.raises(CheckpointError, match="neither a folder nor"):
        load(path, **CPU)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "gpu"),
        ({"device": "mps"}, "mps"),
        ({"dtype": "int8"}, "int8"),
        ({"load_format": "pickle"}, "pickle"),
        ({"tp": 0}, "tp is 0"),
        ({"tp": TP(rank=2, size=2)}, "rank is 2"),
        ({"tp": TP(size=5)}, "attention heads"),
        ({"threads": 0}, "threads is 0"),
        ({"load_format": "gguf"}, "is a folder"),
    ],
)
def test_wrong_options_are_refused(llama: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(llama, **CPU | options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA GPU"):
        pick_device("cuda")
    assert pick_device("auto") == torch.device("cpu")


def test_auto_dtype_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text
    for flags, expected in (
        ("flags\t\t: fpu avx512f avx512_bf16", torch.bfloat16),
        ("flags\t\t: fpu amx_bf16", torch.bfloat16),
        ("flags\t\t: fpu avx2 avx512f", torch.float32),
        ("Features\t: fp asimd bf16", torch.bfloat16),
        ("model name\t: with bf16 in its name", torch.float32),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", lambda *_, flags=flags, **__: flags)
            assert pick_dtype("auto", torch.device("cpu")) == expected
    assert Path.read_text is read_text


# --- hub ------------------------------------------------------------------------------------------


def test_a_hub_name_is_downloaded(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str | None]] = []

    def snapshot(
        repo: str, *, revision: str | None, local_files_only: bool = False, **_: Any
    ) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        calls.append((repo, revision))
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load("owner/name@v1.0", **CPU).path == str(llama)
    assert calls == [("owner/name", "v1.0")]


def test_an_incomplete_download_is_continued(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    (broken / "model.safetensors").unlink()
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *_, local_files_only=False, **__: str(broken if local_files_only else llama),
    )
    assert load("owner/name", **CPU).path == str(llama)


def test_a_complete_download_is_used_without_the_network(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(*_: Any, local_files_only: bool = False, **__: Any) -> str:
        assert local_files_only
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load("owner/name", **CPU).path == str(llama)


def test_offline_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("outgoing traffic has been disabled.\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(CheckpointError, match=r"traffic has been disabled\. Without a network"):
        load("owner/name", **CPU)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(CheckpointError, match=r"smollm2-135m.*qwen3-0\.6b"):
        load("no-such-model", **CPU)


# --- random weights -------------------------------------------------------------------------------


def test_random_weights_of_a_folder(llama: Path) -> None:
    model = load(llama, load_format="random", **CPU)
    assert model.weights.embed.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.weights.embed.mean().item() == pytest.approx(0, abs=2e-3)
    assert torch.equal(model.weights.norm, torch.ones(32))
    again, other = (load(llama, load_format="random", seed=s, **CPU) for s in (0, 1))
    assert torch.equal(model.weights.layers[1].qkv, again.weights.layers[1].qkv)
    assert not torch.equal(model.weights.embed, other.weights.embed)
    assert not torch.equal(model.weights.layers[0].qkv, model.weights.layers[1].qkv)


def test_random_weights_need_no_files() -> None:
    hf = tiny_model("qwen3")
    config = hf.config.to_diff_dict() | {"architectures": [type(hf).__name__]}
    model = load(config=config, load_format="random", **CPU)
    assert model.path is None
    assert model.weights.layers[0].q_norm is not None
    preset = loading.find_preset("qwen3-0.6b")
    assert preset is not None
    assert preset.config is not None
    cfg = loading.model_config(preset.config)
    assert weight_bytes(cfg, torch.bfloat16) == pytest.approx(1.192e9, rel=1e-3)


def test_random_weights_without_a_config() -> None:
    with pytest.raises(CheckpointError, match="no configuration for random weights"):
        load("owner/name", load_format="random", **CPU)


def test_the_description_names_every_tensor_once() -> None:
    for case in CASES:
        hf = tiny_model(case)
        config = hf.config.to_diff_dict() | {"architectures": [type(hf).__name__]}
        params = abstract(loading.model_config(config), dtype=torch.float32)
        names = [name for param in params.values() for name in param.hf_names]
        expected = {name for name, _ in hf.named_parameters()}
        assert len(names) == len(set(names))
        assert set(names) == expected
