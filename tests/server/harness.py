"""A real server on a free port, over the fake engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn

from infer.client import Engine, LinkedClient, start_thread
from infer.server.app import create_app
from infer.server.config import ServerConfig
from infer.tokenizer import Tokenizer
from infer.types import FailureKind, Observer, RejectionKind, RequestStats, StepStats
from tests.server.fakes import FakeModel, fake_engine, fake_tokenizer

T = TypeVar("T")


class Notes:
    """An observer that writes everything down, and lets a test wait for what it looks for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.steps: list[StepStats] = []
        self.first: list[tuple[str, float]] = []
        self.requests: list[RequestStats] = []
        self.rejections: list[RejectionKind] = []
        self.failures: list[FailureKind] = []

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Block until ``ready()``, which is asked after every note."""
        with self._changed:
            assert self._changed.wait_for(ready, timeout=20)

    def _note(self, notes: list[T], note: T) -> None:
        with self._changed:
            notes.append(note)
            self._changed.notify_all()

    def on_step(self, stats: StepStats) -> None:
        self._note(self.steps, stats)

    def on_first_token(self, request_id: str, ttft_s: float) -> None:
        self._note(self.first, (request_id, ttft_s))

    def on_request(self, stats: RequestStats) -> None:
        self._note(self.requests, stats)

    def on_rejection(self, kind: RejectionKind) -> None:
        self._note(self.rejections, kind)

    def on_failure(self, kind: FailureKind) -> None:
        self._note(self.failures, kind)


@dataclass
class Running:
    """A server that answers."""

    url: str
    port: int
    client: LinkedClient
    notes: Notes
    model: FakeModel
    loop: asyncio.AbstractEventLoop
    key: str | None
    tokenizer: Tokenizer


@contextmanager
def serving(
    model: FakeModel | None = None,
    *,
    build: Callable[[], Engine] | None = None,
    tokenizer: Tokenizer | None = None,
    send_buffer: int | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Serve a fake engine over ``model``, or the engine and tokenizer that are given.

    The server has a thread of its own and a free port of the loopback address. ``send_buffer``:
    bytes that the system keeps for a client that does not read.
    """
    model = model or FakeModel()
    make = build or (lambda: fake_engine(model))
    words = tokenizer or fake_tokenizer()
    notes = Notes()
    config = ServerConfig(port=0, **options)
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:  # connections inherit it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    ready: list[Running] = []
    failures: list[BaseException] = []
    started = threading.Event()
    stop = threading.Event()

    async def main() -> None:
        client = await start_thread(make, [notes], step_timeout=config.step_timeout)
        observers: list[Observer] = [notes]
        app = create_app(client, words, config, observers=observers)
        server = _Server(
            uvicorn.Config(app, http="h11", log_config=None, access_log=False, ws="none")
        )
        serve = asyncio.ensure_future(server.serve([listener]))
        await server.answers.wait()
        port = listener.getsockname()[1]
        ready.append(
            Running(
                f"http://127.0.0.1:{port}",
                port,
                client,
                notes,
                model,
                asyncio.get_running_loop(),
                config.api_key,
                words,
            )
        )
        started.set()
        await asyncio.to_thread(stop.wait)
        model.gate.open()
        await client.shutdown(0)
        server.should_exit = True
        await serve

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name="server", daemon=True)
    thread.start()
    assert started.wait(120)
    if failures:
        raise failures[0]
    try:
        yield ready[0]
    finally:
        stop.set()
        thread.join(20)
        listener.close()
        assert not thread.is_alive()
        assert not failures


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answers = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answers.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
