"""Redraws are shared out, nothing is lost, and streams are closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from dashboard.pacing import Pacer

pytestmark = pytest.mark.anyio


async def numbers(count: int, every: float, closed: list[bool]) -> AsyncGenerator[int, None]:
    try:
        for i in range(count):
            yield i
            await asyncio.sleep(every)
    finally:
        closed.append(True)


async def test_everything_arrives_in_fewer_batches() -> None:
    closed: list[bool] = []
    pacer = Pacer(10)
    source = numbers(200, 0.002, closed)
    batches = [batch async for batch in pacer.batches(source, asyncio.Event())]
    assert [i for batch in batches for i in batch] == list(range(200))
    assert len(batches) <= 25 and closed == [True]
    assert pacer.num_streams == 0


async def test_many_streams_share_the_redraws() -> None:
    pacer = Pacer(20)
    count = 0

    async def page() -> None:
        nonlocal count
        async for _ in pacer.batches(numbers(100, 0.01, []), asyncio.Event()):
            count += 1

    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(page() for _ in range(10)))
    # each page's first and last come at once
    assert count <= 20 * (loop.time() - began) + 20


async def test_stop_ends_it_and_keeps_what_came() -> None:
    closed: list[bool] = []
    stop = asyncio.Event()
    seen: list[int] = []
    async for batch in Pacer(1000).batches(numbers(10_000, 0.001, closed), stop):
        seen += batch
        if len(seen) > 20:
            stop.set()
    assert seen == list(range(len(seen))) and len(seen) < 5000
    assert closed == [True]


async def test_leaving_closes_the_source() -> None:
    closed: list[bool] = []
    batches = Pacer(1000).batches(numbers(10_000, 0.001, closed), asyncio.Event())
    await anext(batches)
    await batches.aclose()
    assert closed == [True]


async def test_an_error_comes_after_what_came_before_it() -> None:
    async def failing() -> AsyncGenerator[int, None]:
        yield 1
        yield 2
        raise ValueError("broken")

    seen: list[int] = []

    async def read() -> None:
        async for batch in Pacer(1000).batches(failing(), asyncio.Event()):
            seen.extend(batch)

    with pytest.raises(ValueError, match="broken"):
        await read()
    assert seen == [1, 2]
