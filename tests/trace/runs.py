"""Traces of the built-in cases, made once a session, and ways to look into them."""

from __future__ import annotations

from functools import cache
from typing import Any

from infer.trace.cases import case_setup
from infer.trace.record import record
from infer.trace.setup import load_model

Event = dict[str, Any]


@cache
def case(name: str, shapes: bool = False) -> tuple[Event, ...]:
    """Every event of a case on the tiny model."""
    setup = case_setup(name, "tiny", {}, {})
    return tuple(record(load_model(setup), setup, shapes=shapes))


def kinds(events: tuple[Event, ...], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def at(events: tuple[Event, ...], step: int, kind: str) -> Event:
    (found,) = [e for e in kinds(events, kind) if e["step"] == step]
    return found


def sequence(event: Event, name: str) -> Event:
    (found,) = [s for s in event["sequences"] if s["request_id"] == name]
    return found


def scheduled(events: tuple[Event, ...]) -> list[dict[str, int]]:
    """How many positions of which request each step computes."""
    return [
        {s["request_id"]: s["num_scheduled_tokens"] for s in event["sequences"]}
        for event in kinds(events, "scheduled")
    ]
