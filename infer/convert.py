"""GGUF files kept as safetensors folders in the user's cache, made once and atomically.

The values are stored exactly: quantized tensors as float32 (their scales times their codes need
more bits than half precision has), half precision tensors as they are.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from infer.checkpoint import check
from infer.errors import CheckpointError
from infer.gguf_tokenizer import tokenizer_files
from infer.modelconfig import model_config
from infer.progress import Progress, byte_progress
from infer.usercache import cache_root, locked
from infer.weights import abstract

if TYPE_CHECKING:
    from infer.gguf_file import GGUFFile

FORMAT = 1  # of the converted folder; a new one is converted anew
SAMPLE_BYTES = 1 << 20
TEMPORARY = ".part-"


def conversion_folder(path: Path, root: Path | None = None) -> Path:
    """The folder that a file's conversion has or will have, named after its content.

    Raises:
        CheckpointError: the file cannot be read.
    """
    return (cache_root() if root is None else root) / f"{path.stem}-{_identity(path)}"


def converted(path: Path, progress: bool | Progress = True, root: Path | None = None) -> Path:
    """The folder with the file's model in safetensors form, converted now if it is not there yet.

    Safe to interrupt and to run several times at once: the folder appears complete or not at all.

    Raises:
        CheckpointError: the file is unreadable or unsupported, or the cache cannot be written.
    """
    target = conversion_folder(path, root)
    root = target.parent
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f"{target.name}.lock"):
            if not target.is_dir():
                _remove_leftovers(root, target.name)
                _convert(path, target, progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"no space left in {root} to convert {path.name}; free some, or set XDG_CACHE_HOME "
                "to a folder on a larger disk"
            ) from error
        raise CheckpointError(
            f"cannot write to {root} ({error}); set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return target


def _identity(path: Path) -> str:
    """Names a file's content by its size and samples of it; reading it all would cost seconds."""
    digest = xxhash.xxh3_64(f"{FORMAT}".encode())
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"/{size}/".encode())
            for start in sorted({max(0, (size - SAMPLE_BYTES) * i // 8) for i in range(9)}):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()


def _remove_leftovers(root: Path, name: str) -> None:
    """What a killed conversion left. Only the holder of the lock writes such folders."""
    for leftover in root.glob(f"{name}{TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _convert(path: Path, target: Path, progress: bool | Progress) -> None:
    from infer.gguf_file import open_gguf  # the gguf package is needed once in a file's life

    source = open_gguf(path)
    cfg = model_config(source.config)
    check(cfg, abstract(cfg), {tensor.name: tensor.shape for tensor in source.tensors})
    free = shutil.disk_usage(target.parent).free
    if free < source.num_bytes:
        raise CheckpointError(
            f"converting {path.name} takes {source.num_bytes / 1e9:.2f} GB and {target.parent} has "
            f"{free / 1e9:.2f} GB free; free some, or set XDG_CACHE_HOME to a folder on a larger "
            "disk"
        )
    texts = _texts(source)
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}{TEMPORARY}", dir=target.parent))
    try:
        with byte_progress(f"Converting {path.name}", source.num_bytes, progress) as report:
            _write_tensors(source, folder / "model.safetensors", report)
        for name, value in texts.items():
            indent = None if name == "tokenizer.json" else 2  # indenting a vocabulary takes long
            with (folder / name).open("w", encoding="utf-8") as file:
                file.write(json.dumps(value, ensure_ascii=False, indent=indent))
                _sync(file)
        folder.chmod(0o755)  # mkdtemp's is private
        _sync_folder(folder)
        folder.rename(target)
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _texts(source: GGUFFile) -> dict[str, Any]:
    config = dict(source.config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    return {
        "config.json": config,
        "generation_config.json": generation,
        **tokenizer_files(source.metadata),
    }


def _write_tensors(source: GGUFFile, path: Path, report: Callable[[int], None]) -> None:
    """Write a safetensors file a part of a tensor at a time.

    The format is eight bytes of header length, a JSON header, then the values back to back:
    https://huggingface.co/docs/safetensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    tensors = sorted(source.tensors, key=lambda tensor: tensor.dtype != "F32")  # for alignment
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # values start aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for chunk in tensor.chunks():
                file.write(chunk.data)
                report(chunk.nbytes)
        _sync(file)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
