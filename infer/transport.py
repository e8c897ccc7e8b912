"""An engine in a process of its own: who serves does not share a GIL with who steps.

The two ends of a socket pair carry the frames of ``infer.wire``. Nobody else can reach it: it has
no name and no port.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from infer import wire
from infer.client import LinkedClient
from infer.engineloop import Command
from infer.errors import EngineError, EngineUnavailable
from infer.streams import STEP_TIMEOUT_S, Desk
from infer.types import EngineInfo, FailureKind, Observer

logger = logging.getLogger(__name__)

KILL_GRACE_S = 5.0
LOOK_S = 5.0
ENDED = "the engine process has ended"


async def start_process(
    builder: str,
    options: Mapping[str, Any],
    observers: Iterable[Observer] = (),
    *,
    step_timeout: float = STEP_TIMEOUT_S,
) -> LinkedClient:
    """Start an engine process and wait until its engine is made.

    ``builder`` names a function, ``module:function``, that gets ``options`` (JSON values) in the
    new process and returns an ``infer.client.Engine``. One that has requests and finishes no step
    for ``step_timeout`` seconds counts as failed; its process ends with the client's shutdown.

    Raises:
        InferError: what the builder raised; ``EngineError`` for errors that are not ours, or when
            the process ended.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        # Its own session: a terminal's Ctrl-C reaches the server, which stops the engine in order.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "infer.engineprocess",
            str(theirs.fileno()),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
    link = _ProcessLink(process)
    desk = Desk(link.send, observers, step_timeout)
    ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
    ours.setblocking(False)
    try:
        transport, _ = await asyncio.get_running_loop().create_unix_connection(
            lambda: _Protocol(desk, link, ready), sock=ours
        )
        transport.write(wire.frame(wire.Start(builder, dict(options))))
        info = await ready
    except BaseException:
        await link.kill()
        raise
    return LinkedClient(desk, link, info)


class _ProcessLink:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.transport: asyncio.WriteTransport | None = None
        self.ended = asyncio.Event()
        self._looks: dict[int, asyncio.Future[str | None]] = {}
        self._numbers = itertools.count()

    def send(self, command: Command) -> None:
        self._write(wire.command_message(command))

    async def look(self, step: int | None) -> str | None:
        if self.ended.is_set() or self.transport is None or self.transport.is_closing():
            raise EngineUnavailable(ENDED)
        number = next(self._numbers)
        answer = self._looks[number] = asyncio.get_running_loop().create_future()
        self._write(wire.LookMessage(number, step))
        try:
            return await asyncio.wait_for(answer, LOOK_S)
        except TimeoutError as error:
            text = f"the engine process did not tell its steps within {LOOK_S:.0f} s"
            raise EngineUnavailable(text) from error
        finally:
            del self._looks[number]

    def blind(self) -> None:
        """The process is gone: nobody will answer."""
        for answer in self._looks.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable(ENDED))

    def seen(self, message: wire.SeenMessage) -> None:
        """Hand an answer to who waits for it, if anybody still does."""
        answer = self._looks.get(message.number)
        if answer is not None and not answer.done():
            answer.set_result(message.text)

    def _write(self, message: wire.ToEngine) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(wire.frame(message))

    async def join(self, deadline: float) -> bool:
        try:
            await asyncio.wait_for(self.ended.wait(), deadline)
        except TimeoutError:
            await self.kill()
            return False
        await self._reap()
        return True

    async def kill(self) -> None:
        """End the process, whatever it does."""
        if self.transport is not None:
            self.transport.close()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def exit_code(self) -> int:
        """The exit code of a process whose end of the socket is closed."""
        await self._reap()
        code = self._process.returncode
        assert code is not None
        return code

    async def _reap(self) -> None:
        try:
            await asyncio.wait_for(self._process.wait(), KILL_GRACE_S)
        except TimeoutError:
            await self.kill()


class _Protocol(asyncio.Protocol):
    """Reads what the engine says; one call a chunk, all frames in it together."""

    def __init__(self, desk: Desk, link: _ProcessLink, ready: asyncio.Future[EngineInfo]) -> None:
        self._desk = desk
        self._link = link
        self._ready = ready
        self._frames = wire.Frames()
        self._decoder = msgspec.msgpack.Decoder(wire.FromEngine)
        self._said_goodbye = False
        self._obituary: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._link.transport = transport

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            self._take(self._decoder.decode(payload))

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.blind()
        if self._said_goodbye:
            self._link.ended.set()
        else:
            self._obituary = asyncio.ensure_future(self._died())

    def _take(self, message: wire.FromEngine) -> None:
        match message:
            case wire.OutputMessage():
                self._desk.deliver(wire.message_output(message))
            case wire.SeenMessage():
                self._link.seen(message)
            case wire.Ready(info):
                if not self._ready.done():
                    self._ready.set_result(info)
            case wire.Failed(error):
                self._said_goodbye = True
                if not self._ready.done():
                    self._ready.set_exception(error.error())
                else:
                    self._desk.fail(error.message, FailureKind.ENGINE)
            case wire.Ended():
                self._said_goodbye = True

    async def _died(self) -> None:
        code = await self._link.exit_code()
        cause = f"the engine process ended with exit code {code}"
        logger.error("%s", cause)
        if not self._ready.done():
            self._ready.set_exception(EngineError(f"{cause}; its output says why"))
        else:
            self._desk.fail(cause, FailureKind.WORKER)
        self._link.ended.set()
