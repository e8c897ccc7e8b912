"""The one owner of an engine's metrics: observations go in, expositions and readings come out."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from infer.types import (
    EngineInfo,
    FailureKind,
    RejectionKind,
    Request,
    RequestStats,
    StepStats,
)
from metrics import exporter, reader
from metrics.fold import Fold
from metrics.names import PREFIX, Kind, table
from metrics.observations import FirstToken, HttpAnswer, Observation, Report, Reported, Submitted
from metrics.reader import RECENT_S, Reading, check_span
from metrics.series import Series
from metrics.window import SECONDS, Window

logger = logging.getLogger(__name__)

FOLD_EVERY_S = 0.25
MAX_PENDING = 1 << 16


class Metrics:
    """Metrics of one engine in the process that serves them; an ``infer.types.Observer``.

    An ``on_...`` call appends to a queue (about a microsecond, any thread). A background thread
    folds the queue into the numbers four times a second, and so does every read. When nobody gets
    to fold and the queue is full, the observing call folds it itself: late, but nothing is lost.

    Close it, or use it as a context manager, to end the thread.
    """

    def __init__(
        self,
        info: EngineInfo,
        *,
        engine: str = "0",
        handlers: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
        max_pending: int = MAX_PENDING,
    ) -> None:
        """``engine`` tells engines of one deployment apart; ``handlers`` are the HTTP routes whose
        counters exist from the start."""
        self.info = info
        self.engine = engine
        self._clock = clock
        self._max_pending = max_pending
        self._table = table(info)
        self._pending: deque[tuple[float, Observation]] = deque()
        self._lock = threading.Lock()  # guards the fold
        self._fold = Fold(Series(self._table), Window(clock()), handlers)
        self._fold.series.set("kv_cache_blocks", info.num_blocks, "free")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-fold", daemon=True)
        self._thread.start()

    def on_step(self, stats: StepStats) -> None:
        """One engine step."""
        self._put(stats)

    def on_first_token(self, request_id: str, ttft_s: float) -> None:
        """Count a time to first token now; ``on_request`` will not count it again."""
        self._put(FirstToken(request_id, ttft_s))

    def on_request(self, stats: RequestStats) -> None:
        """A request ended, whatever its finish reason; once a request."""
        self._put(stats)

    def on_rejection(self, kind: RejectionKind) -> None:
        """A request was refused before the engine saw it."""
        self._put(kind)

    def on_failure(self, kind: FailureKind) -> None:
        """An accepted request ended without its answer."""
        self._put(kind)

    def on_report(self, report: Report) -> None:
        """For scripts that drive the step API: all of the above, from a step's whole report.

        Each report once, in order, and nothing else of the same engine.
        """
        self._put(Reported(report))

    def on_submit(self, request: Request) -> None:
        """For scripts, before a request's first step: it arrives now. Untold, its times count from
        the start of that step."""
        self._put(Submitted(request, self._clock()))

    def on_http(self, handler: str, method: str, status: int) -> None:
        """An HTTP request was answered by the route ``handler`` (a template, never a raw path)."""
        self._put(HttpAnswer(handler, method, status))

    def render(self, accept: str | None = None) -> tuple[str, bytes]:
        """Content type and body for a scrape with this Accept header (plain or OpenMetrics)."""
        process = exporter.process_families()
        with self._lock:
            self._drain()
            families = exporter.engine_families(
                self._table, self._fold.series, self.info, self.engine
            )
            families += exporter.http_families(self._fold.http)
        return exporter.expose(families + process, accept)

    def read(self, seconds: int = SECONDS, every: int = 1) -> Reading:
        """The numbers now, and the history of the last ``seconds`` in spans of ``every`` seconds.

        Raises:
            RequestError: more history than 900 seconds, or not a whole number of spans.
        """
        check_span(seconds, every)
        now = self._clock()
        with self._lock:
            self._drain()
            past = self._fold.window.last(now, max(seconds, RECENT_S))
            gauges = {
                name: self._fold.series.values[name][()]
                for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            }
            blocks = {key[0]: n for key, n in self._fold.series.labelled("kv_cache_blocks")}
            totals = self._totals()
        unix_now = time.time()
        return Reading(
            model_name=self.info.model_name,
            engine=self.engine,
            time=round(unix_now, 3),
            running=int(gauges["num_requests_running"]),
            waiting=int(gauges["num_requests_waiting"]),
            kv_usage=gauges["kv_cache_usage_perc"],
            free_blocks=int(blocks["free"]),
            used_blocks=int(blocks["used"]),
            cached_blocks=int(blocks["cached"]),
            totals=totals,
            latencies=reader.recent_latencies(past.tail(RECENT_S)),
            history=reader.history(past.tail(seconds), every, unix_now - now),
        )

    def close(self) -> None:
        """End the background thread; what was observed is still counted. May be called twice."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _put(self, observation: Observation) -> None:
        self._pending.append((self._clock(), observation))
        if len(self._pending) > self._max_pending:
            with self._lock:
                self._drain()

    def _run(self) -> None:
        while not self._closing.wait(FOLD_EVERY_S):
            if self._pending:
                with self._lock:
                    self._drain()

    def _drain(self) -> None:
        """Fold what is pending; the lock is held."""
        for _ in range(len(self._pending)):
            self._try(self._fold.apply, *self._pending.popleft())
        self._try(self._fold.flush, self._clock())

    def _try(self, count: Callable[..., None], *observed: object) -> None:
        """What cannot be counted is itself counted and logged, and harms nothing else."""
        try:
            count(*observed)
        except Exception:
            self._fold.series.add("observation_errors", 1)
            logger.exception("an observation could not be counted: %r", observed)

    def _totals(self) -> dict[str, float]:
        totals = {}
        for name, metric in self._table.items():
            if metric.kind is not Kind.COUNTER:
                continue
            for values, number in self._fold.series.labelled(name):
                labels = ",".join(
                    f'{key}="{value}"' for key, value in zip(metric.labels, values, strict=True)
                )
                totals[f"{PREFIX}{name}_total" + (f"{{{labels}}}" if labels else "")] = number
        return totals
