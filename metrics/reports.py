"""Request statistics from step reports, for scripts that drive the step API themselves.

A server's front end knows its requests and makes their ``RequestStats`` itself. A script has only
the reports; this module follows the events in them, in the background like all folding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from infer.types import FailureKind, FinishEvent, FinishReason, RequestStats, TokenEvent
from metrics.observations import FirstToken, Report, Submitted, Told


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


class ReportFollower:
    """Turns reports into observations. Not thread-safe; its owner holds a lock."""

    __slots__ = ("_running",)

    def __init__(self) -> None:
        self._running: dict[str, _Progress] = {}

    def submitted(self, told: Submitted) -> None:
        """Note a request's arrival.

        A request that was not told counts from the start of the step that first ran it: its queue
        time is then 0.
        """
        params = told.request.params
        self._running[told.request.request_id] = _Progress(
            told.arrival, params.n, params.max_tokens
        )

    def follow(self, report: Report) -> Iterator[Told]:
        """What one report tells; each report once, in order."""
        stats = report.stats
        yield stats
        start = stats.time - stats.host_s - stats.device_s
        for request_id in stats.first_token_ids:
            self._progress(request_id, start).scheduled = start
        events = tuple(report.events)
        for event in events:
            if isinstance(event, TokenEvent):
                yield from self._token(event, stats.time, start)
            elif isinstance(event, FinishEvent):
                self._progress(event.request_id, start).finished[event.index] = event
        for event in events:
            if isinstance(event, FinishEvent):
                yield from self._end_if_complete(event.request_id, stats.time)

    def _progress(self, request_id: str, start: float) -> _Progress:
        if request_id not in self._running:
            self._running[request_id] = _Progress(start, None, None)
        return self._running[request_id]

    def _token(self, event: TokenEvent, now: float, start: float) -> Iterator[Told]:
        progress = self._progress(event.request_id, start)
        if progress.first_token is None:
            progress.first_token = now
            progress.scheduled = start if progress.scheduled is None else progress.scheduled
            yield FirstToken(event.request_id, now - progress.arrival)
        previous = progress.last_tokens.get(event.index)
        if previous is not None:
            progress.gaps.append(now - previous)
        progress.last_tokens[event.index] = now

    def _end_if_complete(self, request_id: str, now: float) -> Iterator[Told]:
        progress = self._running.get(request_id)
        if progress is None:
            return  # an earlier event of this report ended it
        choices = progress.n or len(progress.finished.keys() | progress.last_tokens.keys())
        ends = list(progress.finished.values())
        whole = any(end.reason in (FinishReason.ABORT, FinishReason.ERROR) for end in ends)
        if len(ends) < choices and not whole:
            return
        del self._running[request_id]
        yield _request_stats(request_id, progress, ends, choices, now)
        if any(end.reason is FinishReason.ERROR for end in ends):
            yield FailureKind.ENGINE


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
