"""Fill Triton's cache on disk from several processes, before an engine compiles for itself.

Compiling holds the interpreter lock, so threads do not help. Each process makes a model of one
layer with the same shapes and runs some of the engine's steps on padding; the engine then finds
every kernel compiled. ``infer.kernelworker`` is such a process.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import xxhash

from infer.config import Limits
from infer.graphs import Shape
from infer.model import Model
from infer.ops import Ops

logger = logging.getLogger(__name__)

WORKERS = 8
WORKER_BYTES = 3 << 30  # of GPU memory: a CUDA context, one layer, an embedding, activations
TIMEOUT_S = 300.0


def fill(model: Model, ops: Ops, limits: Limits, shapes: Sequence[Shape]) -> None:
    """Compile what ``shapes`` need, unless that was done before or there is no room for it.

    A worker that fails costs time, not correctness: the engine compiles what is missing.
    """
    if ops.name != "triton" or model.tp.size > 1:
        return
    spec = _spec(model, limits)
    marker = _marker(spec)
    count = min(WORKERS, (os.cpu_count() or 1) // 2, _free_bytes(model.device) // WORKER_BYTES)
    if count < 2 or marker.exists():
        return
    processes = []
    for part in _parts(shapes, count):
        process = subprocess.Popen(
            [sys.executable, "-m", "infer.kernelworker"], stdin=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({**spec, "shapes": [asdict(shape) for shape in part]}))
        process.stdin.close()
        processes.append(process)
    endings = [_ended_well(process) for process in processes]
    if all(endings):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def _parts(shapes: Sequence[Shape], count: int) -> list[list[Shape]]:
    """Shapes that share kernels stay together: all mixed ones, and neighbours in size."""
    mixed = [shape for shape in shapes if not shape.decode]
    decode = sorted(shape for shape in shapes if shape.decode)
    cuts = [len(decode) * i // (count - 1) for i in range(count)]
    return [mixed, *(decode[a:b] for a, b in pairwise(cuts))]


def _ended_well(process: subprocess.Popen[str]) -> bool:
    try:
        status = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    if status:
        logger.warning("a kernel compiler ended with status %d; the engine compiles itself", status)
    return status == 0


def _spec(model: Model, limits: Limits) -> dict[str, Any]:
    return {
        "config": asdict(replace(model.config, num_layers=1)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "limits": {
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "block_size": limits.block_size,
            "num_blocks": 1,
            "prefix_caching": False,
            "vocab_size": limits.vocab_size,
        },
    }


def _marker(spec: dict[str, Any]) -> Path:
    """A file in Triton's own cache, so that both are deleted together."""
    import triton

    digest = xxhash.xxh3_128()
    # How long sequences may grow is no constant of any kernel.
    constants = {**spec, "limits": {**spec["limits"], "max_model_len": 0}}
    digest.update(json.dumps(constants, sort_keys=True).encode())
    digest.update(f"{triton.__version__} {torch.cuda.get_device_name(spec['device'])}".encode())
    for source in sorted((Path(__file__).parent / "ops").glob("triton_*.py")):
        digest.update(source.read_bytes())
    return Path(triton.knobs.cache.dir) / "purestep" / digest.hexdigest()


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]
