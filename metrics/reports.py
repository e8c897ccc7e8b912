"""Request statistics from step reports, for scripts that drive the step API themselves.

A server's front end knows its requests and makes their ``RequestStats`` itself. A script has only
the reports; this module follows the events in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from infer.types import (
    Event,
    FailureKind,
    FinishEvent,
    FinishReason,
    Observer,
    Request,
    RequestStats,
    StepStats,
    TokenEvent,
)


class Report(Protocol):
    """The part of ``infer.step``'s report that is read here."""

    @property
    def events(self) -> Iterable[Event]: ...

    @property
    def stats(self) -> StepStats: ...


@dataclass(slots=True)
class _Progress:
    """What is known of a running request. Times are those of the steps' clock."""

    arrival: float
    n: int | None  # None: not told, the choices seen so far are all
    max_tokens: int | None
    scheduled: float | None = None
    first_token: float | None = None
    last_tokens: dict[int, float] = field(default_factory=dict)  # by choice
    gaps: list[float] = field(default_factory=list)
    finished: dict[int, FinishEvent] = field(default_factory=dict)


class ReportObserver:
    """Feeds an observer from reports. Use it from the one thread that steps."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._running: dict[str, _Progress] = {}

    def on_submit(self, request: Request, arrival: float) -> None:
        """Tell a request's arrival (``time.monotonic()``) before its first step.

        A request that was not told counts from the start of the step that first ran it: its queue
        time is then 0.
        """
        self._running[request.request_id] = _Progress(
            arrival, request.params.n, request.params.max_tokens
        )

    def on_report(self, report: Report) -> None:
        """Count one step and the events in it; each report once, in order."""
        stats = report.stats
        self._observer.on_step(stats)
        start = stats.time - stats.host_s - stats.device_s
        for request_id in stats.first_token_ids:
            self._progress(request_id, start).scheduled = start
        for event in report.events:
            if isinstance(event, TokenEvent):
                self._token(event, stats.time, start)
            elif isinstance(event, FinishEvent):
                self._progress(event.request_id, start).finished[event.index] = event
        for event in report.events:
            if isinstance(event, FinishEvent):
                self._end_if_complete(event.request_id, stats.time)

    def _progress(self, request_id: str, start: float) -> _Progress:
        if request_id not in self._running:
            self._running[request_id] = _Progress(start, None, None)
        return self._running[request_id]

    def _token(self, event: TokenEvent, now: float, start: float) -> None:
        progress = self._progress(event.request_id, start)
        if progress.first_token is None:
            progress.first_token = now
            progress.scheduled = start if progress.scheduled is None else progress.scheduled
            self._observer.on_first_token(event.request_id, now - progress.arrival)
        previous = progress.last_tokens.get(event.index)
        if previous is not None:
            progress.gaps.append(now - previous)
        progress.last_tokens[event.index] = now

    def _end_if_complete(self, request_id: str, now: float) -> None:
        progress = self._running.get(request_id)
        if progress is None:
            return  # an earlier event of this report ended it
        choices = progress.n or len(progress.finished.keys() | progress.last_tokens.keys())
        ends = list(progress.finished.values())
        whole = any(end.reason in (FinishReason.ABORT, FinishReason.ERROR) for end in ends)
        if len(ends) < choices and not whole:
            return
        del self._running[request_id]
        self._observer.on_request(_request_stats(request_id, progress, ends, choices, now))
        if any(end.reason is FinishReason.ERROR for end in ends):
            self._observer.on_failure(FailureKind.ENGINE)


def _request_stats(
    request_id: str, progress: _Progress, ends: list[FinishEvent], choices: int, now: float
) -> RequestStats:
    reasons = [end.reason for end in ends]
    worst = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)
    last = max(progress.last_tokens.values(), default=None)
    return RequestStats(
        request_id=request_id,
        finish_reason=next(reason for reason in worst if reason in reasons),
        num_prompt_tokens=max(end.num_prompt_tokens for end in ends),
        num_cached_tokens=max(end.num_cached_tokens for end in ends),
        num_generated_tokens=sum(end.num_generated_tokens for end in ends),
        num_preemptions=sum(end.num_preemptions for end in ends),
        n=choices,
        max_tokens=progress.max_tokens,
        arrival=progress.arrival,
        scheduled=progress.scheduled,
        first_token=progress.first_token,
        last_token=last,
        finished=now,
        inter_token_s=tuple(progress.gaps),
        longest_choice=max(end.num_generated_tokens for end in ends),
    )
