"""What the metrics say now and said during the last 15 minutes, as one JSON-able value.

The definitions are the exporter's: both read what ``metrics.fold`` counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from infer.errors import RequestError
from metrics import window
from metrics.bins import quantile
from metrics.window import GAUGES, LATENCIES, SUMS, Seconds

RECENT_S = 60
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Percentiles in seconds over the last minute; None when nothing was observed."""

    count: int
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Equal spans of time, oldest first; the running second is left out.

    ``series`` holds one number a span, None where there was nothing to measure: ``running,
    waiting, free_blocks, used_blocks, cached_blocks, kv_usage`` (at the span's end), ``batch_size,
    step_tokens, host_s, device_s`` (means a step), ``prefill_tokens, decode_tokens,
    generated_tokens, preemptions, requests`` (a second), ``prefix_hit_ratio``, and ``ttft, tpot,
    itl, e2e`` each with ``_p50`` and ``_p95`` (seconds).
    """

    every: int  # seconds a span
    times: tuple[float, ...]  # unix seconds at each span's end
    series: Mapping[str, tuple[float | None, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at an engine's metrics."""

    model_name: str
    engine: str
    time: float  # unix seconds
    running: int
    waiting: int
    kv_usage: float  # 0 to 1
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    totals: Mapping[str, float]  # the exporter's counters, by full name with label values
    latencies: Mapping[str, Latency]  # ttft, tpot, itl, e2e
    history: History

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Reading:
        """The inverse of ``to_json``.

        Raises:
            RequestError: ``text`` is no such JSON.
        """
        try:
            values = json.loads(text)
            history = values.pop("history")
            latencies = values.pop("latencies")
            series = {name: tuple(numbers) for name, numbers in history["series"].items()}
            return cls(
                **values,
                latencies={name: Latency(**latency) for name, latency in latencies.items()},
                history=History(
                    every=history["every"], times=tuple(history["times"]), series=series
                ),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RequestError(f"this is not a metrics reading: {error!r}") from error


def check_span(seconds: int, every: int) -> None:
    """Raises:
    RequestError: the history asked for is not kept, or not a whole number of spans.
    """
    if not 1 <= seconds <= window.SECONDS:
        raise RequestError(
            f"seconds is {seconds}, it must be from 1 to {window.SECONDS}", param="seconds"
        )
    if every < 1 or seconds % every:
        raise RequestError(
            f"every is {every}, it must divide the {seconds} seconds asked for", param="every"
        )


def recent_latencies(recent: Seconds) -> dict[str, Latency]:
    """Percentiles over all of ``recent``."""
    result = {}
    for name, bins in zip(LATENCIES, recent.bins, strict=True):
        merged = bins.sum(axis=0, dtype=np.uint32)
        values = {key: _number(quantile(merged, q)) for key, q in PERCENTILES.items()}
        result[name] = Latency(count=int(merged.sum()), **values)
    return result


def history(past: Seconds, every: int, unix_offset: float) -> History:
    """``past`` in spans of ``every`` seconds; unix time is monotonic time plus ``unix_offset``."""
    spans = past.sums.shape[0] // every
    sums = past.sums.reshape(spans, every, -1).sum(axis=1)
    columns = dict(zip(SUMS, sums.T, strict=True))
    tokens = columns["prefill_tokens"] + columns["decode_tokens"]
    gauges = dict(zip(GAUGES, past.gauges[every - 1 :: every].T, strict=True))
    blocks = gauges["free_blocks"] + gauges["used_blocks"] + gauges["cached_blocks"]
    series = {
        **gauges,
        "kv_usage": _ratio(gauges["used_blocks"], np.maximum(blocks, 1)),
        "batch_size": _ratio(columns["sequences"], columns["steps"]),
        "step_tokens": _ratio(tokens, columns["steps"]),
        "host_s": _ratio(columns["host_s"], columns["steps"]),
        "device_s": _ratio(columns["device_s"], columns["steps"]),
        "prefix_hit_ratio": _ratio(columns["prefix_hits"], columns["prefix_queries"]),
    }
    rates = ("prefill_tokens", "decode_tokens", "generated_tokens", "preemptions", "requests")
    series.update({name: columns[name] / every for name in rates})
    for name, bins in zip(LATENCIES, past.bins, strict=True):
        merged = bins.reshape(spans, every, -1).sum(axis=1, dtype=np.uint32)
        for key in ("p50", "p95"):
            series[f"{name}_{key}"] = quantile(merged, PERCENTILES[key])
    ends = past.end - every * np.arange(spans - 1, -1, -1) + unix_offset
    return History(
        every=every,
        times=tuple(np.round(ends, 3).tolist()),
        series={name: tuple(map(_number, values)) for name, values in series.items()},
    )


def _ratio(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """Element-wise part / whole; NaN where whole is 0."""
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)


def _number(value: float | NDArray[np.float64]) -> float | None:
    number = float(value)
    return None if np.isnan(number) else float(f"{number:.6g}")
