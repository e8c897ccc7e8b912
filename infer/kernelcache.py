"""Fill Triton's cache on disk from several processes, before an engine compiles for itself.

A rehearsal runs all that the engine will run, while a hook notes each kernel that is not compiled
yet and keeps it from being compiled and launched. What was noted is compiled by forks of this
process: compiling holds the interpreter lock, so threads would not help, and a new process would
first import for seconds. The engine then finds every kernel on disk.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import triton
import xxhash
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

logger = logging.getLogger(__name__)

TIMEOUT_S = 300.0
FEW = 4  # kernels that an engine compiles by itself sooner than forks would
RECORD = struct.Struct("=H")  # a job in the queue, the index of a kernel


@dataclass(frozen=True, slots=True)
class Wanted:
    """One kernel to compile, and Triton's own account of one variant."""

    function: JITFunction[Any]
    variant: str  # JSON, for ``JITFunction.preload``


@dataclass(frozen=True, slots=True)
class CompileOnly:
    """As much of a Triton driver as compiling asks for: no GPU is touched."""

    device: int
    target: GPUTarget

    def get_current_device(self) -> int:
        """The device whose kernels these are."""
        return self.device

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target


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
        wanted[Wanted(fn.jit_function, compile["specialization_data"])] = None
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
    jobs, queue = os.pipe()
    for index in range(len(wanted)):
        os.write(queue, RECORD.pack(index))  # a pipe holds thousands of them
    os.close(queue)
    here = CompileOnly(driver.active.get_current_device(), driver.active.get_current_target())
    context = multiprocessing.get_context("fork")
    size = min(len(wanted), len(os.sched_getaffinity(0)))
    parent = os.getpid()
    forks = [
        context.Process(target=_consume, args=(jobs, wanted, here, parent), daemon=True)
        for _ in range(size)
    ]
    with _forking():
        for process in forks:
            process.start()
    deadline = time.monotonic() + TIMEOUT_S
    failed = sum(not _ended_well(process, deadline) for process in forks)
    os.close(jobs)
    if failed:
        logger.warning(
            "%d of %d processes that compile kernels failed; the engine compiles what is missing",
            failed,
            size,
        )
    return not failed


@contextmanager
def _forking() -> Iterator[None]:
    """Forks begin without garbage collection: to free a tensor of theirs would call CUDA."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            # Other threads may hold locks for good in a fork. Compiling takes none of theirs, and
            # a fork that hangs is killed in the end.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if enabled:
            gc.enable()


def _ended_well(process: BaseProcess, deadline: float) -> bool:
    process.join(max(deadline - time.monotonic(), 0.0))
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode == 0


def _consume(jobs: int, wanted: list[Wanted], here: CompileOnly, parent: int) -> None:
    """Compile what the queue gives, until it is empty or the parent is gone.

    Runs in a fork, which never calls CUDA.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt is the parent's to tell of
    driver.set_active(here)
    # Records come whole: they were written in one piece each and are shorter than PIPE_BUF.
    while os.getppid() == parent and (record := os.read(jobs, RECORD.size)):
        kernel = wanted[RECORD.unpack(record)[0]]
        compiled = kernel.function.preload(kernel.variant)
        if hasattr(nvidia, "make_launcher"):  # this Triton compiles C for each signature
            nvidia.CudaLauncher(compiled.src, compiled.metadata)


def _marker(wanted: list[Wanted], sources: set[str]) -> Path:
    """A file in Triton's own cache, so that both are deleted together."""
    digest = xxhash.xxh3_128(triton.__version__.encode())
    for text in (*(kernel.variant for kernel in wanted), *sorted(sources)):
        digest.update(text.encode())
    return Path(triton.knobs.cache.dir) / "purestep" / digest.hexdigest()
