"""How everything outside the step loop reaches an engine: a protocol and its in-process transport.

``start_thread`` runs the loop in a thread of this process; ``infer.transport.start_process`` runs
it in a process of its own. Both give the same ``EngineClient``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from infer.engineloop import Command, Inbox, Output, Stop, Transitions, drive
from infer.errors import EngineError
from infer.streams import STEP_TIMEOUT_S, Desk, RequestStream
from infer.types import EngineInfo, FailureKind, Observer, Request, StepStats

logger = logging.getLogger(__name__)

Look = Callable[[int | None], str]  # a step's number, None for the newest -> JSON for who watches
STOP_GRACE_S = 10.0  # for the steps in flight, after the last request has ended


@dataclass(frozen=True, slots=True)
class Health:
    """Whether an engine answers requests; if not, why."""

    ok: bool
    cause: str | None = None


class EngineClient(Protocol):
    """An engine as its front ends see it. One event loop uses it; nothing here blocks that loop."""

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""

    @property
    def stats(self) -> StepStats | None:
        """The latest step's statistics; None before the first."""

    @property
    def health(self) -> Health:
        """Ready, or the reason why not."""

    def generate(self, request: Request, *, arrival: float | None = None) -> RequestStream:
        """Run a request; ``arrival`` is when it was received (monotonic seconds), default now.

        Use it as ``async with client.generate(request) as stream: async for events in stream``:
        leaving the block aborts what still runs.

        Raises:
            EngineUnavailable: the engine is dead or stopping.
        """

    def add_observer(self, observer: Observer) -> None:
        """Tell ``observer`` of every step and request from now on."""

    def abort(self, request_id: str) -> None:
        """End a request; its stream gets ``FinishEvent(reason=ABORT)``. Idempotent."""

    async def look(self, step: int | None = None) -> str:
        """The last steps, and step ``step`` or the newest in detail, as JSON.

        Raises:
            EngineError: the engine is not watched, or does not answer.
        """

    async def shutdown(self, deadline: float) -> None:
        """Refuse new requests, let open ones finish for ``deadline`` seconds, abort the rest and
        free the engine. Idempotent; a second call with a shorter deadline hastens the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Everything the loop needs, complete: what a ``build`` callable makes inside its thread."""

    transitions: Transitions
    model: Any
    state: Any
    info: EngineInfo
    look: Look | None = None  # any thread may call it


class Link(Protocol):
    """The way to a running loop."""

    def send(self, command: Command) -> None:
        """Hand over a command; never blocks."""

    async def join(self, deadline: float) -> bool:
        """Wait for the loop's end; whether it came within ``deadline`` seconds."""

    async def look(self, step: int | None) -> str | None:
        """What the engine's ``look`` says; None when nobody watches it."""


class LinkedClient:
    """An ``EngineClient`` over a desk and a link; both transports make one."""

    def __init__(self, desk: Desk, link: Link, info: EngineInfo) -> None:
        self._desk = desk
        self._link = link
        self._info = info

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""
        return self._info

    @property
    def stats(self) -> StepStats | None:
        """The latest step's statistics; None before the first."""
        return self._desk.last_step

    @property
    def health(self) -> Health:
        """Ready, or the reason why not."""
        if self._desk.failure is not None:
            return Health(False, self._desk.failure)
        if self._desk.closed:
            return Health(False, "the engine is stopping")
        return Health(True)

    def generate(self, request: Request, *, arrival: float | None = None) -> RequestStream:
        """Run a request; see ``EngineClient.generate``."""
        return self._desk.open(request, arrival)

    def add_observer(self, observer: Observer) -> None:
        """Tell ``observer`` of every step and request from now on."""
        self._desk.add_observer(observer)

    def abort(self, request_id: str) -> None:
        """End a request; see ``EngineClient.abort``."""
        self._desk.abort(request_id)

    async def look(self, step: int | None = None) -> str:
        """The last steps as JSON; see ``EngineClient.look``."""
        seen = await self._link.look(step)
        if seen is None:
            raise EngineError("this engine's steps are not watched; start it with its pages")
        return seen

    async def shutdown(self, deadline: float) -> None:
        """Stop in order; see ``EngineClient.shutdown``."""
        self._desk.close()
        if not await self._desk.drained(deadline):
            self._desk.abort_all()
        self._link.send(Stop())
        if not await self._link.join(STOP_GRACE_S):
            logger.warning("the engine did not stop within %.0f s; leaving it", STOP_GRACE_S)


class _ThreadLink:
    """A loop in a daemon thread, so that an engine that hangs cannot keep the process alive."""

    def __init__(self, inbox: Inbox, ended: asyncio.Event) -> None:
        self._inbox = inbox
        self._ended = ended
        self.watcher: Look | None = None

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    async def join(self, deadline: float) -> bool:
        try:
            await asyncio.wait_for(self._ended.wait(), deadline)
        except TimeoutError:
            return False
        return True

    async def look(self, step: int | None) -> str | None:
        return None if self.watcher is None else await asyncio.to_thread(self.watcher, step)


async def start_thread(
    build: Callable[[], Engine],
    observers: Iterable[Observer] = (),
    *,
    step_timeout: float = STEP_TIMEOUT_S,
) -> LinkedClient:
    """Run an engine in a thread of this process.

    ``build`` is called in that thread (a CUDA context, inference mode and the state's owner belong
    to one thread). An engine that has requests and finishes no step for ``step_timeout`` seconds
    counts as failed; its thread, which nothing can end, is left alone.

    Raises:
        Exception: whatever ``build`` raised.
    """
    loop = asyncio.get_running_loop()
    inbox = Inbox()
    ended = asyncio.Event()
    link = _ThreadLink(inbox, ended)
    desk = Desk(inbox.put, observers, step_timeout)
    ready: asyncio.Future[EngineInfo] = loop.create_future()

    def post(call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is gone: nobody to tell
            loop.call_soon_threadsafe(call, *arguments)

    def emit(output: Output) -> None:
        loop.call_soon_threadsafe(desk.deliver, output)

    def main() -> None:
        try:
            engine = build()
        except BaseException as error:
            post(_settle, ready, error)
            return
        link.watcher = engine.look
        post(_settle, ready, engine.info)
        try:
            drive(engine.transitions, engine.model, engine.state, inbox, emit)
        except BaseException as error:
            logger.exception("the engine thread failed")
            post(desk.fail, f"{type(error).__name__}: {error}", FailureKind.ENGINE)
        finally:
            del engine  # the state's memory goes before the thread is reported ended
            post(ended.set)

    threading.Thread(target=main, name="engine", daemon=True).start()
    try:
        info = await ready
    except BaseException:
        inbox.put(Stop())  # for an engine that is made after nobody waits for it any more
        raise
    return LinkedClient(desk, link, info)


def _settle(future: asyncio.Future[EngineInfo], result: EngineInfo | BaseException) -> None:
    if future.done():  # the starter was cancelled
        return
    if isinstance(result, EngineInfo):
        future.set_result(result)
    elif isinstance(result, Exception):
        future.set_exception(result)
    else:  # SystemExit and the like may not travel through a future
        future.set_exception(EngineError(f"the engine did not start: {result!r}"))
