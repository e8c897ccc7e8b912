"""The inspector's pictures: timeline, block map and one step's arrays, as HTML and inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from zlib import crc32

from dashboard.theme import NUM_HUES
from dashboard.views import BlockMap, Cell, RowView, StepBrief, StepView, Timeline

COLUMN, LANE, HEAD = 16, 20, 18  # pixels
MARGIN = 10  # on the right, for the last label
MAX_STEPS, MAX_LANES = 90, 24
MAX_BOXES = 20  # values of an array shown one by one
SHOWN_ENDS = (12, 3)  # of a longer one: from its beginning and its end

Hues = dict[str, int]


def hues(names: Iterable[str]) -> Hues:
    """A hue for every request, the same in all pictures and as far apart as they come."""
    found: Hues = {}
    taken: set[int] = set()
    for name in names:
        if name in found:
            continue
        hue = crc32(name.encode()) % NUM_HUES
        while hue in taken and len(taken) < NUM_HUES:
            hue = (hue + 1) % NUM_HUES
        taken.add(hue)
        if len(taken) == NUM_HUES:
            taken.clear()
        found[name] = hue
    return found


def timeline_names(timeline: Timeline) -> list[str]:
    """Requests by their first step, then those that only hold blocks."""
    names = [bar.request_id for step in timeline.steps for bar in step.bars]
    if timeline.blocks is not None:
        names += [owner for cell in timeline.blocks.cells for owner in cell.owners]
    return list(dict.fromkeys(names))


# --- timeline -------------------------------------------------------------------------------------


def timeline_html(steps: Sequence[StepBrief], chosen: int | None, colours: Hues) -> str:
    """Steps from left to right, one lane a sequence. A click on a column chooses its step."""
    steps = steps[-MAX_STEPS:]
    lanes = list(dict.fromkeys((bar.request_id, bar.choice) for step in steps for bar in step.bars))
    hidden = max(0, len(lanes) - MAX_LANES)
    lanes = lanes[-MAX_LANES:]
    place = {lane: i for i, lane in enumerate(lanes)}
    width, height = len(steps) * COLUMN + MARGIN, HEAD + len(lanes) * LANE + 4
    columns = "".join(
        _column(step, i * COLUMN, height, place, step.step == chosen, colours)
        for i, step in enumerate(steps)
    )
    labels = "".join(
        f'<div class="lane hue-{colours.get(name, 0)}" title="{escape(name, quote=True)}">'
        f"<i></i>{escape(short(name))}{f' #{choice}' if choice else ''}</div>"
        for name, choice in lanes
    )
    more = f'<p class="hint">{hidden} earlier sequences are not drawn.</p>' if hidden else ""
    return (
        f'<div class="timeline"><div class="lanes" style="padding-top:{HEAD}px">{labels}</div>'
        f'<div class="track" tabindex="0" role="group" aria-label="Timeline of {len(steps)} steps">'
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{len(steps)} steps of {len(lanes)} sequences">{columns}</svg></div></div>'
        f"{more}"
    )


def _column(
    step: StepBrief,
    x: int,
    height: int,
    place: dict[tuple[str, int], int],
    chosen: bool,
    colours: Hues,
) -> str:
    label = str(step.step) if step.step % 5 == 0 or chosen else ""
    preempted = f"; preempted: {', '.join(map(short, step.preempted))}" if step.preempted else ""
    title = (
        f"step {step.step}: {step.num_prefill} prefill and {step.num_decode} decode positions, "
        f"{step.num_sequences} sequences, {step.seconds * 1000:.1f} ms{preempted}"
    )
    parts = [
        (
            f'<g class="step-column{" chosen" if chosen else ""}" data-step="{step.step}">'
            f"<title>{escape(title)}</title>"
            f'<rect class="back" x="{x}" y="0" width="{COLUMN}" height="{height}"/>'
        )
    ]
    if label:
        parts.append(
            f'<text class="tick" x="{x + COLUMN / 2}" y="12" text-anchor="middle">{label}</text>'
        )
    done = set(step.finished)
    for bar in step.bars:
        lane = place.get((bar.request_id, bar.choice))
        if lane is None:
            continue
        y = HEAD + lane * LANE
        hue = colours.get(bar.request_id, 0)
        kind = "prefill" if bar.prefill else "decode"
        parts.append(
            f'<rect class="bar {kind} hue-{hue}" x="{x + 1}" y="{y + (3 if bar.prefill else 6)}" '
            f'width="{COLUMN - 2}" height="{14 if bar.prefill else 8}" rx="2"/>'
        )
        if bar.request_id in done:
            parts.append(
                f'<circle class="end hue-{hue}" cx="{x + COLUMN - 2}" cy="{y + 10}" r="4"/>'
            )
    for name in step.preempted:
        for (owner, _), i in place.items():
            if owner == name:
                y = HEAD + i * LANE + 10
                parts.append(f'<path class="preempted" d="M{x + 3},{y - 5}l10,10m0,-10l-10,10"/>')
    parts.append("</g>")
    return "".join(parts)


# --- block map ------------------------------------------------------------------------------------


def block_map_html(blocks: BlockMap, colours: Hues) -> str:
    """The pool as a grid: coloured by request, hatched where shared, dim where only cached."""
    cells = "".join(_cell(cell, blocks.per_cell, colours) for cell in blocks.cells)
    each = "" if blocks.per_cell == 1 else f" · a cell is {blocks.per_cell} blocks"
    size = "large" if len(blocks.cells) <= 32 else "small"
    return (
        f'<div class="blocks {size}" role="img" aria-label="{blocks.num_blocks} blocks: '
        f"{blocks.used} used, {blocks.shared} of them shared, {blocks.cached} cached, "
        f'{blocks.free} free">{cells}</div>'
        f'<p class="legend">{_entry("used", f"used {blocks.used:,}")}'
        f"{_entry('shared', f'shared {blocks.shared:,}')}"
        f"{_entry('cached', f'cached {blocks.cached:,}')}"
        f"{_entry('free', f'free {blocks.free:,} of {blocks.num_blocks:,}{each}')}</p>"
    )


def _entry(kind: str, text: str) -> str:
    return f'<span class="entry"><span class="swatch {kind}"></span>{escape(text)}</span>'


def _cell(cell: Cell, per_cell: int, colours: Hues) -> str:
    if cell.shared:
        kind = "shared"
    elif cell.used:
        kind = "used"
    else:
        kind = "cached" if cell.cached else "free"
    hue = f" hue-{colours.get(cell.owners[0], 0)}" if cell.owners else ""
    name = (
        f"block {cell.first}"
        if per_cell == 1
        else f"blocks {cell.first}–{cell.first + per_cell - 1}"
    )
    held = f": held by {', '.join(map(short, cell.owners))}" if cell.owners else f": {kind}"
    times = f", {cell.ref_count} times" if cell.ref_count > 1 else ""
    label = str(cell.first) if per_cell == 1 else ""
    title = escape(name + held + times, quote=True)
    return f'<i class="{kind}{hue}" title="{title}"><b>{label}</b></i>'


# --- one step -------------------------------------------------------------------------------------


def step_html(view: StepView, colours: Hues) -> str:
    """A step's plan and its arrays."""
    notes = []
    if view.admitted:
        notes.append("admitted " + ", ".join(map(short, view.admitted)))
    if view.preempted:
        notes.append("preempted " + ", ".join(map(short, view.preempted)))
    if view.copies:
        notes.append("copied blocks " + ", ".join(f"{a}→{b}" for a, b in view.copies))
    if view.num_sequences > len(view.rows):
        notes.append(f"{view.num_sequences - len(view.rows)} more sequences not shown")
    note = f'<p class="hint">{escape("; ".join(notes))}</p>' if notes else ""
    return f"{_plan_table(view, colours)}{note}{_arrays(view, colours)}"


def _plan_table(view: StepView, colours: Hues) -> str:
    rows = "".join(
        f'<tr><th scope="row" class="hue-{colours.get(r.request_id, 0)}"><i></i>'
        f"{escape(short(r.request_id))}{f' #{r.choice}' if r.choice else ''}</th>"
        f"<td>{'prefill' if r.prefill else 'decode'}</td><td>{r.num_known}</td>"
        f"<td>{r.num_cached}</td><td>{r.num_scheduled}</td><td>{r.context_len}</td>"
        f"<td>{'yes' if r.samples else 'no'}</td></tr>"
        for r in view.rows
    )
    heads = "".join(
        f'<th scope="col" title="{escape(text, quote=True)}">{name}</th>'
        for name, text in (
            ("request", "row of the plan"),
            ("phase", "prefill computes the prompt, decode one new position"),
            ("known", "tokens known before the step"),
            ("cached", "positions whose KV exists before the step"),
            ("scheduled", "positions this step computes"),
            ("context", "positions with KV once the step has written its own"),
            ("samples", "whether the step picks a next token"),
        )
    )
    return (
        '<div class="scroll" tabindex="0" role="group" aria-label="Plan of the step">'
        f'<table class="plan"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _arrays(view: StepView, colours: Hues) -> str:
    def segments(pick: str) -> list[tuple[int, Sequence[int], int]]:
        return [
            (colours.get(r.request_id, 0), getattr(r, pick), _length(r, pick)) for r in view.rows
        ]

    shown = []
    if any(r.input_ids for r in view.rows):
        shown.append(_array("input_ids", segments("input_ids")))
    shown += [
        _array("positions", segments("positions")),
        _array("slot_mapping", segments("slot_mapping"), f"block × {view.block_size} + offset"),
        _array("block_tables", segments("block_table"), "one list a sequence"),
        _array("cu_seqlens_q", [(-1, view.cu_seqlens_q, len(view.cu_seqlens_q))]),
        _array(
            "context_lens", [(colours.get(r.request_id, 0), (r.context_len,), 1) for r in view.rows]
        ),
    ]
    return f'<dl class="arrays">{"".join(shown)}</dl>'


def _length(row: RowView, pick: str) -> int:
    return len(row.block_table) if pick == "block_table" else row.num_scheduled


def _array(name: str, segments: list[tuple[int, Sequence[int], int]], note: str = "") -> str:
    total = sum(length for _, _, length in segments)
    boxes = "".join(_segment(hue, values, length) for hue, values, length in segments)
    hint = f"<small>{escape(note)}</small>" if note else ""
    return f"<dt><code>{name}</code><small>[{total}]</small>{hint}</dt><dd>{boxes}</dd>"


def _segment(hue: int, values: Sequence[int], length: int) -> str:
    first, last = SHOWN_ENDS
    cut = length > MAX_BOXES or len(values) < length
    whole = "" if cut else "".join(f"<b>{v}</b>" for v in values)
    if cut:
        # Values may themselves be cut at the end; runs that count up tell theirs.
        ends = values[-last:] if len(values) == length else _counted(values, length, last)
        whole = (
            "".join(f"<b>{v}</b>" for v in values[:first])
            + f'<em title="{length - first - len(ends)} more">…</em>'
            + "".join(f"<b>{v}</b>" for v in ends)
        )
    return f'<span class="values hue-{hue}">{whole}</span>'


def _counted(values: Sequence[int], length: int, count: int) -> Sequence[int]:
    if len(values) > 1 and values[-1] - values[0] == len(values) - 1:
        end = values[0] + length
        return range(end - count, end)
    return ()


def ranges(values: Sequence[int]) -> str:
    """Numbers as text, runs shortened: ``0–255, 300``."""
    runs = []
    for _, group in groupby(enumerate(values), lambda pair: pair[1] - pair[0]):
        run = [value for _, value in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}")
    return ", ".join(runs)


def short(request_id: str) -> str:
    """A request id that fits a label."""
    bare = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
    return bare if len(bare) <= 10 else bare[:9] + "…"
