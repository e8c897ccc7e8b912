"""One choice of an answer: tokens become text, reasoning and tool calls as they arrive."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from infer.answers import ReasoningSplitter, ToolCall, ToolCallParser, opens_reasoning
from infer.server.params import Lead, Options, ToolUse
from infer.text import TextStream
from infer.tokenizer import Tokenizer
from infer.types import FinishEvent, FinishReason, TokenEvent

TAIL_TOKENS = 16  # of a prompt, enough to see an open tag at its end
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class Delta:
    """What a choice gained; false when it gained nothing."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # OpenAI's objects, with index

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    @classmethod
    def joined(cls, parts: Sequence[Delta]) -> Delta:
        """Several deltas as one."""
        return cls(
            content="".join(part.content for part in parts),
            reasoning="".join(part.reasoning for part in parts),
            tool_calls=[call for part in parts for call in part.tool_calls],
        )


class Reader(Protocol):
    """Splits an answer's text into what a chat client is shown."""

    def push(self, text: str) -> Delta:
        """Take the next text."""

    def finish(self) -> Delta:
        """What was held back, at the end."""


class PlainReader:
    """All of it is content."""

    def push(self, text: str) -> Delta:
        """Take the next text."""
        return Delta(content=text)

    def finish(self) -> Delta:
        """Nothing is held back."""
        return Delta()


class ChatReader:
    """Reasoning, then content, and calls of the tools that were offered."""

    def __init__(self, *, inside: bool, use: ToolUse, said: str = "") -> None:
        """``said``: text of the answer from before, which is not told again."""
        # An answer that was made to begin with a call is past its reasoning.
        self._splitter = ReasoningSplitter(inside=inside and not use.opening)
        self._calls = ToolCallParser() if use.tools else None
        self._num_calls = 0
        if self._calls is not None and use.opening:
            self._calls.push(use.opening)
        if said:
            content = self._splitter.resume(said)
            if self._calls is not None:
                self._calls.resume(content)

    def push(self, text: str) -> Delta:
        """Take the next text."""
        reasoning, content = self._splitter.push(text)
        return self._delta(reasoning, content, last=False)

    def finish(self) -> Delta:
        """What was held back, at the end."""
        reasoning, content = self._splitter.flush()
        return self._delta(reasoning, content, last=True)

    def _delta(self, reasoning: str, content: str, *, last: bool) -> Delta:
        if self._calls is None:
            return Delta(content, reasoning)
        shown, calls = self._calls.push(content)
        if last:
            rest, late = self._calls.flush()
            shown, calls = shown + rest, (*calls, *late)
        return Delta(shown, reasoning, [self._call(call) for call in calls])

    def _call(self, call: ToolCall) -> dict[str, Any]:
        index = self._num_calls
        self._num_calls += 1
        return {
            "index": index,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }


class Choice:
    """A choice while its answer is made. ``keep`` for answers that are sent as one document."""

    def __init__(self, index: int, stream: TextStream, reader: Reader, *, keep: bool) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.stop: str | int | None = None
        self.tokens: list[TokenEvent] = []
        self._stream = stream
        self._reader = reader
        self._keep = keep
        self._parts: list[Delta] = []
        self._called_tools = False

    def push(self, tokens: Sequence[TokenEvent], end: FinishEvent | None) -> Delta:
        """Take the next tokens, and the end if they are the last."""
        text = self._stream.push([token.token_id for token in tokens])
        if end is None:
            delta = self._reader.push(text)
        else:
            text += self._stream.finish(end.reason, end.stop)
            delta = Delta.joined([self._reader.push(text), self._reader.finish()])
        if self._keep:
            self.tokens += tokens
            self._parts.append(delta)
        self._called_tools = self._called_tools or bool(delta.tool_calls)
        if end is not None:
            self.stop = end.stop
            self.finish_reason = _REASONS.get(end.reason, str(end.reason))
            if self._called_tools and end.reason is FinishReason.STOP:
                self.finish_reason = "tool_calls"
        return delta

    @property
    def total(self) -> Delta:
        """Everything so far, when it is kept."""
        return Delta.joined(self._parts)


def text_choice(tokenizer: Tokenizer, options: Options, index: int) -> Choice:
    """A choice of ``/v1/completions``."""
    stream = TextStream(tokenizer, options.params, follows_text=True)
    return Choice(index, stream, PlainReader(), keep=not options.stream)


def chat_choice(
    tokenizer: Tokenizer,
    options: Options,
    index: int,
    *,
    prompt_ids: Sequence[int],
    use: ToolUse,
    lead: Lead,
) -> Choice:
    """A choice of ``/v1/chat/completions``; ``prompt_ids`` end before ``use.opening``.

    An answer that goes on with a message is read as if that text had been generated before it.
    """
    stream = TextStream(tokenizer, options.params, follows_text=bool(lead.text))
    inside = lead.is_reasoning or (not lead.text and in_reasoning(tokenizer, prompt_ids))
    reader = (
        ChatReader(inside=inside, use=use, said=lead.text)
        if lead.role == "assistant"
        else PlainReader()
    )
    return Choice(index, stream, reader, keep=not options.stream)


def in_reasoning(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether a prompt leaves the model inside ``<think>``."""
    return opens_reasoning(tokenizer.decode(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False))
