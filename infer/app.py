"""``infer serve``: an engine, its HTTP server, its metrics and its pages in one process tree.

The only module of this package that knows the packages beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.middleware import Middleware

from dashboard.insight import Insight, insight_routes
from dashboard.recorder import StepRecorder
from dashboard.settings import Settings
from infer import options
from infer.client import Engine, LinkedClient, start_thread
from infer.config import EngineConfig
from infer.engineoptions import ENGINE_TEXTS, LOAD_TEXTS, LoadOptions
from infer.errors import ConfigError, InferError
from infer.presets import DEFAULT, find_preset
from infer.server.app import create_app
from infer.server.banner import banner
from infer.server.config import ServerConfig
from infer.server.logs import configure_logging
from infer.tokenizer import Tokenizer
from infer.transport import start_process
from metrics import CountRequests, Metrics

KEY_VARIABLE = "PURESTEP_API_KEY"
WATCHER = "dashboard.recorder:StepRecorder"  # what an engine process tells its steps through
TABLES = ("load", "engine", "server")
MAX_FILES = 1 << 16


SERVER_TEXTS = {
    "host": "address to listen on; others than loopback need an API key",
    "port": "port to listen on; 0: any free one",
    "api_key": f"key that every route but /health asks for; better set {KEY_VARIABLE}",
    "allowed_hosts": "Host header to accept beside the address; may be repeated",
    "allowed_origins": "web origin that may call from a browser, * for any; may be repeated",
    "served_model_name": "name clients use for the model; may be repeated",
    "engine_process": "run the engine in a process of its own; default: on CUDA",
    "dashboard": "the chat page, at /ui",
    "max_queue": "sequences that may wait; more get 429",
    "max_body_bytes": "largest request body",
    "max_messages": "messages of a conversation",
    "max_prompts": "prompts of a completion request",
    "max_n": "choices of a prompt",
    "max_stop": "stop strings of a request",
    "max_tools": "tools of a request",
    "max_logprobs": "log-probabilities a token",
    "request_timeout": "seconds a request may take; requests may ask for less",
    "body_timeout": "seconds a body may take to arrive",
    "text_timeout": "seconds for a chat template and tokenization",
    "step_timeout": "seconds without a step, with requests open, after which the engine has failed",
    "text_workers": "threads that tokenize",
    "shutdown_timeout": "seconds running requests get when the server is told to stop",
    "log_format": "one line a request, as text or JSON",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """Everything ``serve`` needs, checked before anything is loaded."""

    load: LoadOptions
    engine: Mapping[str, Any]  # options of EngineConfig as given
    server: ServerConfig


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option of loading, the engine and the server."""
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with tables [load], [engine] and [server]"
    )
    options.add_options(parser, "model", LoadOptions, LOAD_TEXTS)
    options.add_options(parser, "engine", EngineConfig, ENGINE_TEXTS)
    options.add_options(parser, "server", ServerConfig, SERVER_TEXTS)


def serve_plan(args: argparse.Namespace) -> ServePlan:
    """Options from the command line, then the TOML file, then the environment, then defaults.

    Raises:
        ConfigError: an option is unknown, of the wrong type or out of range.
    """
    tables: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
    if args.config is not None:
        tables = options.read_options(args.config, TABLES)
    if key := os.environ.get(KEY_VARIABLE):
        tables["server"] = {"api_key": key, **tables["server"]}
    engine = {**tables["engine"], **options.given(args, EngineConfig)}
    options.build(EngineConfig, engine)  # checked here, with the names of the options
    return ServePlan(
        load=options.build(LoadOptions, {**tables["load"], **options.given(args, LoadOptions)}),
        engine=engine,
        server=options.build(
            ServerConfig, {**tables["server"], **options.given(args, ServerConfig)}
        ),
    )


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal; the exit status. Mistakes of the user end in one line, not a trace."""
    try:
        plan = serve_plan(args)
        configure_logging(plan.server.log_format)
        _raise_file_limit()
        asyncio.run(serve(plan))
    except InferError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


async def serve(plan: ServePlan) -> None:
    """Bind, load, answer; returns after a graceful stop.

    Raises:
        InferError: the address cannot be had, or the engine cannot be made.
    """
    began = time.monotonic()
    with _bind(plan.server) as listener:
        pages = _start_import(plan.server)
        client, tokenizer = await _start_engine(plan)
        await pages
        try:
            names = plan.server.served_model_name or (client.info.model_name,)
            info = replace(client.info, model_name=names[0])
            with Metrics(info, handlers=("/v1/chat/completions", "/v1/completions")) as seen:
                client.add_observer(seen)
                app = create_app(
                    client,
                    tokenizer,
                    plan.server,
                    observers=[seen],
                    render_metrics=seen.render,
                    middleware=[Middleware(CountRequests, on_http=seen.on_http)],
                )
                port = listener.getsockname()[1]
                _add_pages(app, plan, client, tokenizer, seen, port)
                text = banner(client.info, plan.server, port, time.monotonic() - began)
                await _answer(app, client, plan.server, listener, text)
        finally:
            await client.shutdown(0)


async def _start_engine(plan: ServePlan) -> tuple[LinkedClient, Tokenizer]:
    settings: dict[str, Any] = {
        "load": {name: getattr(plan.load, name) for name in LOAD_TEXTS},
        "engine": dict(plan.engine),
        "log_format": plan.server.log_format,
        "watcher": WATCHER if plan.server.dashboard else None,
    }
    if _apart(plan):
        client = await start_process(
            "infer.enginebuild:build_engine", settings, step_timeout=plan.server.step_timeout
        )
        folder = client.info.model_path
        tokenizer = None if folder is None else await _read_tokenizer(folder)
    else:
        left: list[Tokenizer | None] = []

        def make() -> Engine:
            # torch is imported here: a server whose engine is another process does without it.
            from infer.enginebuild import build

            watcher = StepRecorder() if plan.server.dashboard else None
            engine, tokenizer = build(settings["load"], settings["engine"], watcher)
            left.append(tokenizer)
            return engine

        client = await start_thread(make, step_timeout=plan.server.step_timeout)
        (tokenizer,) = left
    if tokenizer is None:
        await client.shutdown(0)
        raise ConfigError(
            f"model {client.info.model_name!r} brings no tokenizer, which a server needs; "
            "add tokenizer.json to its folder"
        )
    return client, tokenizer


def _start_import(config: ServerConfig) -> Awaitable[Any]:
    """Import the pages, which takes seconds, while the model is loaded."""
    name = "dashboard.pages" if config.dashboard else "dashboard"
    return asyncio.ensure_future(asyncio.to_thread(importlib.import_module, name))


def _add_pages(
    app: FastAPI,
    plan: ServePlan,
    client: LinkedClient,
    tokenizer: Tokenizer,
    seen: Metrics,
    port: int,
) -> None:
    """Mount the chat page and the routes it looks at the engine through."""
    if not plan.server.dashboard:
        return
    from dashboard.pages import mount  # loads gradio

    info = client.info
    preset = find_preset(plan.load.model or DEFAULT)
    chat = preset.chat if preset is not None else {}
    insight = Insight.of(
        info, defaults={**info.sampling, **chat}, chat_template=tokenizer.chat_template
    )
    app.include_router(insight_routes(insight, seen.read, client.look))
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(plan.server.host, plan.server.host)
    address = f"[{host}]" if ":" in host and not host.startswith("[") else host
    mount(app, Settings(url=f"http://{address}:{port}", api_key=plan.server.api_key))


def _apart(plan: ServePlan) -> bool:
    """Whether the engine gets a process of its own."""
    wanted = plan.server.engine_process
    return _on_cuda(plan.load.device) if wanted is None else wanted


def _on_cuda(device: str) -> bool:
    """Whether the engine will run on a GPU, found out without loading torch here."""
    return device.startswith("cuda") or (device == "auto" and Path("/dev/nvidiactl").exists())


async def _read_tokenizer(folder: str) -> Tokenizer | None:
    return await asyncio.to_thread(Tokenizer.from_folder, folder)


def _raise_file_limit() -> None:
    """Allow more open files, as far as the system lets us: every connection is one."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if most == resource.RLIM_INFINITY else min(most, MAX_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _bind(config: ServerConfig) -> socket.socket:
    """Take the address before minutes of loading, without answering on it yet."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio turns Nagle's delay off only for sockets that name their protocol.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror or error}); "
            "choose another host or port, or port 0 for any free one"
        ) from error
    return listener


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, telling when it answers."""

    def __init__(self, config: uvicorn.Config, text: str) -> None:
        super().__init__(config)
        self._text = text

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        sys.stderr.write(self._text)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _answer(
    app: Any, client: LinkedClient, config: ServerConfig, listener: socket.socket, text: str
) -> None:
    server = _Server(
        uvicorn.Config(
            app,
            http="h11",  # its limit on headers is 16 KiB
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
        ),
        text,
    )
    stops: list[asyncio.Task[None]] = []

    def stop() -> None:
        # A second signal means now.
        stops.append(asyncio.ensure_future(_stop(server, client, config, hurry=bool(stops))))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await asyncio.sleep(0)  # a Ctrl-C of before ends this here, and not uvicorn in its start
        await server.serve(sockets=[listener])
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    await asyncio.gather(*stops)


async def _stop(
    server: _Server, client: LinkedClient, config: ServerConfig, *, hurry: bool
) -> None:
    await client.shutdown(0 if hurry else config.shutdown_timeout)
    server.should_exit = True
