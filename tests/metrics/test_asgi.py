"""HTTP counts: templates as labels, the status that was sent, streams and failures included."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import fastapi
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from metrics import CountRequests

Calls = Counter[tuple[str, str, int]]


def fetch(app: Any, *targets: tuple[str, str]) -> Calls:
    calls: Calls = Counter()

    def on_http(handler: str, method: str, status: int) -> None:
        calls[handler, method, status] += 1

    async def run() -> None:
        transport = httpx.ASGITransport(CountRequests(app, on_http), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for method, path in targets:
                await client.request(method, path)

    asyncio.run(run())
    return calls


async def item(request: Request) -> Response:
    return PlainTextResponse(request.path_params["name"], status_code=201)


async def stream(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    return StreamingResponse(parts())


async def broken(request: Request) -> Response:
    raise RuntimeError("no")


STARLETTE = Starlette(
    routes=[
        Route("/items/{name}", item, methods=["GET", "POST"]),
        Route("/stream", stream),
        Route("/broken", broken),
        Mount("/ui", routes=[Route("/page/{number}", item)]),
    ]
)


def test_labels_are_templates_never_paths() -> None:
    calls = fetch(
        STARLETTE,
        ("GET", "/items/a"),
        ("POST", "/items/b"),
        ("GET", "/items/c"),
        ("GET", "/nowhere/at/all"),
        ("GET", "/stream"),
        ("GET", "/broken"),
        ("DELETE", "/items/a"),
    )
    assert calls == {
        ("/items/{name}", "GET", 201): 2,
        ("/items/{name}", "POST", 201): 1,
        ("other", "GET", 404): 1,
        ("/stream", "GET", 200): 1,
        ("/broken", "GET", 500): 1,
        ("/items/{name}", "DELETE", 405): 1,
    }


def test_mounted_applications_do_not_leak_their_paths() -> None:
    calls = fetch(STARLETTE, ("GET", "/ui/page/1"), ("GET", "/ui/page/2"), ("GET", "/ui/none/3"))
    assert sum(calls.values()) == 3
    assert not any(digit in handler for handler, _, _ in calls for digit in "123")


def test_fastapi_routes_have_their_templates() -> None:
    app = fastapi.FastAPI()
    router = fastapi.APIRouter(prefix="/v1")

    @router.get("/models/{name}")
    async def model(name: str) -> str:
        return name

    app.include_router(router)
    calls = fetch(app, ("GET", "/v1/models/a"), ("GET", "/v1/models/b"), ("GET", "/v1/nothing"))
    assert calls == {("/v1/models/{name}", "GET", 200): 2, ("other", "GET", 404): 1}


def test_failures_and_clients_that_left() -> None:
    calls: Calls = Counter()

    def on_http(handler: str, method: str, status: int) -> None:
        calls[handler, method, status] += 1

    async def leaves(scope: Any, receive: Any, send: Any) -> None:
        return

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("before the response")

    async def is_cancelled(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": "/x"}
        await CountRequests(leaves, on_http)(dict(scope), None, None)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError):
            await CountRequests(fails, on_http)(dict(scope), None, None)  # type: ignore[arg-type]
        with pytest.raises(asyncio.CancelledError):
            await CountRequests(is_cancelled, on_http)(dict(scope), None, None)  # type: ignore[arg-type]
        await CountRequests(leaves, on_http)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]

    asyncio.run(run())
    assert calls == {("other", "POST", 499): 2, ("other", "POST", 500): 1}
