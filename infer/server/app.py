"""The application: routes, guards and error bodies around one engine client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from infer.client import EngineClient
from infer.errors import InferError
from infer.server.config import ServerConfig
from infer.server.errors import ApiError, to_api_error
from infer.server.http import Unsent, record_of
from infer.server.middleware import AccessLog, Guard
from infer.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from infer.server.routes import openai_routes, utility_routes
from infer.server.services import RenderMetrics, Services
from infer.tokenizer import Tokenizer
from infer.types import Observer

BODIES = (ChatBody, CompletionBody, DetokenizeBody, TokenizeBody)


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: ServerConfig,
    *,
    observers: Iterable[Observer] = (),
    render_metrics: RenderMetrics | None = None,
    middleware: Iterable[Middleware] = (),
) -> FastAPI:
    """An application that answers with ``client``, which the caller starts and shuts down.

    ``middleware`` sees every HTTP request, refused ones included. Pages may be mounted on the
    result; the guards hold for them too.
    """
    services = Services.build(client, tokenizer, config, tuple(observers), render_metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        services.pool.close()

    app = FastAPI(
        title="purestep",
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        middleware=[
            Middleware(AccessLog, note=services.note),
            *middleware,
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.allowed_origins),
                allow_methods=["GET", "POST"],
                # Keys are not cookies: no header gives an allowed page more than it has already.
                allow_headers=["*"],
                expose_headers=["retry-after", "x-request-id", "x-should-retry"],
            ),
            Middleware(Guard, config=config, note=services.note),
        ],
    )
    app.include_router(openai_routes(services))
    app.include_router(utility_routes(services))

    async def answer(request: Request, error: Exception) -> Response:
        known = to_api_error(error)
        services.note(known, getattr(request.state, "record", None))
        return known.response()

    async def left(request: Request, error: Exception) -> Response:
        record_of(request).finish = "disconnect"  # while its body was read
        return Unsent()

    app.add_exception_handler(ClientDisconnect, left)
    for kind in (ApiError, InferError, ValidationError, HTTPException):
        app.add_exception_handler(kind, answer)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, bodies = models_json_schema(
        [(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}"
    )
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(bodies["$defs"])
    return document
