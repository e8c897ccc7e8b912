"""The loop that owns an engine state: commands come in, steps run, outputs go out.

It knows nothing of event loops, sockets or text. A transport (``infer.client`` in a thread,
``infer.transport`` in a process of its own) puts commands into an ``Inbox`` and gets one ``Output``
a step through ``emit``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from infer.errors import EngineError, InferError
from infer.types import Event, Request, StepStats

CHECK_EVERY_S = 1.0  # while idle

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
    """End the loop."""


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
    def events(self) -> tuple[Event, ...]: ...

    @property
    def stats(self) -> StepStats: ...


Advance = Callable[[Any, Any, tuple[Any, ...]], tuple[Any, tuple[Any, ...], Sequence[Report]]]


@dataclass(frozen=True, slots=True)
class Transitions:
    """The state transitions the loop calls; the engine's own, or those of a test.

    ``submit(state, request) -> state`` and ``abort(state, request_id) -> state``;
    ``has_work(state)``; ``advance(model, state, tickets) -> (state, tickets, reports)`` launches
    a step and collects those that are due, as ``infer.llm.advance`` does; ``check(model)`` raises
    when an engine that has nothing to do has failed all the same: one of its processes died.
    """

    submit: Callable[[Any, Request], Any]
    abort: Callable[[Any, str], Any]
    has_work: Callable[[Any], bool]
    advance: Advance
    check: Callable[[Any], None] = lambda model: None


class Inbox:
    """Commands for one loop, from any thread."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Command] = SimpleQueue()

    def put(self, command: Command) -> None:
        """Add a command; wakes a loop that is idle."""
        self._commands.put(command)

    def drain(self, *, wait: float) -> list[Command]:
        """Take what has arrived; block for at most ``wait`` seconds until there is something."""
        taken: list[Command] = []
        try:
            if wait > 0:
                taken.append(self._commands.get(timeout=wait))
            while True:
                taken.append(self._commands.get_nowait())
        except Empty:
            return taken


def drive(
    transitions: Transitions,
    model: Any,
    state: Any,
    inbox: Inbox,
    emit: Callable[[Output], None],
) -> None:
    """Step ``state`` until a ``Stop`` arrives. When there is nothing to run, sleep in the inbox.

    ``Stop`` drops what still runs: whoever sends it has ended the requests. Errors of a transition
    are raised: whoever runs the loop tells the front end.
    """
    tickets: tuple[Any, ...] = ()
    while True:
        idle = not tickets and not transitions.has_work(state)
        commands = inbox.drain(wait=CHECK_EVERY_S if idle else 0.0)
        if idle:
            transitions.check(model)
        state, refusals, stop = _apply(transitions, state, commands)
        if refusals:
            emit(Output(refusals=refusals))
        if stop:
            return
        if tickets or transitions.has_work(state):
            state, tickets, reports = transitions.advance(model, state, tickets)
            for report in reports:
                emit(Output(events=report.events, stats=report.stats))


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
