"""Conversions that are interrupted, raced, or run out of disk."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file

from infer import convert
from infer.convert import cache_root, converted
from infer.errors import CheckpointError
from tests.checkpoint.convert_workers import convert_together, convert_until_killed
from tests.checkpoint.gguf_make import write
from tests.checkpoint.tiny import tiny_model

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    write(tmp_path / "tiny.gguf", tiny_model("llama"))
    return tmp_path / "tiny.gguf"


def folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()]


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "purestep"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "purestep"


def test_the_folder_is_complete(model_file: Path, root: Path) -> None:
    folder = converted(model_file, False, root)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert folders(root) == [folder]
    assert folder.stat().st_mode & 0o777 == 0o755


def test_progress_counts_every_byte(model_file: Path, root: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = converted(model_file, lambda _, done, total: seen.append((done, total)), root)
    tensors = load_file(folder / "model.safetensors").values()
    size = sum(tensor.nbytes for tensor in tensors)
    assert seen[-1] == (size, size)
    assert len(seen) == len(tensors)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("stop")])
def test_an_interrupted_conversion_leaves_nothing(
    error: BaseException, model_file: Path, root: Path
) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done > total / 2:
            raise error

    with pytest.raises(type(error)):
        converted(model_file, stop, root)
    assert folders(root) == []
    assert load_file(converted(model_file, False, root) / "model.safetensors")


def test_a_killed_conversion_is_cleaned_up_by_the_next(model_file: Path, root: Path) -> None:
    half_way = SPAWN.Event()
    process = SPAWN.Process(target=convert_until_killed, args=(model_file, root, half_way))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert half_way.is_set()
    (leftover,) = folders(root)
    assert convert.TEMPORARY in leftover.name
    assert [converted(model_file, False, root)] == folders(root)
    assert not leftover.exists()


def test_concurrent_conversions_do_the_work_once(model_file: Path, root: Path) -> None:
    barrier, results = SPAWN.Barrier(2), SPAWN.Queue()
    processes = [
        SPAWN.Process(target=convert_together, args=(model_file, root, barrier, results))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len({folder for folder, _ in found}) == 1
    assert sum(count > 0 for _, count in found) == 1
    assert len(folders(root)) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up(
    code: int, model_file: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"no space left.*XDG_CACHE_HOME"):
            converted(model_file, False, root)
    assert folders(root) == []
    assert converted(model_file, False, root).is_dir()


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_that_is_too_small_is_told_before(
    model_file: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda _: Usage(100, 95, 5))
    with pytest.raises(CheckpointError, match=r"takes 0\.00 GB.*0\.00 GB free"):
        converted(model_file, False, root)
    assert folders(root) == []


def test_a_cache_that_cannot_be_written(model_file: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(CheckpointError, match=r"cannot write.*XDG_CACHE_HOME"):
        converted(model_file, False, blocked / "cache")
