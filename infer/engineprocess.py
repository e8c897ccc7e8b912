"""The engine process: ``python -m infer.engineprocess FD``, started by ``infer.transport``."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import msgspec

from infer import wire
from infer.client import Engine, Look
from infer.engineloop import Inbox, Output, Stop, drive

logger = logging.getLogger(__name__)

ORPHAN_GRACE_S = 10.0
CHUNK = 1 << 18


def main(descriptor: int) -> int:
    """Serve one engine over the socket ``descriptor`` until told to stop or left alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    connection = socket.socket(fileno=descriptor)
    inbox = Inbox()
    messages = _messages(connection)
    start = next(messages, None)
    if not isinstance(start, wire.Start):
        return 1
    writer = _Writer(connection)
    try:
        engine = _build(start)
    except Exception as error:
        logger.exception("the engine could not be made")
        writer.close(wire.Failed(wire.ErrorMessage.of(error)))
        return 1
    reader = threading.Thread(
        target=_read, args=(messages, inbox, engine.look, writer), name="reader", daemon=True
    )
    reader.start()
    writer.put(wire.Ready(engine.info))
    gc.collect()
    gc.freeze()  # what start-up made lives as long as the process: collections need not look at it

    def emit(output: Output) -> None:
        writer.put(wire.output_message(output))

    try:
        drive(engine.transitions, engine.model, engine.state, inbox, emit)
    except Exception as error:
        logger.exception("the engine failed")
        writer.close(wire.Failed(wire.ErrorMessage.of(error)))
        return 1
    writer.close(wire.Ended())
    return 0


def _build(start: wire.Start) -> Engine:
    module, _, function = start.builder.partition(":")
    engine = getattr(importlib.import_module(module), function)(start.options)
    assert isinstance(engine, Engine)
    return engine


def _messages(connection: socket.socket) -> Iterator[wire.ToEngine]:
    frames = wire.Frames()
    decoder = msgspec.msgpack.Decoder(wire.ToEngine)
    while data := connection.recv(CHUNK):
        for payload in frames.feed(data):
            yield decoder.decode(payload)


def _read(
    messages: Iterator[wire.ToEngine], inbox: Inbox, look: Look | None, writer: _Writer
) -> None:
    """Fill the inbox until the server is gone; then stop, with or without the loop's help."""
    try:
        for message in messages:
            if isinstance(message, wire.LookMessage):
                writer.put(_seen(message, look))
            else:
                inbox.put(wire.message_command(message))
    except OSError:
        pass
    except Exception:
        logger.exception("the server sent something unreadable")
    inbox.put(Stop())
    timer = threading.Timer(ORPHAN_GRACE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _seen(message: wire.LookMessage, look: Look | None) -> wire.SeenMessage:
    """A look costs the engine's loop nothing but its turn of the interpreter."""
    try:
        return wire.SeenMessage(message.number, None if look is None else look(message.step))
    except Exception:  # who watches must never stop what is watched
        logger.exception("the engine's steps could not be told")
        return wire.SeenMessage(message.number, None)


class _Writer:
    """Sends in a thread, so that a server that is busy never holds up a step."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._queue: SimpleQueue[wire.FromEngine | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, message: wire.FromEngine) -> None:
        self._queue.put(message)

    def close(self, last: wire.FromEngine) -> None:
        """Send ``last`` and everything before it, then close."""
        self._queue.put(last)
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        ended = False
        while not ended:
            messages = [self._queue.get()]
            while True:
                try:
                    messages.append(self._queue.get_nowait())
                except Empty:
                    break
            ended = messages[-1] is None
            data = b"".join(wire.frame(m) for m in messages if m is not None)
            try:
                self._connection.sendall(data)
            except OSError:
                return  # the server is gone; the reader has seen it too
        self._connection.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
