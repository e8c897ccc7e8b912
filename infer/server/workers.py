"""Work that would hold up the event loop: templates, tokenization, large bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from infer.errors import CapacityError, RequestError

T = TypeVar("T")

PENDING_PER_WORKER = 256


class TextPool:
    """A few threads with a bounded queue and a time limit.

    A thread cannot be stopped: one whose work ran out of time stays busy until the work ends and
    counts against the bound until then, so that no request can take more than its share.
    """

    def __init__(self, workers: int, timeout: float) -> None:
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="text")
        self._limit = workers * PENDING_PER_WORKER
        self._timeout = timeout
        self._pending = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Do ``work`` in a thread.

        Raises:
            CapacityError: too much is waiting.
            RequestError: it took longer than the limit.
        """
        if self._pending >= self._limit:
            raise CapacityError(
                f"{self._pending} prompts wait to be tokenized, the limit is {self._limit}; "
                "try again later"
            )
        self._pending += 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        future.add_done_callback(self._done)
        done, _ = await asyncio.wait({future}, timeout=self._timeout)
        if not done:
            raise RequestError(
                f"the prompt was not tokenized within {self._timeout:g} s; shorten it",
                param="prompt",
            )
        return future.result()

    def close(self) -> None:
        """Drop what waits; does not wait for what runs."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _done(self, future: asyncio.Future[T]) -> None:
        self._pending -= 1
        if not future.cancelled():
            future.exception()  # seen, also when nobody waits any more
