"""One answer of the chat page: from the stream's pieces to the message as it grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from dashboard.client import EngineApi, Piece, Usage
from dashboard.conversation import Message, Stats
from dashboard.pacing import Pacer
from infer.errors import CapacityError, EngineUnavailable, InferError


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An answer so far. Times are monotonic seconds."""

    started: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    reasoning: str = ""
    first: float | None = None
    answer_began: float | None = None  # the first piece that is not reasoning
    last: float | None = None
    num_pieces: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None

    def with_pieces(self, pieces: Iterable[Piece]) -> Draft:
        """The draft after ``pieces``, which have just arrived."""
        now = time.monotonic()
        pieces = tuple(pieces)
        spoken = [p for p in pieces if p.text or p.reasoning]
        text = self.text + "".join(p.text for p in pieces)
        reasoning = self.reasoning + "".join(p.reasoning for p in pieces)
        begun = self.answer_began
        if begun is None and text:
            begun = now
        return replace(
            self,
            text=text,
            reasoning=reasoning,
            first=now if self.first is None and spoken else self.first,
            answer_began=begun,
            last=now if spoken else self.last,
            num_pieces=self.num_pieces + len(spoken),
            finish_reason=next(
                (p.finish_reason for p in pieces if p.finish_reason), self.finish_reason
            ),
            usage=next((p.usage for p in pieces if p.usage), self.usage),
        )

    def message(self, *, stopped: bool = False, error: InferError | None = None) -> Message:
        """The message to show; with statistics once it has ended."""
        ended = stopped or error is not None or self.finish_reason is not None
        thinking = None
        if self.reasoning and self.first is not None and (self.answer_began or ended):
            thinking = round((self.answer_began or self.last or self.first) - self.first, 2)
        return Message(
            role="assistant",
            text=self.text,
            reasoning=self.reasoning,
            thinking_s=thinking,
            error=None if error is None else explain(error),
            stats=self._stats(stopped, error) if ended else None,
            settings=self.settings,
        )

    def _stats(self, stopped: bool, error: InferError | None) -> Stats:
        usage = self.usage
        tokens = self.num_pieces if usage is None else usage.completion_tokens
        span = (self.last or 0.0) - (self.first or 0.0)
        reason = "error" if error is not None else "stopped" if stopped else self.finish_reason
        return Stats(
            ttft_s=None if self.first is None else round(self.first - self.started, 4),
            total_s=round(time.monotonic() - self.started, 4),
            tokens_per_s=round((tokens - 1) / span, 2) if tokens > 1 and span > 0 else None,
            prompt_tokens=0 if usage is None else usage.prompt_tokens,
            cached_tokens=0 if usage is None else usage.cached_tokens,
            completion_tokens=tokens,
            finish_reason=reason or "",
        )


async def answer(
    api: EngineApi,
    pacer: Pacer,
    messages: list[dict[str, str]],
    fields: Mapping[str, Any],
    stop: asyncio.Event,
) -> AsyncGenerator[Message, None]:
    """The answer to ``messages``, growing; the last one has statistics. Setting ``stop`` ends it.

    Errors become the message's ``error``. Closing the generator ends the request.
    """
    draft = Draft(started=time.monotonic(), settings=dict(fields))
    body = {"messages": messages, **fields}
    yield draft.message()
    try:
        async with aclosing(pacer.batches(api.chat(body), stop)) as batches:
            async for pieces in batches:
                draft = draft.with_pieces(pieces)
                # The last piece brings the usage; until then the answer has not ended.
                yield replace(draft, finish_reason=None).message()
    except InferError as error:
        yield draft.message(error=error)
        return
    yield draft.message(stopped=draft.finish_reason is None)


def explain(error: InferError) -> str:
    """An error in the words of the page."""
    match error:
        case CapacityError():
            return f"The engine's queue is full: {error} Wait a moment and press Retry."
        case EngineUnavailable():
            return f"The engine is not available: {error}"
        case _:
            return str(error)
