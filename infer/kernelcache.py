"""Fill Triton's cache on disk from several processes, before an engine compiles for itself.

A rehearsal runs all that the engine will run, while a hook notes each kernel that is not compiled
yet and keeps it from being compiled and launched. What was noted is compiled by the forks of one
process, ``infer.kernelworker``: compiling holds the interpreter lock, so threads would not help.
The engine then finds every kernel on disk.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
import xxhash
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

logger = logging.getLogger(__name__)

TIMEOUT_S = 300.0
FEW = 4  # kernels that an engine compiles by itself before a worker has started


@dataclass(frozen=True, slots=True)
class Wanted:
    """One kernel to compile: where it is defined, and Triton's own account of one variant."""

    module: str
    name: str
    variant: str  # JSON, for ``JITFunction.preload``


@dataclass(slots=True)
class Compilations:
    """A hook of Triton's that counts the kernels this process has compiled or loaded."""

    following: Callable[..., Any] | None = None
    count: int = field(default=0, init=False)

    def __call__(self, **event: Any) -> None:
        """Called by Triton after each."""
        self.count += 1
        if self.following is not None:
            self.following(**event)


def compilations() -> Compilations:
    """The count of this process, which starts with the first call."""
    runtime = triton.knobs.runtime
    hook = runtime.jit_post_compile_hook
    if not isinstance(hook, Compilations):
        hook = runtime.jit_post_compile_hook = Compilations(following=hook)
    return hook


def fill(rehearsal: Callable[[], None]) -> None:
    """Compile the kernels that ``rehearsal`` launches, unless that was done before.

    A worker that fails costs time, not correctness: the engine compiles what is missing.
    """
    wanted, sources = rehearse(rehearsal)
    if len(wanted) <= FEW:
        return
    done = _marker(wanted, sources)
    if not done.exists() and compile_all(wanted):
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


def rehearse(rehearsal: Callable[[], None]) -> tuple[list[Wanted], set[str]]:
    """The kernels that ``rehearsal`` wants, in the order of their first use, and digests of their
    sources. None of them runs.
    """
    wanted: dict[Wanted, None] = {}
    sources: set[str] = set()

    def note(*, fn: Any, compile: Any, **_: Any) -> bool:
        wanted[Wanted(fn.module, fn.name, compile["specialization_data"])] = None
        sources.add(fn.jit_function.cache_key)
        return True  # do not compile, do not launch

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        # A kernel that is compiled already must not run either, on what others did not write.
        return launch(kernel, *args, grid=grid, warmup=True, **kwargs)

    runtime, launch = triton.knobs.runtime, JITFunction.run
    before, runtime.jit_cache_hook = runtime.jit_cache_hook, note
    JITFunction.run = run
    try:
        rehearsal()
    finally:
        JITFunction.run = launch
        runtime.jit_cache_hook = before
    return list(wanted), sources


def compile_all(wanted: list[Wanted]) -> bool:
    """Compile ``wanted`` into the cache on disk; says whether all of it is there."""
    device = driver.active.get_current_device()
    target = driver.active.get_current_target()
    work = {
        "device": device,
        "target": [target.backend, target.arch, target.warp_size],
        "kernels": [asdict(kernel) for kernel in wanted],
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "infer.kernelworker"], stdin=subprocess.PIPE, text=True
    )
    try:
        process.communicate(json.dumps(work), TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.returncode:
        logger.warning(
            "compiling kernels ahead ended with status %d; the engine compiles what is missing",
            process.returncode,
        )
    return process.returncode == 0


def _marker(wanted: list[Wanted], sources: set[str]) -> Path:
    """A file in Triton's own cache, so that both are deleted together."""
    digest = xxhash.xxh3_128(triton.__version__.encode())
    for text in (*(kernel.variant for kernel in wanted), *sorted(sources)):
        digest.update(text.encode())
    return Path(triton.knobs.cache.dir) / "purestep" / digest.hexdigest()
