"""Serve an application from a thread, on a free port."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn

T = TypeVar("T")


def in_loop(build: Callable[[], T]) -> T:
    """``build()`` inside an event loop: outside of one, Gradio makes loops that it never closes."""

    async def run() -> T:
        return build()

    with ThreadPoolExecutor(1) as pool:  # Playwright has a loop of its own in this thread
        return pool.submit(lambda: asyncio.run(run())).result()


def free_socket() -> socket.socket:
    """A listening socket on a free loopback port."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


def free_port() -> int:
    """A loopback port that was free a moment ago, for a process of its own."""
    with free_socket() as sock:
        port: int = sock.getsockname()[1]
    return port


@contextmanager
def serving(app: Any, sock: socket.socket) -> Iterator[str]:
    """Serve ``app`` on ``sock`` while the block runs; gives its URL."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        sock.close()
