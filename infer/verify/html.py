"""An outcome as one HTML file that needs nothing else: a table, and a plot a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from infer.verify.report import COLUMNS, notes, row_cells, summary
from infer.verify.result import Outcome, Row

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 170, 56, 24, 12
FLOOR = 1e-10  # errors below are drawn on the axis
MAX_POINTS = 400

EXPLAINED = (
    "Relative L2 error of each position's logits. The dashed line is the tolerance; points on the "
    "lowest line are equal, or nearly so."
)

STYLE = """
:root { color-scheme: light dark; --line: #8886; --pass: #1a7f37; --fail: #cf222e; --quiet: #767676;
  --mark: #0a63c9; }
@media (prefers-color-scheme: dark) { :root { --pass: #4ac26b; --fail: #ff8182; --quiet: #9a9a9a;
  --mark: #6cb6ff; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: right; padding: 0.35rem 0.6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
td { font-variant-numeric: tabular-nums; vertical-align: top; }
.notes { display: block; color: var(--quiet); font-size: 0.85rem; }
.pass { color: var(--pass); } .fail { color: var(--fail); font-weight: 600; }
.not-run { color: var(--quiet); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.1rem 1rem; font-size: 0.9rem; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(26rem, 1fr)); gap: 1.5rem; }
figure { margin: 0; } figcaption { font-size: 0.9rem; }
svg { width: 100%; height: auto; } text { fill: currentColor; font-size: 11px; }
.axis { stroke: var(--line); } .limit { stroke: var(--fail); stroke-dasharray: 5 4; }
.error { fill: var(--mark); }
"""


def as_html(outcome: Outcome) -> str:
    """The whole page."""
    verdict = "passed" if outcome.passed else "failed"
    title = f"infer verify: {escape(outcome.conditions.get('model', ''))} {verdict}"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{title}</title><style>{STYLE}</style></head><body>",
            f'<h1>{title}</h1><p class="{"pass" if outcome.passed else "fail"}">',
            f"{escape(summary(outcome))}</p>",
            _table(outcome.rows),
            "<h2>Errors along the paths</h2>",
            f"<p>{EXPLAINED}</p>",
            f'<div class="plots">{"".join(_plots(outcome.rows))}</div>',
            "<h2>Conditions</h2>",
            _conditions(outcome.conditions),
            "</body></html>",
        ]
    )


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in COLUMNS)
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(_line, rows))}</tbody></table>"
    )


def _line(row: Row) -> str:
    first, *middle, status = row_cells(row)
    remarks = "".join(f'<span class="notes">{escape(note)}</span>' for note in notes(row))
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in middle)
    kind = status.replace(" ", "-")
    return f'<tr><td>{escape(first)}{remarks}</td>{cells}<td class="{kind}">{status}</td></tr>'


def _conditions(conditions: dict[str, str]) -> str:
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in conditions.items())
    return f"<dl>{items}</dl>"


def _plots(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.errors is not None and row.tolerance is not None:
            label = escape(row.title)
            plot = _plot(row.errors.by_position, row.tolerance, label)
            yield f"<figure>{plot}<figcaption>{label}</figcaption></figure>"


def _plot(values: Sequence[float], limit: float, label: str) -> str:
    """Points on a logarithmic scale over positions, thinned to the worst of each stretch."""
    points = _thinned(values)
    finite = [v for v in points if math.isfinite(v)]
    top = math.ceil(math.log10(max([limit * 2, FLOOR * 10, *finite])))
    low = math.floor(math.log10(max(FLOOR, min([limit, *(v for v in finite if v > 0)]))))
    low = min(low, top - 4)

    def y(value: float) -> float:
        at = math.log10(min(max(value, 10.0**low), 10.0**top))
        return TOP + (HEIGHT - TOP - BOTTOM) * (top - at) / (top - low)

    step = (WIDTH - LEFT - 8) / max(1, len(points) - 1)
    marks = "".join(
        f'<circle class="error" cx="{LEFT + i * step:.1f}" cy="{y(v):.1f}" r="1.8"/>'
        for i, v in enumerate(points)
    )
    ticks = range(low, top + 1, max(1, (top - low) // 4))
    grid = "".join(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH}" y1="{y(10.0**t):.1f}" y2="{y(10.0**t):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(10.0**t) + 4:.1f}" text-anchor="end">1e{t}</text>'
        for t in ticks
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Errors: {label}">{grid}'
        f'<line class="limit" x1="{LEFT}" x2="{WIDTH}" y1="{y(limit):.1f}" y2="{y(limit):.1f}"/>'
        f'{marks}<text x="{LEFT}" y="{HEIGHT - 6}">0</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">{len(values) - 1}</text></svg>'
    )


def _thinned(values: Sequence[float]) -> list[float]:
    every = max(1, -(-len(values) // MAX_POINTS))
    return [max(values[i : i + every]) for i in range(0, len(values), every)]
