"""The loop that owns an engine state: commands come in, steps run, outputs go out.

It knows nothing of event loops, sockets or text. A transport (``infer.client`` in a thread,
``infer.transport`` in a process of its own) puts commands into an ``Inbox`` and gets one ``Output``
a step through ``emit``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from infer.errors import EngineError, InferError
from infer.types import Event, Request, StepStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a request, wherever it is; an unknown id is ignored (it may just have finished)."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop after the steps that are in flight."""


Command = Submit | Abort | Stop


@dataclass(frozen=True, slots=True)
class Refusal:
    """A submitted request that the engine did not take, and why."""

    request_id: str
    error: InferError


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What one turn of the loop tells its front end."""

    events: tuple[Event, ...] = ()
    stats: StepStats | None = None
    refusals: tuple[Refusal, ...] = ()


class Report(Protocol):
    """The part of a step's report that leaves the engine."""

    @property
    def events(self) -> Iterable[Event]: ...

    @property
    def stats(self) -> StepStats: ...


@dataclass(frozen=True, slots=True)
class Transitions:
    """The state transitions the loop calls; the engine's own, or those of a test.

    ``submit(state, request) -> state`` and ``abort(state, request_id) -> state``;
    ``has_work(state)``; ``launch(model, state) -> (state, ticket)``;
    ``collect(model, state, ticket) -> (state, report)``.
    """

    submit: Callable[[Any, Request], Any]
    abort: Callable[[Any, str], Any]
    has_work: Callable[[Any], bool]
    launch: Callable[[Any, Any], tuple[Any, Any]]
    collect: Callable[[Any, Any, Any], tuple[Any, Report]]


class Inbox:
    """Commands for one loop, from any thread."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Command] = SimpleQueue()

    def put(self, command: Command) -> None:
        """Add a command; wakes a loop that is idle."""
        self._commands.put(command)

    def drain(self, *, wait: bool) -> list[Command]:
        """Take what has arrived; with ``wait``, block until there is something."""
        taken: list[Command] = []
        if wait:
            taken.append(self._commands.get())
        while True:
            try:
                taken.append(self._commands.get_nowait())
            except Empty:
                return taken


def drive(
    transitions: Transitions,
    model: Any,
    state: Any,
    inbox: Inbox,
    emit: Callable[[Output], None],
    *,
    depth: int,
) -> Any:
    """Step ``state`` until a ``Stop`` arrives; returns the last state, with nothing in flight.

    ``depth`` steps are launched ahead of the one whose tokens are read. When nothing is left to
    run, the loop sleeps in ``inbox.drain``. Errors of a transition are raised: whoever runs the
    loop tells the front end.
    """
    in_flight: deque[Any] = deque()
    stopping = False
    while not stopping or in_flight:
        idle = not in_flight and not stopping and not transitions.has_work(state)
        state, refusals, stopped = _apply(transitions, state, inbox.drain(wait=idle))
        stopping = stopping or stopped
        if refusals:
            emit(Output(refusals=refusals))
        runnable = not stopping and transitions.has_work(state)
        if runnable:
            state, ticket = transitions.launch(model, state)
            in_flight.append(ticket)
        if in_flight and (len(in_flight) > depth or not runnable):
            state, report = transitions.collect(model, state, in_flight.popleft())
            emit(Output(events=tuple(report.events), stats=report.stats))
    return state


def _apply(
    transitions: Transitions, state: Any, commands: list[Command]
) -> tuple[Any, tuple[Refusal, ...], bool]:
    """Apply commands in order: (state, refused submits, whether to stop)."""
    refusals: list[Refusal] = []
    stop = False
    for command in commands:
        match command:
            case Submit(request):
                try:
                    state = transitions.submit(state, request)
                except InferError as error:
                    refusals.append(Refusal(request.request_id, error))
                except Exception as error:
                    # The state is a value: a failed submit left it as it was, so that one
                    # request's fault stays its own.
                    logger.exception("submit failed for request %s", request.request_id)
                    failure = EngineError(f"submit failed: {type(error).__name__}: {error}")
                    refusals.append(Refusal(request.request_id, failure))
            case Abort(request_id):
                state = transitions.abort(state, request_id)
            case Stop():
                stop = True
    return state, tuple(refusals), stop
