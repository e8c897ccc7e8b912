"""Make the engine that a server runs, in the thread or process that will own it."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from infer.client import Engine
from infer.config import EngineConfig
from infer.engine import abort, has_work, submit
from infer.engineloop import Advance, Transitions
from infer.info import engine_info
from infer.initialize import init
from infer.llm import advance
from infer.loading import load
from infer.model import Model
from infer.presets import find_preset
from infer.report import Report
from infer.server.logs import configure_logging
from infer.state import EngineState
from infer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Watcher(Protocol):
    """Who is told of every step, and tells others."""

    def record(self, report: Report, state: EngineState) -> None:
        """Note a collected step and the state after it, in the thread that runs them."""

    def to_json(self, step: int | None = None) -> str:
        """What ``Engine.look`` answers, in any thread."""


def build_engine(settings: Mapping[str, Any]) -> Engine:
    """Make an engine in a process of its own, from ``{"load": ..., "engine": ..., "log_format"}``.

    ``"watcher"``, if there, names a ``Watcher``'s class: ``module:class``.

    Raises:
        InferError: the model or an option is wrong.
    """
    configure_logging(settings.get("log_format", "text"))
    watcher: Watcher | None = None
    if settings.get("watcher"):
        module, _, name = settings["watcher"].partition(":")
        watcher = getattr(importlib.import_module(module), name)()
    return build(settings["load"], settings["engine"], watcher)[0]


def build(
    load_options: Mapping[str, Any],
    engine_options: Mapping[str, Any],
    watcher: Watcher | None = None,
) -> tuple[Engine, Tokenizer | None]:
    """Load a model and make an engine for it; with the model's tokenizer, if it has one.

    Args:
        load_options: of ``infer.load``.
        engine_options: of ``EngineConfig``; they win over the model's preset.
        watcher: told of every step.

    Raises:
        InferError: the model or an option is wrong.
    """
    name = load_options.get("model")
    logger.info("loading %s", name or "the default model")
    began = time.monotonic()
    preset = find_preset(name) if name is not None else None
    model = load(**load_options)
    loaded = time.monotonic()
    logger.info("loaded in %.1f s; preparing the engine on %s", loaded - began, model.device)
    config = EngineConfig(**{**(preset.engine if preset else {}), **engine_options})
    state = init(model, config)
    logger.info("engine prepared in %.1f s", time.monotonic() - loaded)
    transitions = Transitions(
        submit=submit,
        abort=abort,
        has_work=has_work,
        advance=advance if watcher is None else _recorded(advance, watcher),
        check=_check_ranks,
    )
    info = engine_info(model, state)
    look = None if watcher is None else watcher.to_json
    engine = Engine(transitions=transitions, model=model, state=state, info=info, look=look)
    return engine, model.tokenizer


def _check_ranks(model: Model) -> None:
    """Raise when another rank of the model's group has failed."""
    if model.tp.link is not None:
        model.tp.link.check()


def _recorded(advance: Advance, watcher: Watcher) -> Advance:
    """``advance``, with every collected step noted."""

    def advance_and_record(
        model: Any, state: Any, tickets: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...], Sequence[Any]]:
        state, tickets, reports = advance(model, state, tickets)
        for report in reports:
            watcher.record(cast("Report", report), state)
        return state, tickets, reports

    return advance_and_record
