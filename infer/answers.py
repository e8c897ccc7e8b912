"""What a chat model's text says: reasoning, content and tool calls, separated while it arrives."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends inside ``<think>``, so that the answer begins there."""
    return prompt.rstrip().endswith(THINK)


class _Phase(Enum):
    START = 0  # a <think> may come
    REASONING = 1
    CONTENT = 2


class ReasoningSplitter:
    """Splits ``<think>reasoning</think>content``. Both lose the blank lines around the tags.

    Only a tag at the very beginning opens reasoning, and reasoning without an end goes on to the
    end of the answer. An answer that was cut off can be taken up again with ``resume``.
    """

    def __init__(self, *, inside: bool = False) -> None:
        """``inside``: the prompt has opened the tag already; see ``opens_reasoning``."""
        self._phase = _Phase.REASONING if inside else _Phase.START
        self._held = ""
        self._trim = inside  # drop newlines that come next
        self._told = 0  # characters of the held reasoning that the reader has

    def resume(self, text: str) -> str:
        """Begin after ``text``, which the reader has; returns the part of it that is content."""
        _, content = self.push(text)
        if self._phase is _Phase.REASONING:
            self._told = len(self._held)
            return content
        if self._phase is _Phase.START:  # blanks, or a piece of a tag, which is content
            content, self._held = self._held, ""
            self._phase = _Phase.CONTENT if text.strip() else _Phase.START
        return content

    def push(self, text: str) -> tuple[str, str]:
        """The (reasoning, content) that ``text`` adds."""
        self._held += text
        if self._phase is _Phase.START:
            start = self._held.lstrip()
            if start.startswith(THINK):
                self._enter(_Phase.REASONING, start[len(THINK) :])
            elif not THINK.startswith(start):
                self._phase = _Phase.CONTENT
        reasoning = self._reasoning() if self._phase is _Phase.REASONING else ""
        content = self._content() if self._phase is _Phase.CONTENT else ""
        return self._untold(reasoning), content

    def flush(self) -> tuple[str, str]:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        if self._phase is _Phase.REASONING:
            return self._untold(held.rstrip("\n")), ""
        return "", held.lstrip("\n") if self._trim else held

    def _untold(self, reasoning: str) -> str:
        told = min(self._told, len(reasoning))
        self._told -= told
        return reasoning[told:]

    def _enter(self, phase: _Phase, rest: str) -> None:
        self._phase, self._held, self._trim = phase, rest, True

    def _reasoning(self) -> str:
        self._drop_newlines()
        reasoning, tag, rest = self._held.partition(END_THINK)
        if tag:
            self._enter(_Phase.CONTENT, rest)
            return reasoning.rstrip("\n")
        # The tag, and the newlines before it, may still be incomplete.
        certain = reasoning[: len(reasoning) - overlap(reasoning, END_THINK)].rstrip("\n")
        self._held = reasoning[len(certain) :]
        return certain

    def _content(self) -> str:
        self._drop_newlines()
        content, self._held = self._held, ""
        return content

    def _drop_newlines(self) -> None:
        if self._trim:
            self._held = self._held.lstrip("\n")
            self._trim = not self._held


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function the model wants called; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCallParser:
    """Takes ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` out of an answer.

    A call is reported once it is complete. What looks like one and is not (malformed JSON, no name)
    stays content. White space around calls is dropped, except once between two parts of content.
    An answer that was cut off can be taken up again with ``resume``.
    """

    def __init__(self) -> None:
        self._held = ""  # text not yet reported: inside a call, its body so far
        self._inside = False
        self._gap = ""  # white space before the call that is open
        self._searched = 0  # no closing tag begins before this offset
        self._trim = False  # a call came last, white space after it is dropped
        self._between = ""  # white space from before it, for content that may follow
        self._began = False  # some content was reported
        self._told = 0  # characters of the content that comes next which the reader has

    def resume(self, text: str) -> None:
        """Begin after ``text``, which the reader has. A call that it leaves open is still read."""
        self.push(text)
        if self._trim:  # a call came last
            self._gap = self._between = ""
            self._held = self._held if self._inside else self._held.lstrip()
        self._told = len(self._held) + (len(self._gap) + len(CALL) if self._inside else 0)

    def push(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """The content and the complete calls that ``text`` adds."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while self._inside or CALL in self._held:
            if not self._inside:
                content.append(self._open())
            end = self._end_of_call()
            if end is None:
                return "".join(content), tuple(calls)
            body, self._held = self._held[:end], self._held[end + len(END_CALL) :]
            content.append(self._close(body, END_CALL, calls))
        certain = self._held[: len(self._held) - overlap(self._held, CALL)].rstrip()
        self._held = self._held[len(certain) :]
        content.append(self._shown(certain))
        return "".join(content), tuple(calls)

    def flush(self) -> tuple[str, tuple[ToolCall, ...]]:
        """What was held back, at the end of the answer. A whole call needs no closing tag."""
        held, self._held = self._held, ""
        calls: list[ToolCall] = []
        content = self._close(held, "", calls) if self._inside else self._shown(held)
        return content, tuple(calls)

    def _open(self) -> str:
        before, _, self._held = self._held.partition(CALL)
        content = before.rstrip()
        self._gap = before[len(content) :]
        self._inside, self._searched = True, 0
        return self._shown(content)

    def _close(self, body: str, tag: str, calls: list[ToolCall]) -> str:
        self._inside = False
        call = _parse_call(body)
        if call is None:
            return self._shown(f"{self._gap}{CALL}{body}{tag}")
        calls.append(call)
        self._told = 0  # it was the beginning of this call
        if not self._trim:
            self._between = self._gap if self._began else ""
        self._trim = True
        return ""

    def _shown(self, content: str) -> str:
        if self._trim:
            content = content.lstrip()
            self._trim = not content
            content = content and self._between + content
        self._began = self._began or bool(content)
        told = min(self._told, len(content))
        self._told -= told
        return content[told:]

    def _end_of_call(self) -> int | None:
        """Where the closing tag begins; one inside a JSON string closes nothing."""
        while (end := self._held.find(END_CALL, self._searched)) >= 0:
            quotes = _ESCAPE.sub("", self._held[:end]).count('"')
            if quotes % 2 == 0:
                return end
            self._searched = end + 1
        self._searched = max(0, len(self._held) - len(END_CALL) + 1)
        return None


_ESCAPE = re.compile(r"\\.", re.DOTALL)


def _parse_call(body: str) -> ToolCall | None:
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not value["name"] or not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``tag``, but not all of it."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
