"""Imported by every Python process that has this folder in its path: a fault in one rank's step.

``FAULT=RANK:STEP:KIND`` names the rank (by the worker's command line), the forward pass that is
faulty, and what happens in it: ``raise``, ``hang`` or ``token`` (samples another token). With
``poor`` nothing fails, but the rank has a third of the memory for KV; with ``refuse`` it refuses an
engine that the others make.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

RANK, _, REST = os.environ.get("FAULT", "").partition(":")
if RANK and sys.orig_argv[-3:-2] == [RANK]:
    import itertools

    from infer import device_step

    step, kind = REST.split(":")
    if kind == "poor":
        from infer import initialize

        initialize.CPU_KV_BYTES //= 3
    if kind == "refuse":
        from infer import channel, errors, initialize

        def refuse(*_: Any) -> Any:
            raise errors.ConfigError("this rank is of another opinion")

        channel.REFUSED_S = 1.0
        initialize.make_ops = refuse
    original, calls = device_step.pick, itertools.count(1)

    def faulty(*arguments: Any) -> Any:
        values, rows = original(*arguments)
        if next(calls) == int(step):
            if kind == "raise":
                raise RuntimeError("an injected fault")
            if kind == "hang":
                threading.Event().wait()
            if kind == "token":
                values.tokens.add_(1).remainder_(97)
        return values, rows

    device_step.pick = faulty
