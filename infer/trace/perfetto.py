"""A trace in the Chrome trace event format, for ui.perfetto.dev and chrome://tracing.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from infer.trace.record import Event

ENGINE, REQUESTS = 1, 2  # process ids, which are groups of tracks there
STEPS = 1  # the engine's track


def chrome_trace(events: Sequence[Event]) -> str:
    """The whole file: steps, one track a sequence, and counters of tokens, blocks and requests."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(_events(events))})


def _events(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    yield _name("process_name", ENGINE, 0, "engine")
    yield _name("process_name", REQUESTS, 0, "requests")
    yield _name("thread_name", ENGINE, STEPS, "steps")
    tracks: dict[tuple[str, int], int] = {}
    scheduled: Event = {}
    for event in events:
        kind = event["event"]
        if kind == "submitted":
            track = tracks.setdefault((event["request_id"], 0), len(tracks) + 1)
            yield _name("thread_name", REQUESTS, track, event["request_id"])
            yield _instant(event["t"], track, f"submitted, {event['num_prompt_tokens']} tokens")
        elif kind == "scheduled":
            scheduled = event
        elif kind == "preempted":
            track = tracks.setdefault((event["request_id"], 0), len(tracks) + 1)
            yield _instant(scheduled["t"], track, "preempted")
        elif kind == "committed":
            yield from _step(scheduled, event, tracks)


def _step(
    scheduled: Event, committed: Event, tracks: dict[tuple[str, int], int]
) -> Iterator[dict[str, Any]]:
    start, end = scheduled["t"], committed["t"]
    step, tokens = scheduled["step"], scheduled["num_tokens"]
    title = f"step {step}: {scheduled['kind']}, {tokens} positions"
    yield _span(start, end, ENGINE, STEPS, title, {"sequences": scheduled["sequences"]})
    after = {(s["request_id"], s["choice"]): s for s in committed["sequences"]}
    for sequence in scheduled["sequences"]:
        key = (sequence["request_id"], sequence["choice"])
        if key not in tracks:
            tracks[key] = len(tracks) + 1
            yield _name("thread_name", REQUESTS, tracks[key], f"{key[0]} choice {key[1]}")
        kind = "prefill" if sequence["prefill"] else "decode"
        title = f"{kind} {sequence['num_scheduled_tokens']}"
        yield _span(start, end, REQUESTS, tracks[key], title, {**sequence, "after": after.get(key)})
    held = sum(1 for count in committed["ref_counts"].values() if count)
    yield _counter(end, "positions", {"computed": tokens})
    yield _counter(
        end,
        "KV blocks",
        {"held": held, "reusable": committed["num_reusable_blocks"]},
    )
    yield _counter(
        end,
        "requests",
        {"running": len(committed["running"]), "waiting": len(committed["waiting"])},
    )


def _name(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _span(
    start: float, end: float, process: int, track: int, title: str, details: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": title,
        "pid": process,
        "tid": track,
        "ts": 1e6 * start,
        "dur": 1e6 * (end - start),
        "args": details,
    }


def _instant(seconds: float, track: int, title: str) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "t",
        "name": title,
        "pid": REQUESTS,
        "tid": track,
        "ts": 1e6 * seconds,
    }


def _counter(seconds: float, title: str, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": title, "pid": ENGINE, "tid": 0, "ts": 1e6 * seconds, "args": values}
