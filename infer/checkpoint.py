"""Where weights come from: safetensors folders, state dicts and random numbers.

Checks are strict and come before anything is allocated: every tensor the model needs, in the right
shape, and none it does not know. Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infer.config import ModelConfig
from infer.errors import CheckpointError
from infer.jsonfile import read_json
from infer.weights import Init, Param, Piece

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = {"F64", "F32", "F16", "BF16"}  # safetensors' names of what can be converted
NORMAL_STD = 0.02

Shape = tuple[int, ...]


def check(cfg: ModelConfig, params: Mapping[str, Param], shapes: Mapping[str, Shape]) -> None:
    """Compare what the model needs with what a checkpoint has.

    Rotary ``inv_freq`` buffers, and an LM head that is tied to the embedding, may be there and are
    not read.

    Raises:
        CheckpointError: a tensor is missing, misshapen or unknown; the message names it.
    """
    pieces = {piece.hf_name: piece for param in params.values() for piece in param.pieces}
    missing = [name for name in pieces if name not in shapes]
    if missing:
        raise CheckpointError(f"the checkpoint has no tensor {_some(missing)}")
    for name, piece in pieces.items():
        if tuple(shapes[name]) != piece.hf_shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(shapes[name])}, the configuration asks for "
                f"{list(piece.hf_shape)}"
            )
    redundant = {"lm_head.weight"} if cfg.tie_word_embeddings else set()
    extra = [
        name
        for name in sorted(set(shapes) - set(pieces) - redundant)
        if not name.endswith("rotary_emb.inv_freq")
    ]
    if extra:
        raise CheckpointError(
            f"the checkpoint has a tensor that a {cfg.architecture} model of this configuration "
            f"does not know: {_some(extra)}"
        )


def _some(names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]}{more}"


# --- safetensors ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    """Tensors in safetensors files. Only the slices asked for are read."""

    files: Mapping[str, Path]  # tensor name -> the file that holds it
    shapes: Mapping[str, Shape]

    def fill(self, piece: Piece, out: Tensor, init: Init) -> None:
        """Copy the piece's spans from its file into ``out``."""
        # Opened anew for each tensor: what a mapping has read counts as this process's memory for
        # as long as it is open.
        with _opened(self.files[piece.hf_name]) as file:
            data = file.get_slice(piece.hf_name)
            for span in piece.spans:
                cut = slice(span.src, span.src + span.length)
                part = data[cut] if piece.dim == 0 else data[:, cut]
                out.narrow(piece.dim, span.dst, span.length).copy_(part)


def open_safetensors(folder: Path) -> SafetensorsSource:
    """Find the safetensors files of a checkpoint folder and list their tensors.

    Raises:
        CheckpointError: there are none, one is missing or damaged, or a tensor is not of a
            floating-point type that can be converted.
    """
    files: dict[str, Path] = {}
    shapes: dict[str, Shape] = {}
    promised = _index(folder)
    for path in sorted(set(promised.values())) if promised else [_single(folder)]:
        if not path.is_file():
            raise CheckpointError(f"the shard {path} is missing; download the checkpoint again")
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                data = file.get_slice(name)
                if data.get_dtype() not in FLOATS:
                    raise CheckpointError(
                        f"tensor {name} in {path} is of type {data.get_dtype()}; only "
                        "unquantized floating-point weights are supported"
                    )
                files[name], shapes[name] = path, tuple(data.get_shape())
    for name, path in promised.items():
        if files.get(name) != path:
            raise CheckpointError(f"{path} does not hold the tensor {name} that {INDEX} promises")
    return SafetensorsSource(files=files, shapes=shapes)


def _index(folder: Path) -> dict[str, Path]:
    """Tensor name -> shard, from the index file; empty when there is none."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map")
    for name, shard in weight_map.items():
        # A shard is a file of this folder, never a path out of it.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path} places the tensor {name} in {shard!r}, not a file name")
    return {name: folder / shard for name, shard in weight_map.items()}


def _single(folder: Path) -> Path:
    path = folder / SINGLE
    if path.is_file():
        return path
    if any(folder.glob("model-*-of-*.safetensors")):
        raise CheckpointError(f"{folder} has shards but no {INDEX}; download the checkpoint again")
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder} holds {pickled[0]} but no {SINGLE}; pickled weights are never loaded, "
            "convert them to safetensors"
        )
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is damaged or truncated ({error}); download the checkpoint again"
        ) from error


# --- other sources --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateDictSource:
    """Tensors that are in memory already, under their checkpoint names."""

    tensors: Mapping[str, Tensor]

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def fill(self, piece: Piece, out: Tensor, init: Init) -> None:
        """Copy the piece's spans into ``out``."""
        tensor = self.tensors[piece.hf_name]
        for span in piece.spans:
            part = tensor.narrow(piece.dim, span.src, span.length)
            out.narrow(piece.dim, span.dst, span.length).copy_(part)


@dataclass(frozen=True, slots=True)
class RandomSource:
    """Normal numbers of deviation 0.02, and ones for norms; drawn on the tensor's own device.

    They depend on the seed, the tensor's checkpoint name and the device kind: however a model is
    split over ranks, its shards belong to the same model.
    """

    seed: int = 0

    def fill(self, piece: Piece, out: Tensor, init: Init) -> None:
        """Draw the whole checkpoint tensor and keep the piece's spans of it."""
        if init == "ones":
            out.fill_(1.0)
            return
        if not piece.spans:
            return
        generator = torch.Generator(out.device)
        digest = xxhash.xxh64_intdigest(piece.hf_name.encode(), seed=self.seed)
        generator.manual_seed(digest & (2**63 - 1))
        if tuple(out.shape) == piece.hf_shape:
            out.normal_(0.0, NORMAL_STD, generator=generator)
            return
        whole = torch.empty(piece.hf_shape, dtype=out.dtype, device=out.device)
        whole.normal_(0.0, NORMAL_STD, generator=generator)
        for span in piece.spans:
            part = whole.narrow(piece.dim, span.src, span.length)
            out.narrow(piece.dim, span.dst, span.length).copy_(part)
