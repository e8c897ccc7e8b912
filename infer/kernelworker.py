"""The process behind ``infer.kernelcache``: imports once, then compiles in forks, without a GPU.

Its work is JSON on standard input. No fork ever calls CUDA, so none pays for a context.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import traceback
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

RECORD = struct.Struct("=H")  # a job in the queue, the index of a kernel


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


def work(device: int, target: tuple[str, int, int], kernels: list[dict[str, str]]) -> int:
    """Compile ``kernels`` on all processors; returns how many processes failed."""
    for kernel in kernels:
        # Triton's digest of a kernel depends on which digests were asked for before: the same
        # order as the engine's gives the same digests.
        _ = _function(kernel["module"], kernel["name"]).cache_key
    driver.set_active(CompileOnly(device, GPUTarget(*target)))
    jobs, queue = os.pipe()
    children = []
    for _ in range(min(len(kernels), os.cpu_count() or 1)):
        child = os.fork()
        if not child:
            os.close(queue)
            os._exit(_consume(jobs, kernels))
        children.append(child)
    os.close(jobs)
    try:
        for index in range(len(kernels)):
            os.write(queue, RECORD.pack(index))
    except BrokenPipeError:
        pass  # every process has failed, as their statuses say
    os.close(queue)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def _consume(jobs: int, kernels: list[dict[str, str]]) -> int:
    """Compile what the queue gives, until it is closed; returns an exit status."""
    try:
        # A pipe gives records whole: they are written in one piece and shorter than PIPE_BUF.
        while record := os.read(jobs, RECORD.size):
            _compile(**kernels[RECORD.unpack(record)[0]])
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _function(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _compile(module: str, name: str, variant: str) -> None:
    kernel = _function(module, name).preload(variant)
    if hasattr(nvidia, "make_launcher"):  # this Triton compiles C for each signature
        nvidia.CudaLauncher(kernel.src, kernel.metadata)


if __name__ == "__main__":
    spec = json.load(sys.stdin)
    sys.exit(work(spec["device"], tuple(spec["target"]), spec["kernels"]))
