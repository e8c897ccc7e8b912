"""What an engine tells its dashboard beside the OpenAI routes: a value and the routes for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import Response

from infer.errors import RequestError
from infer.types import EngineInfo
from metrics.reader import Reading

ReadMetrics = Callable[[int, int], Reading]  # seconds, every
ReadSteps = Callable[
    [int | None], Awaitable[str]
]  # a step's number or None for the newest -> Timeline JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Insight:
    """An engine as the Model page shows it and as the chat page's controls start."""

    engine: EngineInfo
    defaults: Mapping[str, float] = field(default_factory=dict)  # sampling defaults by name
    thinking: bool = False  # the chat template knows ``enable_thinking``
    chat_template: str | None = None

    @classmethod
    def of(
        cls, engine: EngineInfo, *, defaults: Mapping[str, Any], chat_template: str | None
    ) -> Insight:
        """An insight from what ``infer.load`` and ``infer.init`` know."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return cls(
            engine=engine,
            defaults={n: float(defaults[n]) for n in names if defaults.get(n) is not None},
            thinking="enable_thinking" in (chat_template or ""),
            chat_template=chat_template,
        )


def insight_routes(
    insight: Insight,
    read_metrics: ReadMetrics | None = None,
    read_steps: ReadSteps | None = None,
) -> APIRouter:
    """``/debug/engine``, ``/debug/steps`` and ``/metrics/history`` for a server's application.

    No prompt, answer or token id leaves through them. A route without its source is not there.
    """
    router = APIRouter(tags=["insight"])
    described = msgspec.json.encode(insight)

    @router.get("/debug/engine")
    async def engine() -> Response:
        """Model, limits, memory and versions."""
        return Response(described, media_type="application/json")

    if read_steps is not None:

        @router.get("/debug/steps")
        async def steps(step: int | None = Query(None, ge=0)) -> Response:
            """The last steps, the block pool, and one step in detail."""
            return Response(await read_steps(step), media_type="application/json")

    if read_metrics is not None:

        @router.get("/metrics/history")
        async def history(seconds: int = 900, every: int = 1) -> Response:
            """A reading of the metrics with its history, as JSON."""
            try:
                reading = await asyncio.to_thread(read_metrics, seconds, every)
            except RequestError as error:
                return Response(str(error), status_code=400, media_type="text/plain")
            return Response(reading.to_json(), media_type="application/json")

    return router
