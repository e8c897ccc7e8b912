"""What the processes of the conversion tests run; free of transformers, so that they start fast."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from infer.convert import converted


def convert_until_killed(path: Path, root: Path, half_way: Any) -> None:
    def die(what: str, done: int, total: int) -> None:
        if done > total / 2:
            half_way.set()
            os.kill(os.getpid(), signal.SIGKILL)

    converted(path, die, root)


def convert_together(path: Path, root: Path, barrier: Any, results: Any) -> None:
    count = 0

    def tally(what: str, done: int, total: int) -> None:
        nonlocal count
        count += 1

    barrier.wait(60)
    folder = converted(path, tally, root)
    results.put((str(folder), count))
