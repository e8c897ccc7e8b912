"""Models known by a short name: TOML files in ``configs/models``, or one of the user's own.

A preset says where a model comes from (``[source]``), with which engine options (``[engine]``) and
sampling defaults for chats (``[chat]``) it runs, and its shape (``[config]``) for random weights.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from infer.config import engine_config
from infer.errors import ConfigError, InferError, RequestError
from infer.types import SamplingParams

DEFAULT = "smollm2-135m"
TABLES = ("source", "engine", "chat", "config")
SOURCES = ("package", "file", "hub", "path")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model by name. Every source it names is tried in the order package, path, hub."""

    name: str
    description: str = ""
    package: str | None = None  # an installed package that carries ``file``
    file: str | None = None
    path: str | None = None  # a folder or GGUF file, relative to the TOML file
    hub: str | None = None  # owner/name
    engine: Mapping[str, Any] = field(default_factory=dict)  # EngineConfig options
    chat: Mapping[str, Any] = field(default_factory=dict)  # SamplingParams options
    config: Mapping[str, Any] | None = None  # a Hugging Face config

    def packaged_file(self) -> Path | None:
        """The model file of an installed package, found without importing the package."""
        if self.package is None or self.file is None:
            return None
        spec = importlib.util.find_spec(self.package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (Path(folder) / self.file).is_file():
                return Path(folder) / self.file
        return None


def preset_folder() -> Path | None:
    """``configs/models`` of a source checkout, or its installed copy; None without either."""
    beside = Path(__file__).resolve().parents[1] / "configs" / "models"
    if beside.is_dir():
        return beside
    try:
        installed = metadata.files("purestep") or []
    except metadata.PackageNotFoundError:
        return None
    for file in installed:
        if file.suffix == ".toml" and file.parent.parts[-2:] == ("purestep", "models"):
            return Path(str(file.locate())).resolve().parent
    return None


def preset_names() -> tuple[str, ...]:
    """Every preset's name, the default first."""
    folder = preset_folder()
    names = sorted(path.stem for path in folder.glob("*.toml")) if folder else []
    return tuple(sorted(names, key=lambda name: name != DEFAULT))


def find_preset(name: str) -> Preset | None:
    """The preset of that name, or the one in a ``.toml`` file of that path; None if there is none.

    Raises:
        ConfigError: the file is damaged or has an unknown or bad option.
    """
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"there is no file {name}")
        return read_preset(path)
    return read_preset(_path(name)) if name in preset_names() else None


def _path(name: str) -> Path:
    folder = preset_folder()
    assert folder is not None, "a name was found without a folder"
    return folder / f"{name}.toml"


def read_preset(path: Path) -> Preset:
    """Read and check one preset file.

    Raises:
        ConfigError: the file cannot be read, or an option is unknown or out of range.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    known = ("description", *TABLES)
    for key, value in data.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown option {key!r}; the options are {', '.join(known)}")
        if isinstance(value, dict) != (key in TABLES):
            raise ConfigError(f"{path}: {key} is {value!r}, it must be a table or a text")
    source, engine, chat = (data.get(table, {}) for table in ("source", "engine", "chat"))
    for key, value in source.items():
        if key not in SOURCES or not isinstance(value, str):
            raise ConfigError(
                f"{path}: [source] {key} = {value!r}; the options are {', '.join(SOURCES)}, as text"
            )
    if not set(source) & {"package", "path", "hub"} and "config" not in data:
        raise ConfigError(f"{path}: [source] names no package, path or hub")
    _check(path, "engine", lambda: engine_config(engine))
    _check(path, "chat", lambda: SamplingParams(**chat))
    local = source.get("path")
    return Preset(
        name=path.stem,
        description=str(data.get("description", "")),
        package=source.get("package"),
        file=source.get("file"),
        path=None if local is None else str(path.parent / Path(local).expanduser()),
        hub=source.get("hub"),
        engine=engine,
        chat=chat,
        config=data.get("config"),
    )


def _check(path: Path, table: str, build: Any) -> None:
    try:
        build()
    except (InferError, TypeError, RequestError) as error:
        raise ConfigError(f"{path}: [{table}] {error}") from error
