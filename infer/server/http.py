"""Between ASGI and the routes: bodies in, answers out that end when the client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from infer.server.config import ServerConfig
from infer.server.errors import ApiError, bad_request
from infer.server.workers import TextPool

Body = TypeVar("Body", bound=BaseModel)

LARGE_BODY = 64 << 10  # bytes; above it, parsing leaves the event loop


@dataclass(slots=True)
class Record:
    """What the log line of a request says; filled in while the request is answered."""

    request_id: str
    arrival: float  # monotonic seconds
    status: int | None = None  # None: the client left before an answer began
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    first_token: float | None = None  # monotonic seconds
    finish: str | None = None
    generates: bool = False  # asks for an answer of the model, so that a refusal counts
    error: str | None = None


def new_record(request_id: str) -> Record:
    """A record of a request that arrives now."""
    return Record(request_id, time.monotonic())


def record_of(request: Request) -> Record:
    """The record that the middleware made for this request."""
    record: Record = request.state.record
    return record


async def read_body(
    request: Request, model: type[Body], config: ServerConfig, pool: TextPool
) -> Body:
    """Receive, parse and check a JSON body.

    Strict JSON: no NaN or Infinity, no lone surrogates, valid UTF-8.

    Raises:
        ApiError: 400, 408, 413 or 415.
        ValidationError: the document does not fit ``model``.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        # Browsers send other types across origins without asking first.
        raise ApiError(415, f"content-type is {kind!r}, it must be application/json")
    try:
        async with asyncio.timeout(config.body_timeout):
            data = await _receive(request, config.max_body_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {config.body_timeout:g} s", kind="timeout_error"
        ) from None
    if len(data) > LARGE_BODY:
        return await pool.run(lambda: parse(data, model))
    return parse(data, model)


def parse(data: bytes, model: type[Body]) -> Body:
    """Parse a JSON document into ``model``; errors as for ``read_body``."""
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise bad_request("the body must be a JSON object")
    return model.model_validate(document)


async def _receive(request: Request, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise too_large(limit)
        pieces.append(piece)
    return b"".join(pieces)


def too_large(limit: int) -> ApiError:
    """The answer to a body over the limit."""
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(
        413, f"the body has more than {limit} bytes, the limit", headers={"Connection": "close"}
    )


class Unsent(Response):
    """The response to a client that has left: nothing is sent, and it is nobody's fault."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing."""


class Answer(Response):
    """A response whose work is cancelled as soon as the client disconnects.

    ``work(send)`` sends the whole answer. Errors it raises before it sent anything reach the
    application's error handlers.
    """

    def __init__(self, work: Callable[[Send], Awaitable[None]], record: Record) -> None:
        super().__init__()
        self._work = work
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = not work.done()
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if left:
            self._record.finish = "disconnect"
            return
        try:
            work.result()
        except ClientDisconnect:
            self._record.finish = "disconnect"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, content: Any, status: int = 200) -> None:
    """Send a whole JSON answer."""
    body = msgspec.json.encode(content)
    start: Message = {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})


class EventWriter:
    """Server-sent events; the response begins with the first of them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, documents: list[Any]) -> None:
        """Send documents as one write: what arrived together leaves together."""
        if documents:
            await self._write(b"".join(_event(msgspec.json.encode(d)) for d in documents))

    async def done(self) -> None:
        """End the stream as OpenAI does."""
        await self._write(_event(b"[DONE]"))
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: ApiError) -> None:
        """End the stream with an error event."""
        await self._write(_event(msgspec.json.encode(error.body())) + _event(b"[DONE]"))
        await self._send({"type": "http.response.body", "body": b""})

    async def _write(self, body: bytes) -> None:
        if not self.started:
            self.started = True
            await self._send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [
                        (b"content-type", b"text/event-stream; charset=utf-8"),
                        (b"cache-control", b"no-cache"),
                        (b"x-accel-buffering", b"no"),  # proxies pass each event on at once
                    ],
                }
            )
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
