"""Traces on disk: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from infer.errors import ConfigError
from infer.trace.record import Event
from infer.trace.setup import Arrival, Setup, request_of, setup_of


def write(events: Iterable[Event], out: TextIO) -> int:
    """Write every event as it comes; returns how many."""
    count = 0
    for event in events:
        out.write(json.dumps(event, ensure_ascii=False) + "\n")
        out.flush()
        count += 1
    return count


def read(path: str) -> list[Event]:
    """All events of a trace, its header first.

    Raises:
        ConfigError: the file cannot be read, or is no trace.
    """
    events = list(_lines(path))
    if not events:
        raise ConfigError(f"{path} is empty")
    with damage_told(path):
        setup_of(events[0], ())
    return events


@contextmanager
def damage_told(path: str) -> Iterator[None]:
    """Around work on a trace: an event that lacks something is the file's fault.

    Raises:
        ConfigError: an event is damaged.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} has a damaged event ({type(error).__name__}: {error}); record it again"
        ) from error


def _lines(path: str) -> Iterator[Event]:
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    value = json.loads(line)
                except ValueError as error:
                    raise ConfigError(
                        f"{path}, line {number} is not JSON ({error}); "
                        "the file is damaged or was cut off"
                    ) from error
                if not isinstance(value, dict) or "event" not in value:
                    raise ConfigError(f"{path}, line {number} is not an event")
                yield value
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def setup_from(events: list[Event]) -> Setup:
    """The run that a trace was made of.

    Raises:
        ConfigError: an event is damaged.
    """
    arrivals = tuple(
        Arrival(request=request_of(event), step=event["step"])
        for event in events
        if event["event"] == "submitted"
    )
    return setup_of(events[0], arrivals)
