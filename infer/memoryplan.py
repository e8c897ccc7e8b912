"""What a model needs of a device's memory, from its configuration alone: nothing is loaded.

The figures come from the same description that allocation uses (``infer.weights.abstract``), so
they are those of one rank to the byte. The working memory of a step is left out: ``init`` measures
it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.config import ModelConfig
from infer.convert import conversion_folder
from infer.errors import CheckpointError, ConfigError
from infer.host import MAX_PENALTY_SLOTS
from infer.hub import cached_folder, is_repo_name
from infer.jsonfile import read_json
from infer.kv import bytes_per_token
from infer.loading import DTYPES
from infer.modelconfig import model_config
from infer.parallel import TP
from infer.presets import DEFAULT, Preset, find_preset, preset_names
from infer.weights import Param, abstract, local_config

EDIT_BYTES = 10  # a penalty slot and vocabulary id; see infer.ops.logit_edits
GROUPS = (
    ("embedding", ("embed",)),
    ("attention", ("qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias")),
    ("feed-forward", ("gate_up", "gate_up_bias", "down", "down_bias")),
    ("norms", ("input_norm", "post_norm", "norm")),
    ("LM head", ("lm_head",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The bytes of one rank. All ranks of a model need the same."""

    model: str
    architecture: str
    dtype: str
    tp: int
    num_parameters: int  # of the whole model, a tied LM head counted once
    weights: dict[str, int]  # bytes by group, zero groups left out
    kv_bytes_per_token: int
    block_size: int
    state_bytes: int  # tables for penalties, bias and banned tokens
    contexts: tuple[tuple[int, int], ...]  # (positions, KV bytes)
    max_model_len: int
    budget: int | None = None  # bytes this rank may use; None: not known

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return sum(self.weights.values())

    @property
    def block_bytes(self) -> int:
        """One KV block over all layers."""
        return self.block_size * self.kv_bytes_per_token

    @property
    def num_blocks(self) -> int | None:
        """Blocks that fit beside weights and tables; None without a budget, 0 when none fits."""
        if self.budget is None:
            return None
        left = self.budget - self.weight_bytes - self.state_bytes
        return max(0, left // self.block_bytes - 1)  # one more is spare, for padding

    @property
    def num_tokens(self) -> int | None:
        """Positions that fit, over all sequences."""
        return None if self.num_blocks is None else self.num_blocks * self.block_size


def find_config(name: str | None) -> tuple[str, ModelConfig]:
    """A model's name and configuration, read without its weights.

    ``name`` is what ``infer.load`` takes. Of a hub model that is not in the cache, its config.json
    is downloaded, and nothing else.

    Raises:
        CheckpointError: there is no such model, or its configuration cannot be had.
    """
    name = DEFAULT if name is None else name
    preset = find_preset(name)
    if preset is not None:
        return preset.name, model_config(_preset_config(preset))
    path = Path(name).expanduser()
    if path.is_dir():
        return name, model_config(read_json(path / "config.json"))
    if path.is_file():
        return name, model_config(_gguf_config(path))
    if is_repo_name(name):
        return name, model_config(read_json(_hub_config(name)))
    raise CheckpointError(
        f"there is no model {name!r}: no preset ({', '.join(preset_names())}), no such folder or "
        ".gguf file, and not a hub name (owner/name)"
    )


def memory_plan(
    name: str,
    cfg: ModelConfig,
    *,
    dtype: str = "bfloat16",
    tp: int = 1,
    block_size: int = 16,
    max_num_seqs: int = 256,
    contexts: Sequence[int] = (4096,),
    budget: int | None = None,
) -> MemoryPlan:
    """Add up what one of ``tp`` ranks holds.

    Args:
        dtype: of weights and KV.
        contexts: numbers of positions whose KV to state.
        budget: bytes the rank may use in all.

    Raises:
        ConfigError: an unknown dtype, or a model that cannot be split over so many ranks.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose {', '.join(DTYPES)}")
    counts = {"tp": tp, "block_size": block_size, "max_num_seqs": max_num_seqs}
    counts |= {"context": min(contexts, default=1)}
    for what, value in counts.items():
        if value < 1:
            raise ConfigError(f"{what} is {value}, it must be at least 1")
    kind, rank = DTYPES[dtype], TP(size=tp)
    local = local_config(cfg, rank)
    per_token = bytes_per_token(local.num_layers, local.num_kv_heads, local.head_dim, kind)
    slots = min(max_num_seqs, MAX_PENALTY_SLOTS) + 1
    return MemoryPlan(
        model=name,
        architecture=cfg.architecture,
        dtype=dtype,
        tp=tp,
        num_parameters=_num_parameters(cfg),
        weights=_by_group(abstract(cfg, rank, kind)),
        kv_bytes_per_token=per_token,
        block_size=block_size,
        state_bytes=slots * cfg.vocab_size * EDIT_BYTES,
        contexts=tuple((length, length * per_token) for length in contexts),
        max_model_len=cfg.max_position_embeddings,
        budget=budget,
    )


def as_json(plan: MemoryPlan) -> str:
    """One JSON object: the plan's fields and what follows from them, in bytes."""
    return json.dumps(
        {
            "model": plan.model,
            "architecture": plan.architecture,
            "dtype": plan.dtype,
            "tp": plan.tp,
            "num_parameters": plan.num_parameters,
            "weights": plan.weights,
            "weight_bytes": plan.weight_bytes,
            "state_bytes": plan.state_bytes,
            "kv_bytes_per_token": plan.kv_bytes_per_token,
            "block_size": plan.block_size,
            "block_bytes": plan.block_bytes,
            "contexts": dict(plan.contexts),
            "max_model_len": plan.max_model_len,
            "budget": plan.budget,
            "num_blocks": plan.num_blocks,
            "num_tokens": plan.num_tokens,
        }
    )


def as_text(plan: MemoryPlan) -> str:
    """The plan for a terminal."""
    rank = "" if plan.tp == 1 else f", each of {plan.tp} ranks"
    size = f"{plan.num_parameters:,} parameters"
    lines = [
        f"{plan.model}: {plan.architecture}, {size}, {plan.dtype}{rank}",
        "",
        *(_line(f"weights, {group}", size) for group, size in plan.weights.items()),
        _line("weights in all", plan.weight_bytes),
        _line("tables for penalties and bias", plan.state_bytes),
        "",
        _line("KV of one position", plan.kv_bytes_per_token),
        _line(f"KV of a block of {plan.block_size} positions", plan.block_bytes),
        *(_line(f"KV of {length:,} positions", size) for length, size in plan.contexts),
    ]
    if plan.budget is not None and plan.num_blocks is not None:
        full = (plan.num_tokens or 0) / plan.max_model_len
        whole = f"{full:.2f} sequences of {plan.max_model_len:,}"
        lines += [
            "",
            _line("budget", plan.budget),
            f"{'KV blocks that fit':44}{plan.num_blocks:>18,}",
            f"{'positions that fit':44}{plan.num_tokens:>18,}   {whole}",
            "",
            "A step's working memory is not in this: the engine measures it when it starts.",
        ]
        if plan.num_blocks == 0:
            lines += ["", "Nothing fits: take more ranks, a smaller dtype or a larger device."]
    return "\n".join(lines)


def _line(what: str, size: int) -> str:
    return f"{what:44}{size:>18,}   {_human(size)}"


def _human(size: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return (
                f"{size / scale:,.6g} {unit}"
                if size % scale == 0
                else f"{size / scale:,.2f} {unit}"
            )
    return f"{size} B"


def _num_parameters(cfg: ModelConfig) -> int:
    params = abstract(cfg).values()
    return sum(param.num_bytes // param.dtype.itemsize for param in params)


def _by_group(params: dict[str, Param]) -> dict[str, int]:
    sizes = dict.fromkeys((group for group, _ in GROUPS), 0)
    of = {name: group for group, names in GROUPS for name in names}
    for path, param in params.items():
        sizes[of[path.rpartition(".")[2]]] += param.num_bytes
    return {group: size for group, size in sizes.items() if size}


def _preset_config(preset: Preset) -> Mapping[str, Any]:
    if preset.config is not None:
        return preset.config
    packaged = preset.packaged_file()
    if packaged is not None:
        return _gguf_config(packaged)
    if preset.path is not None:
        path = Path(preset.path)
        return read_json(path / "config.json") if path.is_dir() else _gguf_config(path)
    assert preset.hub is not None, "a preset without a source has a configuration"
    return read_json(_hub_config(preset.hub))


def _gguf_config(path: Path) -> Mapping[str, Any]:
    folder = conversion_folder(path)
    if folder.is_dir():
        return read_json(folder / "config.json")
    from infer.gguf_file import open_gguf

    return open_gguf(path).config


def _hub_config(name: str) -> Path:
    folder = cached_folder(name)
    if folder is not None:
        return folder / "config.json"
    from huggingface_hub import hf_hub_download

    repo, _, revision = name.partition("@")
    try:
        return Path(hf_hub_download(repo, "config.json", revision=revision or None))
    except Exception as error:  # whatever the transport of the day fails with
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"cannot read the configuration of {name}: {reason}; check the name, or give a folder"
        ) from error
