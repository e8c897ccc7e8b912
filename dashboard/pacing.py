"""How often a streaming page redraws, so that many pages together stay cheap."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import TypeVar

FASTEST_S = 1 / 15  # one page alone: smooth for the eye, and cheap for its browser

T = TypeVar("T")


class Pacer:
    """Shares a number of redraws a second among the pages that stream."""

    def __init__(self, updates_per_s: float) -> None:
        self.updates_per_s = updates_per_s
        self._streams = 0

    @property
    def num_streams(self) -> int:
        """Pages streaming now."""
        return self._streams

    def interval(self, fastest_s: float = FASTEST_S) -> float:
        """Seconds between two redraws of one page."""
        return max(fastest_s, self._streams / self.updates_per_s)

    async def batches(
        self, source: AsyncGenerator[T, None], stop: asyncio.Event, fastest_s: float = FASTEST_S
    ) -> AsyncGenerator[list[T], None]:
        """What ``source`` gives, gathered into one list a redraw. The first comes at once.

        Ends early, and closes ``source``, when ``stop`` is set or the caller leaves. An error of
        ``source`` is raised after everything that came before it.
        """
        items: list[T] = []
        news = asyncio.Event()

        async def read() -> None:
            try:
                async for item in source:
                    items.append(item)
                    news.set()
            finally:
                await source.aclose()

        reader = asyncio.ensure_future(read())
        reader.add_done_callback(lambda _: news.set())
        stopper = asyncio.ensure_future(stop.wait())
        stopper.add_done_callback(lambda _: news.set())
        self._streams += 1
        try:
            while not stop.is_set():
                await news.wait()
                news.clear()
                if items:
                    batch, items[:] = list(items), []
                    drawn = time.monotonic()
                    yield batch
                    left = drawn + self.interval(fastest_s) - time.monotonic()
                    await asyncio.wait(
                        (reader, stopper),
                        timeout=max(0.0, left),
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                elif reader.done():
                    reader.result()
                    return
                if reader.done():
                    news.set()
            if items:
                yield list(items)
        finally:
            self._streams -= 1
            stopper.cancel()
            reader.cancel()
            await asyncio.wait((reader,))
            if not reader.cancelled():
                reader.exception()  # it was raised above, or nobody is left to hear it
