"""purestep's engine: language-model inference whose whole state is a value.

    import infer

    model = infer.load()
    state = infer.init(model, infer.EngineConfig())
    state = infer.submit(state, infer.Request(request_id="a", prompt_token_ids=(1, 2, 3)))
    while infer.has_work(state):
        state, report = infer.step(model, state)

Names are imported when first used, so that ``import infer`` alone does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.config import EngineConfig
    from infer.engine import abort, collect, fork, has_work, launch, step, submit
    from infer.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        InferError,
        RequestError,
        StateError,
    )
    from infer.initialize import init
    from infer.llm import LLM
    from infer.loading import load
    from infer.model import Model
    from infer.snapshots import restore, snapshot
    from infer.types import Request, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "infer.llm",
    "CapacityError": "infer.errors",
    "CheckpointError": "infer.errors",
    "ConfigError": "infer.errors",
    "EngineConfig": "infer.config",
    "InferError": "infer.errors",
    "Model": "infer.model",
    "Request": "infer.types",
    "RequestError": "infer.errors",
    "SamplingParams": "infer.types",
    "StateError": "infer.errors",
    "abort": "infer.engine",
    "collect": "infer.engine",
    "fork": "infer.engine",
    "has_work": "infer.engine",
    "init": "infer.initialize",
    "launch": "infer.engine",
    "load": "infer.loading",
    "restore": "infer.snapshots",
    "snapshot": "infer.snapshots",
    "step": "infer.engine",
    "submit": "infer.engine",
}

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "EngineConfig",
    "InferError",
    "Model",
    "Request",
    "RequestError",
    "SamplingParams",
    "StateError",
    "__version__",
    "abort",
    "collect",
    "fork",
    "has_work",
    "init",
    "launch",
    "load",
    "restore",
    "snapshot",
    "step",
    "submit",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'infer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
