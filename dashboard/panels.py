"""The Metrics page: the exporter's numbers, live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from dashboard.charts import Chart, Line, Unit, draw, number, percent, seconds
from dashboard.client import EngineApi
from dashboard.status import failure, tile, tiles
from infer.errors import InferError
from metrics.reader import Latency, Reading

SPANS = {"1 minute": (60, 5), "5 minutes": (300, 5), "15 minutes": (900, 10)}
PERIOD_S = 2.0


@dataclass(slots=True)
class MetricsPage:
    """Live panels of one engine."""

    api: EngineApi

    def build(self, tab: Any) -> tuple[Any, Any]:
        """Place the page here; gives the timer and the switch that say when it is redrawn."""
        with gr.Row(elem_classes="toolbar"):
            span = gr.Radio(
                list(SPANS), value="1 minute", label="Time shown", show_label=False,
                container=False, elem_id="metrics-span",
            )  # fmt: skip
            live = gr.Checkbox(
                value=True, label="Live", container=False, elem_id="metrics-live", scale=0,
                min_width=90,
            )  # fmt: skip
        board = gr.HTML("", elem_id="metrics-board", padding=False, apply_default_css=False)
        timer = gr.Timer(PERIOD_S, active=False)
        quick = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}

        async def redraw(name: str) -> str:
            try:
                reading = await self.api.reading(*SPANS.get(name, (300, 5)))
            except InferError as error:
                return failure(error)
            return board_html(reading)

        timer.tick(redraw, span, board, **quick)
        span.change(redraw, span, board, **quick)
        live.change(lambda running: gr.Timer(active=running), live, timer, **quick)
        tab.select(redraw, span, board, **quick)
        return timer, live


def board_html(reading: Reading) -> str:
    """Every panel of a reading."""
    times = reading.history.times
    panels = "".join(draw(chart, times) for chart in charts(reading))
    return f'{_tiles(reading)}<div class="board">{panels}</div>'


def _tiles(reading: Reading) -> str:
    rate = next(
        (v for v in reversed(reading.history.series["generated_tokens"]) if v is not None), 0
    )
    return tiles(
        tile("Running", str(reading.running), f"{reading.waiting} waiting"),
        tile("Throughput", f"{rate:.3g}", "tokens/s generated"),
        tile("TTFT, p50", _latency(reading.latencies["ttft"], "p50"), _tail(reading, "ttft")),
        tile("TPOT, p50", _latency(reading.latencies["tpot"], "p50"), _tail(reading, "tpot")),
        tile("KV blocks used", percent(reading.kv_usage),
             f"{reading.used_blocks:,} used, {reading.cached_blocks:,} cached"),
    )  # fmt: skip


def _latency(latency: Latency, which: str) -> str:
    value = getattr(latency, which)
    return "–" if value is None else seconds(value)


def _tail(reading: Reading, name: str) -> str:
    latency = reading.latencies[name]
    return f"p95 {_latency(latency, 'p95')}, last minute"


def charts(reading: Reading) -> list[Chart]:
    """The panels; definitions are the exporter's."""

    def chart(title: str, unit: Unit, note: str, most: float | None = None, **names: str) -> Chart:
        lines = tuple(
            Line(name=label.replace("_", " "), values=reading.history.series[series])
            for label, series in names.items()
        )
        return Chart(title=title, lines=lines, unit=unit, note=note, most=most)

    return [
        chart("Time to first token", seconds,
              "Arrival of a request, before tokenization, to its first token.",
              p50="ttft_p50", p95="ttft_p95"),
        chart("Time per output token", seconds,
              "(last token - first token) / (tokens - 1) of a request.",
              p50="tpot_p50", p95="tpot_p95"),
        chart("Throughput", number, "Tokens a second: generated, and prompt positions computed.",
              generated="generated_tokens", prefill="prefill_tokens"),
        chart("KV utilization", percent, "Share of KV blocks held by sequences.", 1.0,
              used="kv_usage"),
        chart("Batch size", number, "Sequences in a step, mean over the span.",
              sequences="batch_size"),
        chart("Requests", number, "Admitted sequences, and those that wait.",
              running="running", waiting="waiting"),
        chart("Prefix cache hits", percent, "Prompt tokens found in the prefix cache.", 1.0,
              hits="prefix_hit_ratio"),
        chart("Step time", seconds, "Mean time of a step: on the device, and the host's own work.",
              device="device_s", host="host_s"),
        chart("Preemptions", number, "Sequences a second that gave their blocks back.",
              preemptions="preemptions"),
    ]  # fmt: skip
