"""``infer dashboard``: the page in a process of its own, for an engine anywhere."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import TYPE_CHECKING

from dashboard.settings import Settings
from infer.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

KEY_VARIABLE = "PURESTEP_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_dashboard_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run_dashboard``."""
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="the engine's address (default: %(default)s); its API key, if it asks for one, is "
        f"read from {KEY_VARIABLE}",
    )
    parser.add_argument("--port", type=int, default=7860, help="port (default: %(default)s)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; the page has no password of its own, so other than loopback "
        "only behind something that asks for one (default: %(default)s)",
    )


def run_dashboard(args: argparse.Namespace) -> int:
    """Serve the page until a signal; the exit status."""
    try:
        asyncio.run(_serve(args))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


async def _serve(args: argparse.Namespace) -> None:
    import uvicorn

    app = dashboard_app(args.url, os.environ.get(KEY_VARIABLE), args.host)
    if args.host not in LOOPBACK:
        sys.stderr.write(
            f"warning: everybody who reaches {args.host}:{args.port} can use this page and the "
            "engine behind it\n"
        )
    sys.stderr.write(f"dashboard of {args.url} on http://{args.host}:{args.port}/\n")
    config = uvicorn.Config(
        app,
        host=args.host,
        port=args.port,
        log_level="warning",
        timeout_graceful_shutdown=2,  # pages keep a stream open for as long as they are
    )
    await uvicorn.Server(config).serve()


def dashboard_app(url: str, api_key: str | None, host: str) -> FastAPI:
    """The page as an application of its own.

    Raises:
        ConfigError: ``url`` is no address.
    """
    # Gradio takes seconds to import, which help texts need not wait for.
    from fastapi import FastAPI
    from starlette.middleware.cors import CORSMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from dashboard.pages import mount

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    # With a policy of the parent's, Gradio does not add its own, which is open to every origin.
    app.add_middleware(CORSMiddleware, allow_origins=[])
    if host in LOOPBACK:
        # A name that an attacker points at this machine must not make a browser a client here.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1", "[::1]"])
    return mount(app, Settings(url=url, api_key=api_key))
