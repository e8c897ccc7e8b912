"""One answer of the chat page: from the stream's pieces to the message as it grows."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from dashboard.client import EngineApi, Piece, Usage
from dashboard.conversation import Message, Stats, reopened
from dashboard.pacing import Pacer
from infer.errors import CapacityError, EngineUnavailable, InferError


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An answer so far. Times are monotonic seconds; they and the counts are of this request."""

    started: float
    before: Message | None = None  # what it goes on with; ``text`` and ``reasoning`` hold it too
    settings: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    reasoning: str = ""
    first: float | None = None
    answer_began: float | None = None  # the first piece that is not reasoning
    last: float | None = None
    num_pieces: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None

    @classmethod
    def begin(cls, settings: Mapping[str, Any], before: Message | None) -> Draft:
        """The draft of a request that is sent now."""
        known = None if before is None else reopened(before)
        return cls(
            started=time.monotonic(),
            before=before,
            settings=dict(settings),
            text="" if known is None else known.text,
            reasoning="" if known is None else known.reasoning,
        )

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
        """The message to show."""
        ended = stopped or error is not None or self.finish_reason is not None
        return Message(
            role="assistant",
            text=self.text,
            reasoning=self.reasoning,
            thinking_s=self._thinking_s(ended),
            error=None if error is None else explain(error),
            stats=self._stats(stopped, error),
            settings=self.settings,
        )

    def _thinking_s(self, ended: bool) -> float | None:
        """How long the reasoning took; None while it goes on, or without any."""
        past = None if self.before is None else self.before.thinking_s
        if self.before is not None and self.before.text:
            return past  # it had ended before
        if not self.reasoning or not (self.answer_began or ended):
            return None
        if self.first is None:
            return past
        now = (self.answer_began or self.last or self.first) - self.first
        return round((past or 0.0) + now, 2)

    def _stats(self, stopped: bool, error: InferError | None) -> Stats:
        own = self._own_stats(stopped, error)
        past = None if self.before is None else self.before.stats
        if past is None:
            return own
        # One answer in several requests: the later prompts hold what was written before them.
        asked = own.prompt_tokens - past.completion_tokens
        prompt = max(0, asked) if self.usage is not None else past.prompt_tokens
        return Stats(
            ttft_s=own.ttft_s if past.ttft_s is None else past.ttft_s,
            total_s=round(past.total_s + own.total_s, 4),
            tokens_per_s=past.tokens_per_s if own.tokens_per_s is None else own.tokens_per_s,
            prompt_tokens=prompt,
            cached_tokens=past.cached_tokens
            if self.usage is None
            else min(own.cached_tokens, prompt),
            completion_tokens=past.completion_tokens + own.completion_tokens,
            finish_reason=own.finish_reason,
        )

    def _own_stats(self, stopped: bool, error: InferError | None) -> Stats:
        """Of this request alone."""
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
    request: Mapping[str, Any],
    fields: Mapping[str, Any],
    stop: asyncio.Event,
    before: Message | None = None,
) -> AsyncGenerator[Message, None]:
    """The answer to ``request``, growing; the last one has statistics. Setting ``stop`` ends it.

    ``fields`` are the settings. A request that goes on with the message ``before`` gives that
    message, growing. Errors become the message's ``error``. Closing the generator ends the request.
    """
    draft = Draft.begin(fields, before)
    body = {**request, **fields}
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
            return f"The engine's queue is full: {error} Wait a moment and try again."
        case EngineUnavailable():
            return f"The engine is not available: {error}"
        case _:
            said = re.sub(r"^request '[^']*': ", "", str(error))  # the reader has but this one
            return said[:1].upper() + said[1:]
