"""The real engine on a tiny model, with faults put in from outside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infer.client import Engine
from infer.enginebuild import build_engine
from infer.tokenizer import Tokenizer
from tests.server.harness import Running, serving

NUM_BLOCKS = 96
Advance = Callable[[Any, Any, tuple[Any, ...]], Any]


def settings(folder: Path, **engine: Any) -> dict[str, Any]:
    """Options of ``build_engine``."""
    return {
        "load": {
            "model": str(folder),
            "load_format": "random",
            "dtype": "float32",
            "device": "cpu",
        },
        "engine": {
            "num_blocks": NUM_BLOCKS,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            **engine,
        },
    }


@contextmanager
def real(
    folder: Path,
    *,
    change: Callable[[Engine], Engine] = lambda engine: engine,
    engine: dict[str, Any] | None = None,
    **server: Any,
) -> Iterator[Running]:
    """A server on the real engine, after ``change``."""
    options = settings(folder, **(engine or {}))
    with serving(
        build=lambda: change(build_engine(options)),
        tokenizer=Tokenizer.from_folder(folder),
        **server,
    ) as running:
        yield running


def failing_forward(error: BaseException, sequences: int) -> Callable[[Engine], Engine]:
    """The forward pass of the first step that holds so many sequences raises."""

    def change(engine: Engine) -> Engine:
        runtime = engine.state.runtime
        compute = runtime.compute

        def failing(*arguments: Any) -> Any:
            batch = arguments[3]
            if batch.attention.seq_rows.shape[0] == sequences:
                raise error
            return compute(*arguments)

        runtime.compute = failing
        return engine

    return change


def nan_logits(rows: int, row: int) -> Callable[[Engine], Engine]:
    """The first step with so many rows of logits loses ``row`` of them."""

    def change(engine: Engine) -> Engine:
        done = False

        def poison(scores: torch.Tensor) -> None:
            nonlocal done
            if scores.shape[0] == rows and not done:
                done = True
                scores[row] = torch.nan

        engine.state.runtime.on_logits = poison
        return engine

    return change


def hanging(engine: Engine, step: int) -> Engine:
    """An engine that never comes back from step number ``step``."""
    advance, steps = engine.transitions.advance, 0

    def hang(model: Any, state: Any, tickets: tuple[Any, ...]) -> Any:
        nonlocal steps
        steps += 1
        if steps == step:
            threading.Event().wait()
        return advance(model, state, tickets)

    return replace(engine, transitions=replace(engine.transitions, advance=hang))


def build_hanging(options: dict[str, Any]) -> Engine:
    """For an engine process: hangs in step 3."""
    return hanging(build_engine(options), 3)
