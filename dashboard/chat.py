"""The chat page: its layout and what its controls do."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import gradio as gr

from dashboard import conversation as talks
from dashboard.answering import answer
from dashboard.client import EngineApi
from dashboard.conversation import Conversation, Message
from dashboard.insight import Insight
from dashboard.markup import written
from dashboard.pacing import Pacer
from dashboard.sampling import Controls, build_controls
from dashboard.status import meter
from dashboard.transcript import display, message_index
from dashboard.turns import Phase, Turns
from infer.errors import InferError, RequestError

LATEX = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]
# The list is drawn in the browser from its own storage (static/page.js); these are its calls.
LIST_JS = """
purestep.list(element, {
  open: (data) => trigger('open', data),
  renamed: (data) => trigger('renamed', data),
  imported: (data) => trigger('imported', data),
});
"""
# Shown on narrow screens, where the side columns are folded away.
TOGGLES = (
    '<div class="panel-toggles"><button type="button" id="toggle-list" aria-expanded="false" '
    "onclick=\"purestep.toggle('list')\">Conversations</button>"
    '<button type="button" id="toggle-settings" aria-expanded="false" '
    "onclick=\"purestep.toggle('settings')\">Settings</button></div>"
)
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
SKIP = [gr.skip()] * 5  # the outputs of every question stay as they are
EMPTY = "### What shall we talk about?\nEverything stays on this machine."


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The chat page's components."""

    state: Any  # Conversation
    saved: Any  # the conversation as JSON on its way to the browser's storage
    bot: Any
    box: Any
    status: Any
    listing: Any
    fresh: Any
    system: Any
    thinking: Any
    controls: Controls


@dataclass(slots=True)
class ChatPage:
    """The chat page of one application."""

    api: EngineApi
    pacer: Pacer
    turns: Turns = field(default_factory=Turns)
    max_model_len: int | None = None

    def build(self) -> Parts:
        """Place the page here and connect it."""
        parts = _layout()
        self._connect(parts)
        return parts

    def _connect(self, p: Parts) -> None:
        inputs = [p.state, p.system, p.thinking, *p.controls.components]
        outputs = [p.state, p.bot, p.box, p.status, p.saved]

        def fields_of(thinking: bool, values: tuple[Any, ...]) -> dict[str, Any] | None:
            try:
                fields = p.controls.settings(values)
            except RequestError as error:
                gr.Warning(str(error))
                return None
            return fields if thinking else {**fields, **NO_THINKING}

        async def send(
            request: gr.Request,
            text: str,
            state: Conversation,
            system: str,
            thinking: bool,
            *values: Any,
        ) -> list[Any]:
            if not text.strip():
                return SKIP
            asked = talks.add(replace(state, system=system), Message(role="user", text=text))
            return await self._begin(request, asked, fields_of(thinking, values), "")

        async def retry(
            request: gr.Request, state: Conversation, system: str, thinking: bool, *values: Any
        ) -> list[Any]:
            asked = replace(_asked(state), system=system)
            return await self._begin(request, asked, fields_of(thinking, values))

        async def go_on(
            request: gr.Request, state: Conversation, system: str, thinking: bool, *values: Any
        ) -> list[Any]:
            before = talks.cut_off(state)
            if before is None:
                return SKIP
            asked = replace(talks.cut(state, len(state.messages) - 1), system=system)
            return await self._begin(request, asked, fields_of(thinking, values), before=before)

        async def edit(
            data: gr.EditData,
            request: gr.Request,
            state: Conversation,
            system: str,
            thinking: bool,
            *values: Any,
        ) -> list[Any]:
            index, text = _edited(state, data)
            if index is None:
                return SKIP
            if state.messages[index].role == "assistant":  # nothing is asked
                edited = talks.with_text(state, index, text)
                return await self._keep(request, state, edited)
            asked = talks.add(talks.cut(state, index), Message(role="user", text=text))
            asked = replace(asked, system=system)
            return await self._begin(request, asked, fields_of(thinking, values))

        # Three events an answer, because every output of every redraw costs a millisecond: one
        # shows the question, one lets the answer grow and redraws nothing else, one completes it.
        asks: dict[str, Any] = {
            "show_progress": "hidden",
            "concurrency_limit": None,
            "api_visibility": "private",
        }
        for began in (
            # Enter, pressed while a refusal is on its way, counts with what the page says then.
            p.box.submit(send, [p.box, *inputs], outputs, trigger_mode="always_last", **asks),
            p.bot.retry(retry, inputs, outputs, **asks),
            p.bot.option_select(go_on, inputs, outputs, **asks),
            p.bot.edit(edit, inputs, outputs, trigger_mode="multiple", **asks),
        ):
            # The end of one chain may still run when the next one's comes: both must.
            grown = began.then(self._grow, None, p.bot, trigger_mode="multiple", **asks)
            grown.then(self._finish, None, outputs, trigger_mode="multiple", **asks)
        quick = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        p.box.stop(self._stop, None, None, **quick)
        p.bot.undo(self._undo, p.state, outputs, **quick)
        p.fresh.click(self._fresh, None, [*outputs, p.system], **quick)
        # A second click on the list counts, however soon it comes.
        p.listing.open(self._open, None, [*outputs, p.system], trigger_mode="multiple", **asks)
        p.listing.imported(_imported, None, p.saved, trigger_mode="multiple", **asks)
        p.listing.renamed(_renamed, p.state, p.state, trigger_mode="multiple", **quick)
        p.saved.change(None, p.saved, None, js="(text) => { purestep.save(text); }")

    def start(
        self, stored: str | None, insight: Insight | None, parts: Parts
    ) -> tuple[list[Any], list[Any]]:
        """A page's first values, and the components they go to.

        ``stored`` is the conversation this browser tab had open, if any.
        """
        state = self._stored(stored)
        if insight is not None:
            self.max_model_len = insight.engine.max_model_len
        values = self._shown(state)
        known = insight is not None
        values += [
            state.system,
            gr.update(visible=not known or insight.thinking),  # type: ignore[union-attr]
            *parts.controls.updates(insight.defaults if insight is not None else {}),
        ]
        p = parts
        return values, [
            p.state, p.bot, p.box, p.status, p.saved, p.system, p.thinking, *p.controls.components,
        ]  # fmt: skip

    async def _begin(
        self,
        request: gr.Request,
        asked: Conversation,
        fields: dict[str, Any] | None,
        text: str | None = None,
        before: Message | None = None,
    ) -> list[Any]:
        """Show the question whose answer ``_grow`` will bring; ``text`` is left in the box.

        The answer may be there in part: what was written ``before``. It stays in the browser's
        storage as it is until there is more of it. Nothing happens without ``fields``: the user was
        told which setting is wrong.
        """
        if fields is None:
            return SKIP
        session = _session(request)
        if not await self.turns.free(session):
            gr.Info("An answer is still being written; stop it first.")
            return SKIP
        if not asked.messages:  # there is nothing to ask again
            return SKIP
        turn = self.turns.begin(session, asked, fields, before)
        box: dict[str, Any] = {"submit_btn": False, "stop_btn": True}
        if text is not None:
            box["value"] = text
        note = meter(None, "The engine is at work…")
        if before is None:
            return [asked, display(asked), gr.update(**box), note, talks.to_json(asked)]
        shown = display(talks.add(asked, talks.reopened(before)))
        return [turn.state, shown, gr.update(**box), note, gr.skip()]

    async def _keep(
        self, request: gr.Request, state: Conversation, edited: Conversation
    ) -> list[Any]:
        """Show ``edited``, whose answers the user has changed; nothing is asked."""
        if not await self.turns.free(_session(request)):
            gr.Info("An answer is still being written; stop it first.")
            edited = state
        return [edited, display(edited), gr.skip(), gr.skip(), talks.to_json(edited)]

    async def _grow(self, request: gr.Request) -> AsyncGenerator[Any, None]:
        """The answer, growing."""
        session = _session(request)
        turn = self.turns.take(session)
        if turn is None:
            yield gr.skip()  # a generator that yields nothing would empty the conversation's view
            return
        if turn.before is None:
            body: dict[str, Any] = {"messages": talks.wire_messages(turn.asked)}
        else:
            body = talks.wire_continued(turn.asked, talks.reopened(turn.before))
        stream = answer(self.api, self.pacer, body, turn.fields, turn.stop, turn.before)
        try:
            async with aclosing(stream) as drafts:
                async for message in drafts:
                    turn.state = talks.add(turn.asked, message)
                    # Gradio sends the last value again at the end, when a tab that was left
                    # shows something else: that must then be the last value.
                    yield display(turn.state if turn.instead is None else turn.instead)
            turn.phase = Phase.GROWN
        except Exception:
            turn.phase = Phase.GROWN  # a fault of ours must not leave the box without its button
            raise
        finally:
            if turn.phase is Phase.GROWING:  # nobody is there any more to finish it
                self.turns.abandon(session, turn)

    async def _finish(self, request: gr.Request) -> list[Any]:
        """The complete answer, and the box ready for the next question."""
        turn = self.turns.finish(_session(request))
        if turn is None:
            return SKIP
        idle = gr.update(submit_btn=True, stop_btn=False)
        if turn.instead is not None:
            kept = talks.file_json((turn.state,)) if turn.kept else gr.skip()
            return [gr.skip(), display(turn.instead), idle, gr.skip(), kept]
        state = turn.state
        return [state, display(state), idle, self._meter(state), talks.to_json(state)]

    async def _stop(self, request: gr.Request) -> None:
        self.turns.stop(_session(request))

    async def forget(self, request: gr.Request) -> None:
        """The tab was closed."""
        self.turns.forget(_session(request))

    async def _fresh(self, request: gr.Request) -> list[Any]:
        state = talks.new()
        self.turns.leave(_session(request), state)
        return [*self._shown(state), ""]

    async def _undo(self, state: Conversation, request: gr.Request) -> list[Any]:
        """Take the last turn back; its text returns to the box."""
        kept = _asked(state)
        text = kept.messages[-1].text if kept.messages else ""
        state = talks.cut(kept, max(0, len(kept.messages) - 1))
        self.turns.leave(_session(request), state, kept=False)
        values = self._shown(state)
        values[2] = gr.update(value=text)
        return values

    async def _open(self, data: gr.EventData, request: gr.Request) -> list[Any]:
        state = self._stored(data._data.get("text"))
        self.turns.leave(_session(request), state)
        return [*self._shown(state), state.system]

    def _stored(self, text: str | None) -> Conversation:
        """The conversation in the browser's storage, or a new one."""
        if not text:
            return talks.new()
        try:
            return talks.without_gap(self.turns.regained(talks.from_json(text)))
        except RequestError as error:
            gr.Warning(str(error))
            return talks.new()

    def _shown(self, state: Conversation) -> list[Any]:
        return [state, display(state), gr.skip(), self._meter(state), talks.to_json(state)]

    def _meter(self, state: Conversation) -> str:
        stats = next((m.stats for m in reversed(state.messages) if m.stats is not None), None)
        used = 0 if stats is None else stats.prompt_tokens + stats.completion_tokens
        return meter(used, "", self.max_model_len)


def _layout() -> Parts:
    state = gr.State(talks.new)
    saved = gr.Textbox(visible="hidden", elem_id="saved-conversation", label="Saved conversation")
    gr.HTML(TOGGLES, padding=False, apply_default_css=False, elem_id="chat-toggles")
    with gr.Row(elem_id="chat-page"):
        with gr.Column(elem_id="chat-list", elem_classes="side", min_width=220, scale=0):
            fresh = gr.Button("New conversation", elem_id="new-conversation", variant="secondary")
            listing = gr.HTML(
                "",
                js_on_load=LIST_JS,
                elem_id="conversations",
                padding=False,
                apply_default_css=False,
            )
        with gr.Column(elem_id="chat-main", min_width=300, scale=1):
            bot = gr.Chatbot(
                elem_id="bot", label="Conversation", show_label=False, height="100%",
                layout="bubble", buttons=["copy"], editable="all", latex_delimiters=LATEX,
                placeholder=EMPTY, allow_tags=False, feedback_options=None, container=False,
                autoscroll=False,  # it would pull a reader down again (see static/page.js)
            )  # fmt: skip
            box = gr.Textbox(
                elem_id="msg", label="Message", show_label=False, container=False, lines=1,
                max_lines=8, placeholder="Message the model",
                submit_btn=True, stop_btn=False, autofocus=True,
            )  # fmt: skip
            status = gr.HTML(
                meter(0, ""), elem_id="chat-status", padding=False, apply_default_css=False
            )
        with gr.Column(elem_id="chat-settings", elem_classes="side", min_width=250, scale=0):
            system = gr.Textbox(
                value="",
                elem_id="system", label="System prompt", lines=3, max_lines=10,
                placeholder="How should the model behave?",
            )  # fmt: skip
            thinking = gr.Checkbox(
                value=True, label="Thinking", info="let the model reason first", elem_id="thinking"
            )
            controls = build_controls("chat")
    return Parts(
        state=state, saved=saved, bot=bot, box=box, status=status, listing=listing, fresh=fresh,
        system=system, thinking=thinking, controls=controls,
    )  # fmt: skip


def _session(request: gr.Request) -> str:
    return request.session_hash or ""


def _asked(state: Conversation) -> Conversation:
    """``state`` up to its last question."""
    length = len(state.messages)
    while length and state.messages[length - 1].role != "user":
        length -= 1
    return talks.cut(state, length)


def _edited(state: Conversation, data: gr.EditData) -> tuple[int | None, str]:
    """Which message has which new text; None where there is nothing to do.

    An answer's parts come together, each as an event of its own, changed or not.
    """
    at = data.index if isinstance(data.index, int) else data.index[0]
    index, text = message_index(state, at), written(str(data.value))
    if index is None or not text.strip():
        return None, text
    message = state.messages[index]
    return (None if message.role == "assistant" and text == message.text else index), text


async def _renamed(data: gr.EventData, state: Conversation) -> Conversation:
    """The open conversation under the title it was given in the list."""
    title, name = data._data.get("title"), data._data.get("id")
    return replace(state, title=str(title)) if name == state.id and title else state


async def _imported(data: gr.EventData) -> Any:
    """Check a file's conversations; the browser stores what comes back."""
    try:
        return talks.file_json(talks.parse_file(str(data._data.get("text"))))
    except InferError as error:
        gr.Warning(str(error))
        return gr.skip()
