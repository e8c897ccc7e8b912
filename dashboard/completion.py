"""The Completion page: raw prompts, token probabilities, and two settings from one fork."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import gradio as gr

from dashboard.answering import explain
from dashboard.client import EngineApi, Piece, Usage
from dashboard.pacing import Pacer
from dashboard.sampling import Controls, build_few
from dashboard.status import notice
from dashboard.tokens import Token, tokens_html, tokens_of
from infer.errors import InferError, RequestError

TOP_N = 5
REDRAW_S = 0.2  # a redraw sends every token again
FORK_JS = """
const fork = (event) => {
  const token = event.target.closest('.token');
  if (token) trigger('fork', { index: Number(token.dataset.index) });
};
element.addEventListener('click', fork);
element.addEventListener('keydown', (event) => { if (event.key === 'Enter') fork(event); });
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One column's result."""

    prefix: str = ""  # of the other column, where this one was forked from it
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None

    def with_pieces(self, pieces: Sequence[Piece]) -> Completion:
        """The result after ``pieces``."""
        new = [t for p in pieces for t in tokens_of(p.text, p.logprobs)]
        return replace(
            self,
            tokens=(*self.tokens, *new),
            finish_reason=next(
                (p.finish_reason for p in pieces if p.finish_reason), self.finish_reason
            ),
            usage=next((p.usage for p in pieces if p.usage), self.usage),
        )

    def html(self, name: str) -> str:
        """The tokens, coloured by their probability."""
        if self.error is not None:
            return notice("The completion failed", self.error, kind="bad")
        note = ""
        if self.usage is not None:
            used = self.usage
            note = (
                f"{used.prompt_tokens} prompt tokens, {used.cached_tokens} of them from the cache; "
                f"{used.completion_tokens} generated; finish: {self.finish_reason}"
            )
        return tokens_html(name, self.tokens, prefix=self.prefix, note=note, forks=name == "A")


@dataclass(slots=True)
class CompletionPage:
    """The completion page of one application. ``running`` maps a session to its stop."""

    api: EngineApi
    pacer: Pacer
    running: dict[str, asyncio.Event] = field(default_factory=dict)

    def build(self) -> tuple[Controls, Controls]:
        """Place the page here and connect it; gives the controls of both columns."""
        prompt = gr.Textbox(
            value="The three primary colours are", label="Prompt", lines=3, max_lines=12,
            elem_id="prompt", info="goes to the model as it is, without a chat template",
        )  # fmt: skip
        with gr.Row(elem_classes="toolbar"):
            run = gr.Button("Complete", variant="primary", elem_id="complete", scale=0)
            halt = gr.Button("Stop", elem_id="complete-stop", scale=0, interactive=False)
            both = gr.Checkbox(
                value=False, label="Side by side", container=False, elem_id="side-by-side",
                info="B starts with A; a click on one of A's tokens forks B there",
            )  # fmt: skip
        with gr.Row(elem_classes="columns", equal_height=False):
            a, board_a = _column("a", "A", visible=True)
            b, board_b = _column("b", "B", visible=False)
        state = gr.State(Completion())
        asks = {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}
        boards = [board_a.html, board_b.html]
        outputs = [state, *boards, halt]

        async def complete(
            request: gr.Request, text: str, pair: bool, *values: Any
        ) -> AsyncGenerator[list[Any], None]:
            size = len(a.components)
            try:
                fields = {"A": a.settings(values[:size])}
                if pair:
                    fields["B"] = b.settings(values[size:])
            except RequestError as error:
                gr.Warning(str(error))
                return
            jobs = {name: (Completion(), text, chosen) for name, chosen in fields.items()}
            async with aclosing(self._run(request, jobs)) as updates:
                async for update in updates:
                    yield update

        async def fork(
            request: gr.Request,
            data: gr.EventData,
            text: str,
            pair: bool,
            result: Completion,
            *values: Any,
        ) -> AsyncGenerator[list[Any], None]:
            kept = result.tokens[: int(data._data["index"])]
            if not pair or not result.tokens:
                return
            prefix = "".join(token.text for token in kept)
            try:
                fields = b.settings(values[len(a.components) :])
            except RequestError as error:
                gr.Warning(str(error))
                return
            jobs = {"B": (Completion(prefix=prefix), text + prefix, fields)}
            async with aclosing(self._run(request, jobs)) as updates:
                async for update in updates:
                    yield update

        values = [*a.components, *b.components]
        run.click(complete, [prompt, both, *values], outputs, **asks)
        board_a.html.fork(fork, [prompt, both, state, *values], outputs, **asks)
        quick = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        halt.click(self._stop, None, None, **quick)
        both.input(lambda on: gr.update(visible=on), both, board_b.column, **quick)
        return a, b

    async def _run(
        self, request: gr.Request, jobs: Mapping[str, tuple[Completion, str, dict[str, Any]]]
    ) -> AsyncGenerator[list[Any], None]:
        """Run one or both columns together and show them growing."""
        session = request.session_hash or ""
        if session in self.running:
            gr.Info("A completion is still running; stop it first.")
            return
        stop = self.running[session] = asyncio.Event()
        shown = {name: job[0] for name, job in jobs.items()}
        try:
            yield _update(shown, running=True)
            streams = {name: self._follow(job, stop) for name, job in jobs.items()}
            async with aclosing(_together(streams)) as news:
                async for name, result in news:
                    shown[name] = result
                    yield _update({name: result}, running=True)
        finally:
            self.running.pop(session, None)
        yield _update(shown, running=False)

    async def _follow(
        self, job: tuple[Completion, str, dict[str, Any]], stop: asyncio.Event
    ) -> AsyncGenerator[Completion, None]:
        result, prompt, fields = job
        body = {"prompt": prompt, "logprobs": TOP_N, **fields}
        try:
            stream = self.pacer.batches(self.api.complete(body), stop, REDRAW_S)
            async with aclosing(stream) as batches:
                async for pieces in batches:
                    result = result.with_pieces(pieces)
                    yield result
        except InferError as error:
            yield replace(result, error=explain(error))

    def _stop(self, request: gr.Request) -> None:
        stop = self.running.get(request.session_hash or "")
        if stop is not None:
            stop.set()


@dataclass(frozen=True, slots=True)
class _Board:
    column: Any
    html: Any


def _column(prefix: str, name: str, *, visible: bool) -> tuple[Controls, _Board]:
    with gr.Column(visible=visible, min_width=300, elem_id=f"column-{prefix}") as column:
        html = gr.HTML(
            tokens_html(name, ()), elem_id=f"tokens-{prefix}", padding=False,
            apply_default_css=False, js_on_load=FORK_JS if name == "A" else None,
        )  # fmt: skip
        with gr.Accordion(f"Settings {name}", open=False, elem_id=f"settings-{prefix}"):
            controls = Controls(build_few(prefix, 48))
    return controls, _Board(column, html)


def _update(results: Mapping[str, Completion], *, running: bool) -> list[Any]:
    boards = [results[name].html(name) if name in results else gr.skip() for name in ("A", "B")]
    return [results.get("A", gr.skip()), *boards, gr.update(interactive=running)]


async def _together(
    streams: Mapping[str, AsyncGenerator[Completion, None]],
) -> AsyncGenerator[tuple[str, Completion], None]:
    """Values of several generators as they come. Leaving it closes them."""
    turns: dict[asyncio.Future[Completion], str] = {}
    try:
        for name, stream in streams.items():
            turns[asyncio.ensure_future(anext(stream))] = name
        while turns:
            done, _ = await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
            for turn in done:
                name = turns.pop(turn)
                try:
                    value = turn.result()
                except StopAsyncIteration:
                    continue
                yield name, value
                turns[asyncio.ensure_future(anext(streams[name]))] = name
    finally:
        for turn in turns:
            turn.cancel()
        if turns:
            await asyncio.wait(turns)
        for stream in streams.values():
            await stream.aclose()
