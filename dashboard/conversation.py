"""A conversation as a value: shown by the chat page, kept in the browser, exported, imported."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar
from uuid import uuid4

import msgspec

from infer.errors import RequestError

FORMAT = "purestep.conversations"
VERSION = 1
MAX_TITLE = 60
T = TypeVar("T")
UNTITLED = "New conversation"
UNANSWERED = "The page was left before an answer was complete. Retry asks again."
CUT_OFF = ("length", "stopped", "error")  # the ends of an answer that was not complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """How one answer went, as the page saw it."""

    ttft_s: float | None = None  # sending the request to the first token
    total_s: float = 0.0
    tokens_per_s: float | None = None  # of the tokens after the first
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache
    completion_tokens: int = 0
    finish_reason: str = ""  # stop, length, stopped (by the user) or error; blank: not yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. Assistant turns may carry reasoning, statistics and the settings they ran with."""

    role: Literal["user", "assistant"]
    text: str
    reasoning: str = ""
    thinking_s: float | None = None
    error: str | None = None
    stats: Stats | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages in order, under an id that never changes."""

    id: str
    title: str
    created: float  # Unix seconds
    updated: float
    system: str = ""
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    format: str
    version: int
    conversations: tuple[Conversation, ...]


def new() -> Conversation:
    """An empty conversation."""
    now = round(time.time(), 3)
    return Conversation(id=uuid4().hex, title=UNTITLED, created=now, updated=now)


def add(conversation: Conversation, message: Message) -> Conversation:
    """``conversation`` with ``message`` at its end; the first question becomes its title."""
    title = conversation.title
    if title == UNTITLED and message.role == "user":
        title = _title(message.text)
    return replace(
        conversation,
        title=title,
        updated=round(time.time(), 3),
        messages=(*conversation.messages, message),
    )


def with_text(conversation: Conversation, index: int, text: str) -> Conversation:
    """``conversation`` whose message ``index`` says ``text``."""
    message = replace(conversation.messages[index], text=text)
    messages = (*conversation.messages[:index], message, *conversation.messages[index + 1 :])
    return replace(conversation, updated=round(time.time(), 3), messages=messages)


def cut(conversation: Conversation, length: int) -> Conversation:
    """The first ``length`` messages."""
    return replace(conversation, messages=conversation.messages[:length])


def wire_messages(conversation: Conversation) -> list[dict[str, str]]:
    """The messages of a request. Answers that failed, and past reasoning, are left out."""
    system = conversation.system.strip()
    messages = [{"role": "system", "content": system}] if system else []
    messages += [
        {"role": message.role, "content": message.text}
        for message in conversation.messages
        if message.text or message.role == "user"
    ]
    return messages


def cut_off(conversation: Conversation) -> Message | None:
    """The last answer, if it began and did not come to its own end; the model can go on with it."""
    last = conversation.messages[-1] if conversation.messages else None
    if last is None or last.stats is None or not (last.text or last.reasoning):
        return None
    return last if last.stats.finish_reason in CUT_OFF else None


def left(conversation: Conversation) -> Conversation | None:
    """``conversation``, whose last answer was left while it grew; None if it had not begun."""
    last = conversation.messages[-1]
    if last.stats is None or not (last.text or last.reasoning):
        return None
    stats = last.stats
    if not stats.finish_reason:
        stats = replace(stats, finish_reason="stopped")
    thinking = last.thinking_s
    if last.reasoning and thinking is None:
        thinking = stats.total_s
    last = replace(last, stats=stats, thinking_s=thinking)
    return replace(conversation, messages=(*conversation.messages[:-1], last))


def without_gap(conversation: Conversation) -> Conversation:
    """``conversation``, whose last question may have got no answer; then it is said."""
    if not conversation.messages or conversation.messages[-1].role != "user":
        return conversation
    return add(conversation, Message(role="assistant", text="", error=UNANSWERED))


def reopened(message: Message) -> Message:
    """A ``cut_off`` message as it was before its end: without half a character there."""
    return replace(message, text=message.text.rstrip("\ufffd"), error=None, stats=None)


def wire_continued(conversation: Conversation, message: Message) -> dict[str, Any]:
    """The fields of a request that goes on with ``message`` after ``conversation``."""
    last = {"role": "assistant", "content": message.text}
    if message.reasoning:
        last["reasoning_content"] = message.reasoning
    return {
        "messages": [*wire_messages(conversation), last],
        "add_generation_prompt": False,
        "continue_final_message": True if message.text else "reasoning_content",
    }


def to_json(conversation: Conversation) -> str:
    """One conversation, for the browser's storage."""
    return msgspec.json.encode(conversation).decode()


def from_json(text: str) -> Conversation:
    """The inverse of ``to_json``.

    Raises:
        RequestError: ``text`` is no conversation.
    """
    return _decode(text, Conversation)


def parse_file(text: str) -> tuple[Conversation, ...]:
    """Conversations of an exported file.

    Raises:
        RequestError: it is no such file, or of a later version.
    """
    file = _decode(text, _File)
    if file.format != FORMAT or file.version > VERSION:
        raise RequestError(
            f"the file has format {file.format!r}, version {file.version}; "
            f"this page reads {FORMAT!r} up to version {VERSION}"
        )
    return file.conversations


def file_json(conversations: tuple[Conversation, ...]) -> str:
    """An exported file; the inverse of ``parse_file``."""
    file = _File(format=FORMAT, version=VERSION, conversations=conversations)
    return msgspec.json.format(msgspec.json.encode(file), indent=1).decode()


def _decode(text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise RequestError(f"this is not a conversation of this page: {error}") from error


def _title(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_TITLE else line[: MAX_TITLE - 1].rstrip() + "…"
