"""The most memory a piece of work had in use."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch


class Peak:
    """A ``with`` block whose peak is in ``bytes`` afterwards; None where it cannot be known.

    On CUDA it is what torch had allocated. On a CPU it is the process's resident memory, whose
    high-water mark Linux lets a process reset.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes: int | None = None
        self._device = device
        self._known = False

    def __enter__(self) -> Peak:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._known = _reset()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device)
        elif self._known:
            self.bytes = _high_water()


def _reset() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("VmHWM:")), None)
    return None if found is None else int(found.split()[1]) << 10
