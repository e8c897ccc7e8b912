"""Counts HTTP requests: a plain ASGI middleware, for any framework."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
OnHttp = Callable[[str, str, int], None]

CLIENT_CLOSED = 499  # the client went before a response began


class CountRequests:
    """Calls ``on_http(handler, method, status)`` when a response is complete or has failed.

    ``handler`` is the route's template (Starlette and FastAPI leave the route in the scope), or
    "other": raw paths would make a series of every mistyped address.
    """

    def __init__(self, app: App, on_http: OnHttp) -> None:
        self.app = app
        self.on_http = on_http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = CLIENT_CLOSED

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception:
            status = 500 if status == CLIENT_CLOSED else status
            raise
        finally:
            self.on_http(_handler(scope), scope["method"], status)


def _handler(scope: Scope) -> str:
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) and path else "other"
