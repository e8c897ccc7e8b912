"""The front end's side of an engine: one stream of events a request, and what observers are told.

Everything here runs on one event loop and never waits for a reader: a reader that is slow finds all
that has arrived in its next turn, and what can pile up is bounded by the tokens of its request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from infer.engineloop import Abort, Command, Output, Submit
from infer.errors import EngineError, EngineUnavailable, InferError, RequestError
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

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 300.0  # a step that takes longer is taken for one that hangs

# The gravest reason among a request's choices is the request's own.
_GRAVITY = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)


class RequestStream:
    """The events of one request, oldest first. Each turn yields everything that has arrived.

    Leaving ``async with`` (or ``close``) aborts what still runs. Iterating raises the engine's
    refusal of the request, or ``EngineError`` when the engine ended under it.
    """

    def __init__(self, desk: Desk, request: Request, arrival: float) -> None:
        self.request = request
        self._desk = desk
        self._buffer: list[Event] = []
        self._wake: asyncio.Future[None] | None = None
        self._error: InferError | None = None
        self._arrival = arrival
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._last_token = [0.0] * request.params.n
        self._gaps: list[float] = []
        self._num_tokens = [0] * request.params.n
        self._finishes: dict[int, FinishEvent] = {}
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[Event, ...]:
        while not self._buffer:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        events = tuple(self._buffer)
        self._buffer.clear()
        return events

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort the request if it still runs. Idempotent."""
        self._desk.abort(self.request.request_id)

    def stats(self, now: float) -> RequestStats:
        """What is known of the request, as of ``now``."""
        finishes = self._finishes.values()
        reasons = {finish.reason for finish in finishes}
        if self._error is not None:
            reasons = {FinishReason.ERROR}
        return RequestStats(
            request_id=self.request.request_id,
            finish_reason=next((r for r in _GRAVITY if r in reasons), FinishReason.ABORT),
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=max((f.num_cached_tokens for f in finishes), default=0),
            num_generated_tokens=sum(self._num_tokens),
            num_preemptions=sum(f.num_preemptions for f in finishes),
            n=self.request.params.n,
            max_tokens=self.request.params.max_tokens,
            arrival=self._arrival,
            scheduled=self._scheduled,
            first_token=self._first_token,
            last_token=None if self._first_token is None else max(self._last_token),
            finished=now,
            inter_token_s=tuple(self._gaps),
            longest_choice=max(self._num_tokens),
        )

    # What follows is the desk's side.

    def scheduled(self, when: float) -> None:
        """The first step that runs the request began at ``when``."""
        if self._scheduled is None:
            self._scheduled = max(self._arrival, when)

    def first(self, now: float) -> float | None:
        """Seconds from arrival to the first token, when it has just arrived; else None."""
        if self._first_token is not None or not any(self._num_tokens):
            return None
        self._first_token = now
        return now - self._arrival

    def put(self, event: Event, now: float) -> bool:
        """Add an event; whether it was the request's last."""
        if isinstance(event, TokenEvent):
            self._num_tokens[event.index] += 1
            before = self._last_token[event.index]
            if before:
                self._gaps.append(now - before)
            self._last_token[event.index] = now
        elif isinstance(event, FinishEvent):
            self._finishes[event.index] = event
            self._ended = len(self._finishes) == self.request.params.n
        self._buffer.append(event)
        return self._ended

    def abort_open_choices(self, now: float) -> None:
        """End the choices that still run with ``ABORT``."""
        for index in range(self.request.params.n):
            if index not in self._finishes:
                self.put(
                    FinishEvent(
                        request_id=self.request.request_id,
                        index=index,
                        reason=FinishReason.ABORT,
                        num_prompt_tokens=len(self.request.prompt_token_ids),
                        num_generated_tokens=self._num_tokens[index],
                    ),
                    now,
                )

    def fail(self, error: InferError) -> None:
        """End the stream with an error, after the events that came before it."""
        self._error = error

    def wake(self) -> None:
        """Let the reader run."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class Desk:
    """All open requests of one engine: outputs come in, streams and observers get their part.

    An engine that has requests and says nothing for ``step_timeout`` seconds is taken for dead.
    """

    def __init__(
        self,
        send: Callable[[Command], None],
        observers: Iterable[Observer],
        step_timeout: float = STEP_TIMEOUT_S,
    ) -> None:
        self._send = send
        self._observers = tuple(observers)
        self._step_timeout = step_timeout
        self._alarm: asyncio.TimerHandle | None = None
        self._streams: dict[str, RequestStream] = {}
        self._drained = asyncio.Event()
        self._drained.set()
        self._failure: str | None = None
        self._last_sign = 0.0  # monotonic seconds of the latest output, or of the first request
        self._closed = False
        self.last_step: StepStats | None = None

    def add_observer(self, observer: Observer) -> None:
        """Tell one more observer from now on."""
        self._observers = (*self._observers, observer)

    @property
    def failure(self) -> str | None:
        """Why the engine died; None while it lives."""
        return self._failure

    @property
    def closed(self) -> bool:
        """Whether new requests are refused because the engine is stopping."""
        return self._closed

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def open(self, request: Request, arrival: float | None) -> RequestStream:
        """Send a request to the engine.

        Raises:
            EngineUnavailable: the engine is dead or stopping.
            RequestError: the id is in use.
        """
        if self._failure is not None:
            raise EngineUnavailable(f"the engine has failed: {self._failure}; restart it")
        if self._closed:
            raise EngineUnavailable("the engine is stopping and takes no new requests")
        if request.request_id in self._streams:
            raise RequestError(
                f"request_id {request.request_id!r} is in use; choose another", param="request_id"
            )
        now = time.monotonic()
        stream = RequestStream(self, request, now if arrival is None else arrival)
        if not self._streams:
            self._last_sign = now
        self._streams[request.request_id] = stream
        self._drained.clear()
        self._send(Submit(request))
        if self._alarm is None:
            self._set_alarm(self._step_timeout)
        return stream

    def deliver(self, output: Output) -> None:
        """Hand out one step's output: one call, one clock reading, one wake-up a reader."""
        try:
            self._deliver(output)
        except Exception as error:
            logger.exception("an output could not be handed out")
            self.fail(f"an output could not be handed out: {error!r}", FailureKind.INTERNAL)

    def _deliver(self, output: Output) -> None:
        now = self._last_sign = time.monotonic()
        stats = output.stats
        if stats is not None:
            self.last_step = stats
            began = now - stats.host_s - stats.device_s
            for request_id in stats.first_token_ids:
                if (stream := self._streams.get(request_id)) is not None:
                    stream.scheduled(began)
        touched: dict[str, RequestStream] = {}
        ended: list[RequestStream] = []
        for event in output.events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue  # aborted here; the engine did not know yet
            touched[event.request_id] = stream
            if stream.put(event, now):
                ended.append(stream)
        for refusal in output.refusals:
            stream = self._streams.get(refusal.request_id)
            if stream is not None:
                self._refuse(stream, refusal.error)
        for stream in touched.values():
            if (ttft := stream.first(now)) is not None:
                self._tell_first(stream.request.request_id, ttft)
        for stream in ended:
            self._end(stream, now)
        for stream in touched.values():
            stream.wake()
        if stats is not None:
            self._tell(lambda observer: observer.on_step(stats))

    def abort(self, request_id: str) -> None:
        """End a request now and tell the engine. Unknown or ended ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._send(Abort(request_id))
        now = time.monotonic()
        stream.abort_open_choices(now)
        self._end(stream, now)
        stream.wake()

    def close(self) -> None:
        """Refuse new requests from now on."""
        self._closed = True

    async def drained(self, deadline: float) -> bool:
        """Wait until no request is open; whether that happened within ``deadline`` seconds."""
        try:
            await asyncio.wait_for(self._drained.wait(), deadline)
        except TimeoutError:
            return False
        return True

    def abort_all(self) -> None:
        """End every open request."""
        for request_id in list(self._streams):
            self.abort(request_id)

    def fail(self, cause: str, kind: FailureKind) -> None:
        """The engine died: every open request ends with an error. The first cause counts."""
        if self._failure is not None:
            return
        self._failure = cause
        now = time.monotonic()
        for stream in list(self._streams.values()):
            stream.fail(EngineError(f"the engine failed while it ran the request: {cause}"))
            self._end(stream, now)
            stream.wake()
            self._tell(lambda observer: observer.on_failure(kind))

    def _set_alarm(self, seconds: float) -> None:
        self._alarm = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        """Fail an engine that has been silent for too long; look again while it has requests."""
        self._alarm = None
        if not self._streams:
            return
        silent = time.monotonic() - self._last_sign
        if silent < self._step_timeout:
            self._set_alarm(self._step_timeout - silent)
            return
        cause = f"no step for {silent:.3g} s with requests open; step_timeout is the limit"
        logger.error("%s", cause)
        self.fail(cause, FailureKind.WORKER)

    def _refuse(self, stream: RequestStream, error: InferError) -> None:
        stream.fail(error)
        self._forget(stream)
        stream.wake()

    def _tell_first(self, request_id: str, ttft: float) -> None:
        self._tell(lambda observer: observer.on_first_token(request_id, ttft))

    def _end(self, stream: RequestStream, now: float) -> None:
        self._forget(stream)
        stats = stream.stats(now)
        self._tell(lambda observer: observer.on_request(stats))

    def _forget(self, stream: RequestStream) -> None:
        self._streams.pop(stream.request.request_id, None)
        if not self._streams:
            self._drained.set()

    def _tell(self, call: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                call(observer)
            except Exception:
                # An observer's fault must not end the requests it looks at.
                logger.exception("observer %s failed", type(observer).__name__)
