"""The bounded queue: how many sequences may be open at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infer.errors import CapacityError, RequestError


class Admission:
    """Counts open sequences (prompts x n), from before tokenization to the last byte."""

    def __init__(self, max_running: int, max_queue: int) -> None:
        self._limit = max_running + max_queue
        self._open = 0

    @property
    def num_open(self) -> int:
        """Sequences admitted now."""
        return self._open

    @contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Hold places for ``sequences``.

        Raises:
            RequestError: more than there are places at all.
            CapacityError: the places are taken now.
        """
        if sequences > self._limit:
            raise RequestError(
                f"the request has {sequences} sequences (prompts x n), "
                f"the server takes {self._limit} at a time; split it",
                param="prompt",
            )
        if self._open + sequences > self._limit:
            raise CapacityError(
                f"the server is full: {self._open} sequences are open, the limit is {self._limit}; "
                "try again later"
            )
        self._open += sequences
        try:
            yield
        finally:
            self._open -= sequences
