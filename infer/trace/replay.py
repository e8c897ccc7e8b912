"""Whether a run happens again as it was written down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from infer.trace.record import Event

TIMES = frozenset({"t", "host_s", "device_s"})  # never the same twice
MAX_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is not what it was."""

    where: str  # step 1, inputs, slot_mapping[3]
    recorded: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.where}: {_short(self.recorded)} recorded, {_short(self.now)} now"


def differences(
    recorded: Sequence[Event], now: Iterable[Event], *, tokens_only: bool = False
) -> list[Difference]:
    """Where two runs differ, at most a dozen places. Times are left out.

    Args:
        tokens_only: compare what was generated, whatever the engine did to get there.
    """
    found: list[Difference] = []
    pairs = zip_longest(_chosen(recorded, tokens_only), _chosen(now, tokens_only))
    for one, other in pairs:
        if one is None or other is None:
            event = one or other or {}
            place = f"step {event.get('step')}, {event.get('event')}"
            found.append(Difference(place, None if one is None else "an event", other and "one"))
        else:
            place = f"step {one.get('step')}, {one['event']}"
            found += _between(place, one, other)
        if len(found) >= MAX_SHOWN:
            return found[:MAX_SHOWN]
    return found


def _chosen(events: Iterable[Event], tokens_only: bool) -> Iterator[Event]:
    if not tokens_only:
        yield from (e for e in events if e["event"] not in ("trace", "shapes"))
        return
    # Which step a token falls into is the scheduler's affair; what each request got is not.
    kept = ("event", "request_id", "choice", "reason", "token_ids")
    ends = [e for e in events if e["event"] == "finished"]
    for event in sorted(ends, key=lambda e: (e["request_id"], e["choice"])):
        yield {key: event[key] for key in kept}


def _between(place: str, one: Any, other: Any) -> list[Difference]:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted((one.keys() | other.keys()) - TIMES)
        joined = [(f"{place}, {key}", one.get(key), other.get(key)) for key in keys]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        joined = [(f"{place}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return [] if one == other else [Difference(place, one, other)]
    return [found for part in joined for found in _between(*part)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
