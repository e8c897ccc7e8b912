"""The Inspector page: the running engine's last steps, and lessons on a private one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from html import escape
from typing import Any

import gradio as gr

from dashboard.client import EngineApi, NotOffered
from dashboard.drawing import (
    block_map_html,
    hues,
    short,
    step_html,
    timeline_html,
    timeline_names,
)
from dashboard.scenarios import LESSONS, Lesson
from dashboard.status import failure, notice, tile, tiles
from dashboard.views import Timeline
from infer.errors import InferError

PERIOD_S = 1.0
PICK_JS = """
element.addEventListener('click', (event) => {
  const column = event.target.closest('[data-step]');
  if (column) trigger('pick', { step: Number(column.dataset.step) });
});
element.addEventListener('keydown', (event) => {
  if (!event.target.closest('.track')) return;
  const columns = [...element.querySelectorAll('[data-step]')];
  const at = columns.findIndex((column) => column.classList.contains('chosen'));
  const next = columns[at + { ArrowLeft: -1, ArrowRight: 1 }[event.key]];
  if (next) { event.preventDefault(); trigger('pick', { step: Number(next.dataset.step) }); }
});
"""
UNWATCHED = (
    "It was started without its pages (--no-dashboard), so nobody notes its steps. The lessons run "
    "on an engine of this page and work anyway."
)
QUICK: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


@dataclass(slots=True)
class Classroom:
    """The lessons' model, made when the first reader comes."""

    _model: Any = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def begin(self, lesson: Lesson) -> Any:
        """A walk before its first step."""
        from dashboard.lessons import Walk, tiny_model  # brings torch, which other pages can spare

        async with self._lock:
            if self._model is None:
                self._model = await asyncio.to_thread(tiny_model)
        return await asyncio.to_thread(Walk.begin, lesson, self._model)


@dataclass(slots=True)
class InspectorPage:
    """The inspector of one engine."""

    api: EngineApi
    classroom: Classroom = field(default_factory=Classroom)

    def build(self, tab: Any) -> tuple[Any, Any]:
        """Place the page here; gives the timer and the switch that say when it is redrawn."""
        with gr.Tabs(elem_id="inspector-pages"):
            with gr.Tab("Running engine", id="live", elem_id="tab-live"):
                timer, live = self._build_live(tab)
            with gr.Tab("Lessons", id="lessons", elem_id="tab-lessons") as lessons:
                self._build_lessons(lessons)
        return timer, live

    # --- the running engine -----------------------------------------------------------------------

    def _build_live(self, tab: Any) -> tuple[Any, Any]:
        with gr.Row(elem_classes="toolbar"):
            live = gr.Checkbox(
                value=True, label="Live", container=False, elem_id="inspector-live", scale=0,
                min_width=90,
            )  # fmt: skip
            gr.HTML(
                '<p class="hint">Choose a step with a click, or with the arrow keys on the '
                "timeline. That pauses the view.</p>",
                padding=False,
                apply_default_css=False,
            )
        board = gr.HTML(
            "",
            elem_id="inspector-board",
            js_on_load=PICK_JS,
            padding=False,
            apply_default_css=False,
        )
        chosen = gr.State(None)
        timer = gr.Timer(PERIOD_S, active=False)

        async def redraw(step: int | None) -> str:
            try:
                return live_html(await self.api.timeline(step), step)
            except NotOffered:
                return notice("This engine's steps cannot be watched", UNWATCHED)
            except InferError as error:
                return failure(error)

        async def pick(data: gr.EventData) -> list[Any]:
            step = int(data._data["step"])
            return [step, False, gr.Timer(active=False), await redraw(step)]

        async def switch(running: bool, step: int | None) -> list[Any]:
            step = None if running else step
            return [step, gr.Timer(active=running), await redraw(step)]

        timer.tick(redraw, chosen, board, **QUICK)
        tab.select(redraw, chosen, board, **QUICK)
        board.pick(pick, None, [chosen, live, timer, board], **QUICK)
        live.input(switch, [live, chosen], [chosen, timer, board], **QUICK)
        return timer, live

    # --- lessons ----------------------------------------------------------------------------------

    def _build_lessons(self, tab: Any) -> None:
        choice = gr.Dropdown(
            [(lesson.title, lesson.key) for lesson in LESSONS], value=LESSONS[0].key,
            label="Lesson", elem_id="lesson", filterable=False,
        )  # fmt: skip
        intro = gr.HTML("", elem_id="lesson-intro", padding=False, apply_default_css=False)
        with gr.Row(elem_classes="toolbar stepper"):
            start = gr.Button("Start", elem_id="lesson-start", min_width=80, scale=0)
            back = gr.Button("◀ Back", elem_id="lesson-back", min_width=80, scale=0)
            slider = gr.Slider(
                0, 1, value=0, step=1, label="Steps made", elem_id="lesson-slider",
                buttons=[], interactive=True,
            )  # fmt: skip
            forward = gr.Button(
                "Step ▶", elem_id="lesson-step", variant="primary", min_width=80, scale=0
            )
        board = gr.HTML("", elem_id="lesson-board", padding=False, apply_default_css=False)
        walk = gr.State(None, time_to_live=3600)
        outputs = [walk, intro, board, slider, back, forward]

        async def begin(key: str) -> list[Any]:
            lesson = next(lesson for lesson in LESSONS if lesson.key == key)
            try:
                made = await self.classroom.begin(lesson)
            except InferError as error:
                return [None, "", failure(error), gr.skip(), gr.skip(), gr.skip()]
            return [made, intro_html(lesson), *_walk_updates(made)]

        async def enter(key: str, current: Any) -> list[Any]:
            return [gr.skip()] * len(outputs) if current is not None else await begin(key)

        async def move(current: Any, key: str, action: str, index: int = 0) -> list[Any]:
            if current is None:  # it has expired
                return await begin(key)
            work = {
                "forward": current.forward,
                "back": current.back,
                "go": lambda: current.go(index),
            }[action]
            await asyncio.to_thread(work)
            return [current, gr.skip(), *_walk_updates(current)]

        async def step(current: Any, key: str) -> list[Any]:
            return await move(current, key, "forward")

        async def step_back(current: Any, key: str) -> list[Any]:
            return await move(current, key, "back")

        async def go(current: Any, key: str, index: float) -> list[Any]:
            return await move(current, key, "go", int(index))

        async def restart(current: Any, key: str) -> list[Any]:
            return await move(current, key, "go", 0)

        choice.change(begin, choice, outputs, **QUICK)
        tab.select(enter, [choice, walk], outputs, **QUICK)
        forward.click(step, [walk, choice], outputs, **QUICK)
        back.click(step_back, [walk, choice], outputs, **QUICK)
        start.click(restart, [walk, choice], outputs, **QUICK)
        slider.release(go, [walk, choice, slider], outputs, **QUICK)


def _walk_updates(walk: Any) -> list[Any]:
    known = walk.num_known_steps
    end = known if walk.ended else known + 1
    done = walk.ended and walk.at == known
    return [
        walk_html(walk),
        gr.update(value=walk.at, maximum=max(1, end)),
        gr.update(interactive=walk.at > 0),
        gr.update(interactive=not done),
    ]


def live_html(timeline: Timeline, step: int | None) -> str:
    """The running engine's timeline, block map and one step."""
    if timeline.blocks is None or not timeline.steps:
        return notice("Nothing has run yet", "Ask the model something; its steps appear here.")
    colours = hues(timeline_names(timeline))
    last, detail = timeline.steps[-1], timeline.detail
    chosen = detail.step if detail is not None and step is not None else None
    head = tiles(
        tile("Step", f"{last.step:,}", f"{last.seconds * 1000:.1f} ms"),
        tile("Batch", str(last.num_sequences), "sequences in the last step"),
        tile("Positions", str(last.num_prefill + last.num_decode),
             f"{last.num_prefill} prefill, {last.num_decode} decode"),
        tile("Running", str(last.num_running), f"{last.num_waiting} waiting"),
    )  # fmt: skip
    body = "" if detail is None else step_html(detail, colours)
    number = "" if detail is None else f"Step {detail.step}"
    return (
        f"{head}"
        f'<section class="panel wide"><h3>Last steps</h3>'
        f"{timeline_html(timeline.steps, chosen, colours)}"
        '<p class="legend"><span class="entry"><span class="swatch prefill"></span>prefill</span>'
        '<span class="entry"><span class="swatch decode"></span>decode</span>'
        '<span class="entry"><span class="swatch end"></span>last token</span>'
        '<span class="entry"><span class="cross">✕</span> preempted</span></p>'
        "</section>"
        f'<section class="panel wide"><h3>Block pool, now</h3>'
        f"{block_map_html(timeline.blocks, colours)}</section>"
        f'<section class="panel wide"><h3>{number}</h3>{body}</section>'
    )


def intro_html(lesson: Lesson) -> str:
    """What a lesson is about, and its questions with their answers folded."""
    asked = "".join(
        f"<details><summary>{escape(question)}</summary><p>{escape(text)}</p></details>"
        for question, text in lesson.questions
    )
    engine = (
        f"blocks of {lesson.block_size} positions, {lesson.num_blocks} of them · "
        f"{lesson.max_num_seqs} rows · {lesson.max_num_batched_tokens} positions a step"
    )
    return (
        f'<div class="lesson-intro"><p>{escape(lesson.intro)}</p>'
        f'<p class="hint">Engine of this lesson: {engine}, and a model of two layers with random '
        f'weights.</p><div class="questions">{asked}</div></div>'
    )


def walk_html(walk: Any) -> str:
    """The lesson after the steps made so far."""
    frame, lesson = walk.frame, walk.lesson
    colours = {a.name: i for i, a in enumerate(lesson.arrivals)}
    note = lesson.notes[walk.at] if walk.at < len(lesson.notes) else _events(frame.events)
    end = " The end." if walk.ended and walk.at == walk.num_known_steps else ""
    rows = "".join(
        f'<tr><th scope="row" class="hue-{colours[s.name]}"><i></i>{escape(short(s.name))}</th>'
        f"<td>{s.status}</td><td>{s.num_known}</td><td>{s.num_cached}</td>"
        f"<td>{len(s.tokens)}</td><td><code>{escape(_ids(s.block_table))}</code></td>"
        f"<td><code>{escape(_ids(s.tokens))}</code></td></tr>"
        for s in frame.sequences
    )
    state = (
        '<div class="scroll" tabindex="0" role="group" aria-label="Requests after the step">'
        '<table class="plan"><thead><tr><th scope="col">request</th>'
        '<th scope="col">status</th><th scope="col">known</th><th scope="col">cached</th>'
        '<th scope="col">outputs</th><th scope="col">block table</th>'
        f'<th scope="col">generated</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )
    plan = (
        '<p class="hint">No step was made yet: press Step.</p>'
        if frame.step is None
        else step_html(frame.step, colours)
    )
    title = "Before the first step" if frame.step is None else f"Step {walk.at}: plan and inputs"
    return (
        f'<p class="lesson-note" role="status"><b>After {walk.at} '
        f"step{'' if walk.at == 1 else 's'}.</b> {escape(note)}{end}</p>"
        '<div class="lesson-grid">'
        f'<section class="panel"><h3>{title}</h3>{plan}</section>'
        f'<section class="panel"><h3>State after it</h3>{state}'
        f"<h4>Block pool</h4>{block_map_html(frame.blocks, colours)}"
        f"<h4>Events</h4>{_event_list(frame.events)}</section></div>"
    )


def _event_list(events: tuple[str, ...]) -> str:
    if not events:
        return '<p class="hint">none</p>'
    return f'<ul class="events">{"".join(f"<li>{escape(e)}</li>" for e in events)}</ul>'


def _events(events: tuple[str, ...]) -> str:
    return "; ".join(events) + "." if events else ""


def _ids(values: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, values)) + "]"
