"""How a conversation looks in the chat component: messages, thinking, statistics."""

from __future__ import annotations

from typing import Any

from dashboard.conversation import Conversation, Message, Stats, cut_off
from dashboard.markup import inert

FINISH = {
    "stop": "complete",
    "length": "cut at max tokens",
    "stopped": "stopped by you",
    "error": "failed",
}
CONTINUE = {"label": "Continue", "value": "continue"}


def display(conversation: Conversation) -> list[dict[str, Any]]:
    """Messages as ``gr.Chatbot`` takes them; the model can be asked to go on with the last one."""
    entries = [entry for message in conversation.messages for entry in _entries(message)]
    if cut_off(conversation) is not None:
        entries[-1] = {**entries[-1], "options": [CONTINUE]}
    return entries


def message_index(conversation: Conversation, entry_index: int) -> int | None:
    """Which message the text at ``entry_index`` of ``display`` is; None for an annotation."""
    at = 0
    for i, message in enumerate(conversation.messages):
        for entry in _entries(message):
            if at == entry_index:
                return None if "metadata" in entry else i
            at += 1
    return None


def stats_title(stats: Stats) -> str:
    """The line under an answer."""
    parts = []
    if stats.tokens_per_s is not None:
        parts.append(f"{stats.tokens_per_s:.1f} tokens/s")
    if stats.ttft_s is not None:
        parts.append(f"first token {_seconds(stats.ttft_s)}")
    parts.append(_tokens(stats.completion_tokens))
    if stats.finish_reason != "stop":
        parts.append(FINISH.get(stats.finish_reason, stats.finish_reason))
    return " · ".join(parts)


def stats_text(stats: Stats) -> str:
    """What the line opens to."""
    cached = f", {stats.cached_tokens} of them cached" if stats.cached_tokens else ", none cached"
    return (
        f"Prompt: {_tokens(stats.prompt_tokens)}{cached}  \n"
        f"Answer: {_tokens(stats.completion_tokens)} in {_seconds(stats.total_s)}  \n"
        f"Finish: {stats.finish_reason} ({FINISH.get(stats.finish_reason, 'ended')})"
    )


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _entries(message: Message) -> list[dict[str, Any]]:
    if message.role == "user":
        return [_entry("user", message.text)]
    entries = []
    if message.reasoning:
        pending = message.thinking_s is None
        metadata: dict[str, Any] = {"title": "Thinking", "status": "pending" if pending else "done"}
        if not pending:
            metadata = {"title": "Thought", "status": "done", "duration": message.thinking_s}
        entries.append(_entry("assistant", message.reasoning, metadata))
    if message.text or not (message.reasoning or message.error):
        entries.append(_entry("assistant", message.text))
    if message.error is not None:
        title = {"title": "The answer failed", "status": "done"}
        entries.append(_entry("assistant", message.error, {**title, "status": "pending"}))
    if message.stats is not None and message.stats.finish_reason and message.error is None:
        metadata = {"title": stats_title(message.stats), "status": "done"}
        entries.append(_entry("assistant", stats_text(message.stats), metadata))
    return entries


def _entry(role: str, text: str, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    # A list of parts is shown as it is; a bare string would lose its leading blanks.
    entry: dict[str, Any] = {"role": role, "content": [{"type": "text", "text": inert(text)}]}
    return entry if metadata is None else {**entry, "metadata": metadata}
