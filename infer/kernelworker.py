"""One of the processes of ``infer.kernelcache``: its work is JSON on standard input."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from infer import graphs
from infer import rows as row_state
from infer.config import Limits, ModelConfig, RopeConfig
from infer.graphs import Shape
from infer.initialize import allocate_kv
from infer.loading import load
from infer.ops.backends import make_ops


def work(spec: dict[str, Any]) -> None:
    """Run one worker's steps."""
    rope = RopeConfig(**spec["config"].pop("rope"))
    eos = tuple(spec["config"].pop("eos_token_ids"))
    config = ModelConfig(rope=rope, eos_token_ids=eos, **spec["config"])
    model = load(
        config=config,
        load_format="random",
        dtype=spec["dtype"],
        device=spec["device"],
        progress=False,
    )
    limits = Limits(**spec["limits"])
    ops = make_ops("triton", config, model.device)
    with torch.inference_mode():
        kv = allocate_kv(model, limits)
        rows = row_state.make(limits, config.vocab_size, model.device)
        shapes = [Shape(**shape) for shape in spec["shapes"]]
        graphs.warm_up(model, ops, kv, rows, limits, shapes)


if __name__ == "__main__":
    work(json.load(sys.stdin))
