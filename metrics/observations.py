"""What can be observed, as values in a queue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from infer.types import Event, FailureKind, RejectionKind, Request, RequestStats, StepStats


class Report(Protocol):
    """The part of ``infer.step``'s report that is read here."""

    @property
    def events(self) -> Iterable[Event]: ...

    @property
    def stats(self) -> StepStats: ...


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request's first token, told before the request ended."""

    request_id: str
    ttft_s: float


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """One answered HTTP request; ``handler`` is the template of its route."""

    handler: str
    method: str
    status: int


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request went to an engine whose reports will be observed; arrival in monotonic seconds."""

    request: Request
    arrival: float


@dataclass(frozen=True, slots=True)
class Reported:
    """A step's whole report, from somebody who makes no ``RequestStats``."""

    report: Report


Told = StepStats | RequestStats | FirstToken | RejectionKind | FailureKind
Observation = Told | HttpAnswer | Submitted | Reported
