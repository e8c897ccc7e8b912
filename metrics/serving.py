"""``metrics.serve``: metrics over HTTP for a script that drives the step API."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from infer.errors import ConfigError, RequestError
from infer.types import EngineInfo, Request
from metrics.observations import Report
from metrics.observer import Metrics
from metrics.window import SECONDS


class MetricsServer:
    """Answers ``GET /metrics`` and ``GET /metrics/history`` (a ``Reading`` as JSON; query
    parameters ``seconds`` and ``every``) from threads of its own, until closed.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, metrics: Metrics, port: int, host: str = "127.0.0.1") -> None:
        """Port 0 picks a free one."""
        try:
            self._server = _Server((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"metrics cannot listen on {host}:{port} ({error}); choose another port, "
                "or 0 for any free one"
            ) from error
        self._server.metrics = metrics
        self.port: int = self._server.server_address[1]
        self.url = f"http://{host}:{self.port}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="metrics-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class ScriptMetrics:
    """Metrics, their HTTP server and the observer of reports, for one script."""

    def __init__(self, info: EngineInfo, port: int, host: str) -> None:
        self.metrics = Metrics(info)
        try:
            self.server = MetricsServer(self.metrics, port, host)
        except ConfigError:
            self.metrics.close()
            raise
        self.url = self.server.url

    def on_submit(self, request: Request) -> None:
        """A request is submitted now. Optional: without it, times count from the first step."""
        self.metrics.on_submit(request)

    def on_report(self, report: Report) -> None:
        """Count one step; each report once, in order."""
        self.metrics.on_report(report)

    def close(self) -> None:
        self.server.close()
        self.metrics.close()

    def __enter__(self) -> ScriptMetrics:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def serve(port: int, info: EngineInfo, *, host: str = "127.0.0.1") -> ScriptMetrics:
    """Start answering scrapes on ``http://host:port/metrics``.

    One line in the loop does the rest::

        observer = metrics.serve(9400, infer.info.engine_info(model, state))
        while infer.has_work(state):
            state, report = infer.step(model, state)
            observer.on_report(report)

    Raises:
        ConfigError: the address cannot be listened on.
    """
    return ScriptMetrics(info, port, host)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    metrics: Metrics


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # seconds for a client to send its request

    def do_GET(self) -> None:
        target = urlsplit(self.path)
        metrics = self.server.metrics
        if target.path == "/metrics":
            content_type, body = metrics.render(self.headers.get("Accept"))
            self._answer(200, content_type, body)
        elif target.path == "/metrics/history":
            try:
                reading = metrics.read(**_span(target.query))
            except RequestError as error:
                self._answer(400, "text/plain; charset=utf-8", str(error).encode())
            else:
                self._answer(200, "application/json", reading.to_json().encode())
        else:
            self._answer(404, "text/plain; charset=utf-8", b"see /metrics\n")

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not worth a line each."""

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _span(query: str) -> dict[str, int]:
    values = {"seconds": SECONDS, "every": 1}
    for name, given in parse_qs(query).items():
        if name not in values or not given[-1].isdecimal():
            raise RequestError(f"{name}={given[-1]} is not seconds=COUNT or every=COUNT")
        values[name] = int(given[-1])
    return values
