"""An outcome as JSON and as a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from infer.verify.result import Outcome, Row

COLUMNS = ("comparison", "max abs", "error", "tolerance", "best token", "tokens", "peak", "verdict")


def as_json(outcome: Outcome) -> str:
    """One JSON object: conditions, the verdict, and every row with its errors by position."""
    return json.dumps(
        {
            "passed": outcome.passed,
            "conditions": outcome.conditions,
            "rows": [_row(row) for row in outcome.rows],
        },
        indent=1,
    )


def _row(row: Row) -> dict[str, Any]:
    out: dict[str, Any] = {
        "name": row.name,
        "title": row.title,
        "status": row.status,
        "reasons": list(row.reasons),
        "seconds": round(row.seconds, 3),
        "peak_bytes": row.peak_bytes,
        "counts": row.counts,
    }
    if row.tokens is not None:
        out["tokens"] = {"equal": row.tokens[0], "sampled": row.tokens[1]}
    if row.errors is not None:
        out |= {
            "max_abs_error": row.errors.max_abs,
            "relative_l2": row.errors.rel_l2,
            "relative_l2_rms": row.errors.rms,
            "best_token_agreement": {
                "equal": row.errors.agreed,
                "ties": row.errors.ties,
                "positions": row.errors.total,
            },
            "measure": row.measure,
            "tolerance": row.tolerance,
            "relative_l2_by_position": list(row.errors.by_position),
        }
    return out


def table(rows: Sequence[Row]) -> str:
    """The rows in columns, each reason and count below its row."""
    cells = [COLUMNS, *(row_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    lines = [_line(COLUMNS, widths), "  ".join("-" * width for width in widths)]
    for row, line in zip(rows, cells[1:], strict=True):
        lines.append(_line(line, widths))
        lines += [f"    {note}" for note in notes(row)]
    return "\n".join(lines)


def row_cells(row: Row) -> tuple[str, ...]:
    """A row's columns as text."""
    e = row.errors
    error = "" if e is None else f"{e.rel_l2 if row.measure == 'rel L2' else e.rms:.2e}"
    measure = "" if e is None or row.measure == "rel L2" else f" {row.measure}"
    ties = "" if e is None or not e.ties else f" +{e.ties} ties"
    return (
        row.title,
        "" if e is None else f"{e.max_abs:.2e}",
        f"{error}{measure}",
        "" if row.tolerance is None else f"{row.tolerance:.2e}",
        "" if e is None else f"{e.agreed}/{e.total}{ties}",
        "" if row.tokens is None else f"{row.tokens[0]}/{row.tokens[1]}",
        "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f} MiB",
        row.status,
    )


def notes(row: Row) -> list[str]:
    """What a row says beside its numbers: why it failed or was not run, and what was at work."""
    counts = ", ".join(f"{value} {what}" for what, value in row.counts.items())
    return [*row.reasons, *([counts] if counts else [])]


def summary(outcome: Outcome) -> str:
    """One line."""
    total = dict.fromkeys(("pass", "fail", "not run"), 0)
    for row in outcome.rows:
        total[row.status] += 1
    return f"{total['pass']} passed, {total['fail']} failed, {total['not run']} not run"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = cells
    parts = [first.ljust(widths[0])]
    parts += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
    return "  ".join(parts).rstrip()
