"""The engine's HTTP API as the pages use it: typed values come back, typed errors are raised."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from dashboard.insight import Insight
from dashboard.views import Timeline
from infer.errors import CapacityError, EngineError, EngineUnavailable, InferError, RequestError
from metrics.reader import Reading

CONNECT_S = 5.0
QUICK_S = 10.0  # for answers that take no step of the engine


class NotOffered(EngineError):
    """The engine answers, but does not have this route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one streamed document brought for one choice."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    logprobs: Mapping[str, Any] | None = None  # the completion route's four lists
    usage: Usage | None = None


class EngineApi:
    """A client of one engine; one event loop uses it. Connections are kept between calls."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(QUICK_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            trust_env=False,  # an engine is reached directly, whatever proxy the shell names
        )
        self.url = url

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def insight(self) -> Insight:
        """Model, limits, memory and versions.

        Raises:
            InferError: the engine cannot be reached, or tells less than this page needs.
        """
        return msgspec.json.decode(await self._get("/debug/engine"), type=Insight)

    async def timeline(self, step: int | None = None) -> Timeline:
        """The last steps, and step ``step`` (or the newest) in detail; errors as ``insight``."""
        query = {} if step is None else {"step": str(step)}
        return msgspec.json.decode(await self._get("/debug/steps", query), type=Timeline)

    async def reading(self, seconds: int, every: int) -> Reading:
        """Metrics with their history; errors as ``insight``."""
        query = {"seconds": str(seconds), "every": str(every)}
        return Reading.from_json(await self._get("/metrics/history", query))

    async def model_names(self) -> tuple[str, ...]:
        """The names the engine serves its model under; errors as ``insight``."""
        listing = json.loads(await self._get("/v1/models"))
        return tuple(card["id"] for card in listing["data"])

    async def chat(self, body: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Stream ``/v1/chat/completions``. Closing the generator ends the request.

        Raises:
            InferError: the engine refused the request, is full, or failed under it.
        """
        async with aclosing(self._stream("/v1/chat/completions", body)) as documents:
            async for document in documents:
                usage = _usage(document)
                for choice in document.get("choices") or ():
                    delta = choice.get("delta") or {}
                    yield Piece(
                        text=delta.get("content") or "",
                        reasoning=delta.get("reasoning_content") or "",
                        finish_reason=choice.get("finish_reason"),
                    )
                if usage is not None:
                    yield Piece(usage=usage)

    async def complete(self, body: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Stream ``/v1/completions``; otherwise as ``chat``."""
        async with aclosing(self._stream("/v1/completions", body)) as documents:
            async for document in documents:
                usage = _usage(document)
                for choice in document.get("choices") or ():
                    yield Piece(
                        text=choice.get("text") or "",
                        finish_reason=choice.get("finish_reason"),
                        logprobs=choice.get("logprobs"),
                    )
                if usage is not None:
                    yield Piece(usage=usage)

    async def _get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        try:
            answer = await self._http.get(path, params=dict(query or {}))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code == 404:
            raise NotOffered(f"this engine does not offer {path}; was it started with its pages?")
        if answer.status_code != 200:
            raise _refusal(answer.status_code, answer.content)
        return answer.content

    async def _stream(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
        patient = httpx.Timeout(None, connect=CONNECT_S)  # the engine keeps the deadline
        try:
            async with self._http.stream("POST", path, json=whole, timeout=patient) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    document = msgspec.json.decode(line[6:])
                    if "error" in document:
                        raise EngineError(str(document["error"].get("message", "failed")))
                    yield document
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: httpx.HTTPError) -> EngineUnavailable:
        return EngineUnavailable(
            f"the engine at {self.url} does not answer ({type(error).__name__}); is it running?"
        )


def _usage(document: Mapping[str, Any]) -> Usage | None:
    usage = document.get("usage")
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        cached_tokens=details.get("cached_tokens", 0),
    )


def _refusal(status: int, content: bytes) -> InferError:
    """The error an answer other than 200 stands for."""
    try:
        fault = json.loads(content)["error"]
        message, param = str(fault["message"]), fault.get("param")
    except (ValueError, KeyError, TypeError):
        message, param = f"the engine answered with status {status}", None
    if status == 429:
        return CapacityError(message)
    if status in (401, 403, 503):
        return EngineUnavailable(message)
    if 400 <= status < 500:
        return RequestError(message, param=param)
    return EngineError(message)
