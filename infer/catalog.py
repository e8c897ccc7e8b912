"""What models this machine knows and has: presets, hub checkpoints, converted GGUF files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from infer.convert import TEMPORARY, conversion_folder
from infer.errors import CheckpointError
from infer.hub import cached_folder
from infer.jsonfile import read_json
from infer.modelconfig import ARCHITECTURES
from infer.presets import Preset, find_preset, preset_names
from infer.usercache import cache_root

State = Literal["ready", "convert", "download"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model that ``load`` would accept by ``name``."""

    name: str
    description: str
    source: str  # where it comes from, for people
    state: State  # ready: on disk; convert, download: what ``load`` would do first
    path: str | None = None  # the folder, when ready
    num_bytes: int = 0  # on disk, when ready


def known_models() -> list[ModelEntry]:
    """Presets, then what else lies in the hub's cache and in this package's own."""
    presets = [find_preset(name) for name in preset_names()]
    entries = [_preset_entry(preset) for preset in presets if preset is not None]
    taken = {entry.path for entry in entries}
    others = [*_hub_entries(), *_converted_entries()]
    return [*entries, *(entry for entry in others if entry.path not in taken)]


def _preset_entry(preset: Preset) -> ModelEntry:
    packaged = preset.packaged_file()
    folder: Path | None = None
    state: State = "download"
    source = preset.hub or preset.path or "configuration only"
    if packaged is not None:
        source = f"package {preset.package}"
        target = conversion_folder(packaged)
        folder, state = (target, "ready") if target.is_dir() else (None, "convert")
    elif preset.hub is not None:
        folder = cached_folder(preset.hub)
        state = "download" if folder is None else "ready"
    return ModelEntry(
        name=preset.name,
        description=preset.description,
        source=source,
        state=state,
        path=None if folder is None else str(folder),
        num_bytes=0 if folder is None else folder_bytes(folder),
    )


def _hub_entries() -> Iterator[ModelEntry]:
    """Complete checkpoints of supported architectures in the hub's cache."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: str(repo.repo_id)):
        folder = cached_folder(repo.repo_id) if repo.repo_type == "model" else None
        if folder is not None and _supported(folder):
            yield _entry(str(repo.repo_id), "hub", folder)


def _converted_entries() -> Iterator[ModelEntry]:
    root = cache_root()
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.is_dir() and TEMPORARY not in folder.name and _supported(folder):
            yield _entry(str(folder), "converted GGUF file", folder)


def _entry(name: str, source: str, folder: Path) -> ModelEntry:
    return ModelEntry(
        name=name,
        description="",
        source=source,
        state="ready",
        path=str(folder),
        num_bytes=folder_bytes(folder),
    )


def _supported(folder: Path) -> bool:
    try:
        names: Any = read_json(folder / "config.json").get("architectures")
    except CheckpointError:
        return False
    return isinstance(names, list) and any(name in ARCHITECTURES for name in names)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder, through links (the hub's cache is made of them)."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
