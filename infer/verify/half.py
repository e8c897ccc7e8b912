"""bfloat16: the engine's error beside that of transformers' own bfloat16, both against float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from infer.errors import ConfigError
from infer.ops.backends import make_ops
from infer.verify.context import Context, sampled_like
from infer.verify.result import Row, judged, not_run
from infer.verify.runs import observe

SHARE = 1.25  # of transformers' own error


def half(kind: str, **changes: Any) -> Callable[[str, str, Context], Row]:
    """The comparison of one backend, with engine options of its own."""

    def check(name: str, title: str, c: Context) -> Row:
        if c.half is None:
            return not_run(name, title, "bfloat16 was left out; add --half")
        if changes.get("cuda_graphs") and c.model.device.type != "cuda":
            return not_run(name, title, "CUDA Graphs need a GPU")
        try:
            if kind != "auto":
                make_ops(kind, c.model.config, c.model.device)
        except ConfigError as error:
            return not_run(name, title, str(error))
        model = c.subject.load(torch.bfloat16)
        config = c.config(attention_backend=kind, **changes)
        graphs = bool(changes.get("cuda_graphs"))
        run = observe(model, config, [c.paths], whole=not graphs, logprobs=1 if graphs else None)
        peer = c.half_errors(run)
        return judged(
            name,
            f"{title} (transformers' own: {peer.rms:.3g})",
            c.against_reference(run),
            measure="rms",
            tolerance=SHARE * peer.rms,
            exact_tokens=False,
            tokens=sampled_like(run, c.paths),
            counts={"graph steps": run.num_graph_steps} if graphs else {},
            at_least={"graph steps": 1} if graphs else None,
            peak_bytes=run.peak_bytes,
            seconds=run.seconds,
        )

    return check
