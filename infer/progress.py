"""Progress of long work: a bar on a terminal, or a function of the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

Progress = Callable[[str, int, int], None]  # (what, bytes done, bytes in all)


@contextmanager
def byte_progress(
    what: str, total: int, progress: bool | Progress
) -> Iterator[Callable[[int], None]]:
    """Give a function that is told how many more bytes are done.

    Args:
        progress: True draws a bar on standard error when that is a terminal, once half a second
            has passed; a function is called with the running sum.
    """
    if callable(progress):
        done = 0

        def report(count: int) -> None:
            nonlocal done
            done += count
            progress(what, done, total)

        yield report
        return
    hidden = None if progress else True  # None: only on a terminal
    with tqdm(
        total=total, desc=what, unit="B", unit_scale=True, disable=hidden, delay=0.5, leave=False
    ) as bar:

        def draw(count: int) -> None:
            bar.update(count)

        yield draw
