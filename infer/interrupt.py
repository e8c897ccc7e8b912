"""Ctrl-C between steps, never inside one: a step that has begun also rebinds its state."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Hold a Ctrl-C back until the block has ended, then raise KeyboardInterrupt.

    A block of many steps calls what it is given after each of them: that raises it at once.
    Setting handlers costs as much as a tenth of a step, so a loop had better do it once.

    Does nothing outside the main thread, where Python delivers no signals, and nothing when the
    program handles SIGINT in its own way.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    seen: list[int] = []

    def check() -> None:
        if seen:
            raise KeyboardInterrupt

    def remember(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()
