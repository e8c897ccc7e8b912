"""Line charts as inline SVG, drawn on the server: no library, no font, no script of their own."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 150
LEFT, RIGHT, TOP, BOTTOM = 46, 410, 12, 126

Values = Sequence[float | None]
Unit = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart; None is a gap."""

    name: str
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart over equal spans of time."""

    title: str
    lines: tuple[Line, ...]
    unit: Unit
    note: str = ""  # one sentence of definition
    most: float | None = None  # what cannot be exceeded, such as 1 for a share


def seconds(value: float) -> str:
    """A duration in the unit that reads best."""
    if value == 0:
        return "0"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s"


def percent(value: float) -> str:
    """A share of 1."""
    return f"{100 * value:.3g} %"


def number(value: float) -> str:
    """A count or a rate."""
    if value >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:.3g}"


def draw(chart: Chart, times: Sequence[float]) -> str:
    """A figure with its title, its latest values and its plot."""
    highest = max((v for line in chart.lines for v in line.values if v is not None), default=0.0)
    top = _nice(highest if chart.most is None else max(highest, chart.most / 10))
    top = top if chart.most is None else min(top, chart.most)
    latest = [(li.name, _latest(li.values)) for li in chart.lines]
    legend = "".join(
        f'<span class="key line-{i}">{escape(name)} '
        f"<b>{escape(chart.unit(value)) if value is not None else '–'}</b></span>"
        for i, (name, value) in enumerate(latest)
    )
    spoken = ", ".join(
        f"{name} {chart.unit(value) if value is not None else 'no data'}" for name, value in latest
    )
    empty = all(value is None for li in chart.lines for value in li.values)
    body = _empty() if empty else _plot(chart, times, top)
    return (
        f'<figure class="panel"><figcaption title="{escape(chart.note, quote=True)}">'
        f"<h3>{escape(chart.title)}</h3><span class='legend'>{legend}</span></figcaption>"
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(chart.title, quote=True)}: {escape(spoken, quote=True)}" '
        f"data-points='{escape(_points(chart, times), quote=True)}'>{body}</svg></figure>"
    )


def _plot(chart: Chart, times: Sequence[float], top: float) -> str:
    parts = []
    for i in range(3):
        value = top * i / 2
        y = _y(value, top)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">'
            f"{escape(chart.unit(value) if value else '0')}</text>"
        )
    parts.append(_time_ticks(times))
    for i, line in reversed(list(enumerate(chart.lines))):
        for path, area in _paths(line.values, top):
            if i == 0:
                parts.append(f'<path class="area line-{i}" d="{area}"/>')
            parts.append(f'<path class="line line-{i}" d="{path}"/>')
    parts.append(
        f'<g class="cursor" visibility="hidden"><line y1="{TOP}" y2="{BOTTOM}"/>'
        f'<text y="{TOP + 8}"></text></g>'
    )
    return "".join(parts)


def _paths(values: Values, top: float) -> list[tuple[str, str]]:
    """A path and the area under it for every run without a gap; a lone point becomes a dash."""
    step = (RIGHT - LEFT) / max(1, len(values) - 1)
    runs: list[list[tuple[float, float]]] = [[]]
    for i, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((LEFT + i * step, _y(value, top)))
    found = []
    for run in runs:
        if not run:
            continue
        if len(run) == 1:
            x, y = run[0]
            run = [(max(LEFT, x - step / 2), y), (min(RIGHT, x + step / 2), y)]
        path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in run)
        found.append((path, f"{path}L{run[-1][0]:.1f},{BOTTOM}L{run[0][0]:.1f},{BOTTOM}Z"))
    return found


def _time_ticks(times: Sequence[float]) -> str:
    if not times:
        return ""
    parts = []
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        at = times[round(share * (len(times) - 1))]
        x = LEFT + share * (RIGHT - LEFT)
        parts.append(
            f'<text class="tick" x="{x:.0f}" y="{HEIGHT - 8}" text-anchor="{anchor}">'
            f"{_clock(at)}</text>"
        )
    return "".join(parts)


def _points(chart: Chart, times: Sequence[float]) -> str:
    texts = [
        [
            f"{line.name} {chart.unit(value)}"
            for line in chart.lines
            if (value := line.values[i]) is not None
        ]
        for i in range(len(times))
    ]
    return json.dumps(
        {"x0": LEFT, "x1": RIGHT, "times": [_clock(t) for t in times], "texts": texts},
        ensure_ascii=False,
        separators=(",", ":"),
    )


def _empty() -> str:
    return (
        f'<text class="none" x="{(LEFT + RIGHT) / 2}" y="{(TOP + BOTTOM) / 2}" '
        'text-anchor="middle">nothing measured yet</text><g class="cursor" visibility="hidden">'
        "<line/><text></text></g>"
    )


def _latest(values: Values) -> float | None:
    return next((v for v in reversed(values) if v is not None), None)


def _clock(unix: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix))


def _y(value: float, top: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * min(1.0, max(0.0, value / top))


def _nice(value: float) -> float:
    """The next of 1, 2, 4, 5 or 8 times a power of ten; halves of them read well too."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 4, 5, 8, 10, 20) if m * power >= value * 0.999)
