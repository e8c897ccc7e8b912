"""Twenty pages streaming at once beside the real engine, against as many bare API streams."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from tests.ui.gradio_client import PageClient
from tests.ui.screenshots import server

PAGES, TOKENS, ROUNDS = 20, 24, 3
QUESTION = "Tell me about number {}, and about everything that comes to your mind with it."

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_twenty_pages_cost_at_most_a_tenth() -> None:
    with server(None) as url:
        bare, pages = asyncio.run(_compare(url))
    print(f"tokens/s: bare API {bare}, pages {pages}")
    assert max(pages) >= 0.9 * max(bare)


async def _compare(url: str) -> tuple[list[float], list[float]]:
    """Tokens a second of the engine under both loads, in turns."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as http:
        config = (await http.get(f"{url}/ui/config")).json()

        async def page(question: str) -> None:
            client = PageClient(http, config, f"{url}/ui")  # a new conversation
            async for _ in client.ask(question, TOKENS):
                pass

        async def bare(question: str) -> None:
            body = {
                "messages": [{"role": "user", "content": question}],
                "max_tokens": TOKENS,
                "temperature": 1.0,  # what the pages' controls say before they are loaded
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                async for _ in answer.aiter_lines():
                    pass

        results: dict[str, list[float]] = {"bare": [], "page": []}
        await _rate(http, url, bare, 0)  # warm
        await _rate(http, url, page, 0)
        for i in range(1, ROUNDS + 1):
            results["bare"].append(await _rate(http, url, bare, i))
            results["page"].append(await _rate(http, url, page, i))
    return results["bare"], results["page"]


async def _rate(
    http: httpx.AsyncClient, url: str, ask: Callable[[str], Awaitable[None]], turn: int
) -> float:
    before, began = await _generated(http, url), time.monotonic()
    questions = [QUESTION.format(100 * turn + i) for i in range(PAGES)]
    await asyncio.gather(*(ask(question) for question in questions))
    seconds = time.monotonic() - began
    return round((await _generated(http, url) - before) / seconds, 2)


async def _generated(http: httpx.AsyncClient, url: str) -> float:
    text = (await http.get(f"{url}/metrics")).text
    match = re.search(r"^infer_generation_tokens_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    assert match is not None
    return float(match[1])
