"""Running the requests of one HTTP request together and sending what they say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.types import Send

from infer.client import EngineClient
from infer.errors import EngineError, EngineUnavailable
from infer.server.choices import Choice, Delta
from infer.server.errors import ApiError, deadline_error, to_api_error
from infer.server.http import EventWriter, Record, send_json
from infer.server.params import Options
from infer.streams import RequestStream
from infer.types import (
    Event,
    FinishEvent,
    FinishReason,
    PromptLogprobsEvent,
    Request,
    TokenEvent,
)

LAST_WORD_S = 1.0  # for an error event to a reader that may have stopped reading


@dataclass(slots=True)
class Prompt:
    """One prompt's request and what becomes of it."""

    request: Request
    choices: Sequence[Choice]
    cached_tokens: int = 0
    logprobs: PromptLogprobsEvent | None = None


@dataclass(slots=True)
class Usage:
    """Token counts over all prompts and choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def document(self) -> dict[str, Any]:
        """The ``usage`` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class News:
    """What one choice gained in one turn."""

    prompt: Prompt
    choice: Choice
    delta: Delta
    tokens: Sequence[TokenEvent]


class Format(Protocol):
    """How a route writes its answer."""

    def whole(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """The answer in one document, without its usage."""

    def chunk(self, news: News) -> dict[str, Any]:
        """One choice's news as a streamed document."""

    def empty_chunk(self) -> dict[str, Any]:
        """A streamed document without choices, to carry the usage."""


@dataclass(slots=True)
class Generation:
    """Everything one answer needs, ready to run once."""

    client: EngineClient
    prompts: Sequence[Prompt]
    options: Options
    format: Format
    record: Record
    note_error: Callable[[ApiError], None]
    usage: Usage = field(default_factory=Usage)

    async def run(self, send: Send) -> None:
        """Generate and send the answer. An error before the first byte is raised."""
        self.usage.prompt_tokens = sum(len(p.request.prompt_token_ids) for p in self.prompts)
        self.record.prompt_tokens = self.usage.prompt_tokens
        try:
            if self.options.stream:
                await self._stream(EventWriter(send))
            else:
                await self._whole(send)
        finally:
            self.record.generated_tokens = self.usage.completion_tokens
            self.record.cached_tokens = self.usage.cached_tokens
            reasons = [c.finish_reason for p in self.prompts for c in p.choices]
            if self.record.finish is None and all(reasons):
                self.record.finish = ",".join(sorted({r for r in reasons if r is not None}))

    async def _whole(self, send: Send) -> None:
        async def keep(news: list[News]) -> None:
            pass  # the choices keep it

        async with self._deadline():
            await self._follow(keep)
        body = await self._written(
            lambda: [{**self.format.whole(self.prompts), "usage": self.usage.document()}]
        )
        await send_json(send, body[0])

    async def _stream(self, writer: EventWriter) -> None:
        options = self.options

        async def write(news: list[News]) -> None:
            chunks = await self._written(lambda: [self.format.chunk(n) for n in news])
            if options.include_usage:
                usage = self.usage.document() if options.continuous_usage else None
                chunks = [{**chunk, "usage": usage} for chunk in chunks]
            await writer.write(chunks)

        try:
            async with self._deadline():  # to the last byte, which a reader may not take either
                await self._follow(write)
                if options.include_usage:
                    chunk = {**self.format.empty_chunk(), "usage": self.usage.document()}
                    await writer.write([chunk])
                await writer.done()
        except Exception as error:
            if not writer.started:
                raise
            answer = to_api_error(error)
            self.note_error(answer)
            with suppress(TimeoutError):  # a reader that has stopped reading is cut off
                async with asyncio.timeout(LAST_WORD_S):
                    await writer.fail(answer)

    async def _written(self, documents: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Make documents; those with a prompt's log-probabilities, which are long, in a thread."""
        long = any(prompt.logprobs is not None for prompt in self.prompts)
        return await asyncio.to_thread(documents) if long else documents()

    async def _follow(self, tell: Callable[[list[News]], Awaitable[None]]) -> None:
        """Run every request to its end and tell what each turn brings.

        Raises:
            InferError: a request was refused, or the engine failed or stopped under it.
        """
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(
                    self.client.generate(prompt.request, arrival=self.record.arrival)
                )
                for prompt in self.prompts
            ]
            async with aclosing(_merged(streams)) as turns:
                async for i, events in turns:
                    news = self._take(self.prompts[i], events)
                    if news:
                        await tell(news)

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """A block that must end in the request's time.

        Raises:
            ApiError: it has not.
        """
        deadline = asyncio.timeout(self.record.arrival + self.options.timeout - time.monotonic())
        try:
            async with deadline:
                yield
        except TimeoutError:
            if deadline.expired():
                raise deadline_error(self.options.timeout) from None
            raise

    def _take(self, prompt: Prompt, events: tuple[Event, ...]) -> list[News]:
        """Apply events to their choices."""
        tokens: dict[int, list[TokenEvent]] = {}
        ends: dict[int, FinishEvent] = {}
        for event in events:
            match event:
                case TokenEvent():
                    tokens.setdefault(event.index, []).append(event)
                case FinishEvent():
                    self._check(event)
                    ends[event.index] = event
                case PromptLogprobsEvent():
                    prompt.logprobs = event
        if tokens and self.record.first_token is None:
            self.record.first_token = time.monotonic()
        if self.options.discard_output:
            tokens.clear()
        news = []
        for index in sorted({*tokens, *ends}):
            choice, new, end = prompt.choices[index], tokens.get(index, []), ends.get(index)
            self.usage.completion_tokens += len(new)
            if end is not None and prompt.cached_tokens < end.num_cached_tokens:
                self.usage.cached_tokens += end.num_cached_tokens - prompt.cached_tokens
                prompt.cached_tokens = end.num_cached_tokens
            delta = choice.push(new, end)
            if delta or end is not None or (new and new[0].logprob is not None):
                news.append(News(prompt, choice, delta, new))
        return news

    def _check(self, end: FinishEvent) -> None:
        if end.reason is FinishReason.ERROR:
            raise EngineError(end.error or "the engine could not finish the request")
        if end.reason is FinishReason.ABORT:
            raise EngineUnavailable("the server ended the request before it was complete")


async def _merged(
    streams: Sequence[RequestStream],
) -> AsyncGenerator[tuple[int, tuple[Event, ...]], None]:
    """The turns of several streams as they come, with the stream's number."""
    if len(streams) == 1:
        async for events in streams[0]:
            yield 0, events
        return
    turns = {_turn(stream): i for i, stream in enumerate(streams)}
    try:
        while turns:
            done, _ = await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = turns.pop(task)
                arrived = task.result()
                if arrived is not None:
                    turns[_turn(streams[i])] = i
                    yield i, arrived
    finally:
        for task in turns:
            task.cancel()
        await asyncio.gather(*turns, return_exceptions=True)


def _turn(stream: RequestStream) -> asyncio.Task[tuple[Event, ...] | None]:
    async def turn() -> tuple[Event, ...] | None:
        return await anext(stream, None)

    return asyncio.ensure_future(turn())
