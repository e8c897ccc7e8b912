"""In front of the page: headers, none of Gradio's routes for files, and no lost event.

Note [lost events]: the browser gets the results of its events through one stream, which the server
closes after the last result. An event that reaches the server just after that, while the browser
has not heard of it yet, would never be answered: the browser waits on a stream that is closed. So
the answer to every event says whether the stream is still open on this side, or how many there were
so far. If it is closed, and the browser has asked for no other since, ``static/page.js`` holds that
answer until the browser has seen the end of the old stream; then Gradio asks for a new one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from urllib.parse import parse_qs

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# 'unsafe-eval' is for Gradio's HTML component, which compiles its templates in the browser. What
# keeps an answer's links from leaking anything is img-src, connect-src and form-action.
CSP = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self'; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'none'"
)
# Nothing here is a file. Given an address, these fetch it for whoever asks, and look its name up
# at a public resolver.
FILE_ROUTES = ("/upload", "/file=", "/file/", "/proxy=", "/stream/")
JOIN, DATA = "/queue/join", "/queue/data"
# As the stream ends. In a result the same text would have its quotes escaped.
CLOSE = b'"msg":"close_stream"'
STREAM_HEADER = "x-event-stream"
MAX_SESSIONS = 4096  # whose streams are counted; the others only lose this protection


class _Join(msgspec.Struct):
    session_hash: str = ""


class PageGuard:
    """Middleware for everything below ``path``."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._path = path
        self._streams: Counter[str] = Counter()  # open ones by session
        self._asked: OrderedDict[str, int] = OrderedDict()  # all of them so far, by session
        self._decoder = msgspec.json.Decoder(_Join)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == self._path or path.startswith(self._path + "/")):
            await self._app(scope, receive, send)
            return
        route = path.removeprefix(self._path).removeprefix("/gradio_api")
        if route.startswith(FILE_ROUTES):
            await PlainTextResponse("this page has no files", 404)(scope, receive, send)
        elif route == DATA:
            await self._stream(scope, receive, _with_headers(send))
        elif route == JOIN:
            await self._join(scope, receive, _with_headers(send))
        else:
            await self._app(scope, receive, _with_headers(send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A session's results, counted until the last of them."""
        session = parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [""])[0]
        self._streams[session] += 1
        self._asked[session] = self._asked.pop(session, 0) + 1
        if len(self._asked) > MAX_SESSIONS:
            self._asked.popitem(last=False)
        is_open = True

        def close() -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                self._streams[session] -= 1
                if not self._streams[session]:
                    del self._streams[session]

        async def watched(message: Message) -> None:
            if CLOSE in message.get("body", b""):
                close()
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            close()

    async def _join(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An event; see Note [lost events]."""
        body = bytearray()

        async def read() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                session = self._session(body)
                closed = f"closed {self._asked.get(session, 0)}"
                state = "open" if session in self._streams else closed
                MutableHeaders(scope=message)[STREAM_HEADER] = state
            await send(message)

        await self._app(scope, read, answer)

    def _session(self, body: bytearray) -> str:
        try:
            return self._decoder.decode(body).session_hash
        except msgspec.MsgspecError:
            return ""  # no event: it is refused


def _with_headers(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["content-security-policy"] = CSP
            headers["referrer-policy"] = "no-referrer"
            headers["x-content-type-options"] = "nosniff"
        await send(message)

    return guarded
