"""Host arrays to the device: one packed pinned buffer and one copy a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from infer.blocks import Int32

SLOTS = 4  # steps in flight, and one that is being filled


def aligned(size: int) -> int:
    """``size`` int32 elements rounded up, so that what follows starts at a multiple of 64 bytes."""
    return -(-size // 16) * 16


class Uploader(Protocol):
    """Puts int32 arrays on a device."""

    def upload(self, arrays: Mapping[str, Int32]) -> dict[str, Tensor]:
        """The same values as tensors on the device, valid until the step's work has run."""


class Direct:
    """The CPU's uploader: tensors share the arrays' memory."""

    def upload(self, arrays: Mapping[str, Int32]) -> dict[str, Tensor]:
        """Wrap every array."""
        return {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in arrays.items()}


class Pinned:
    """Page-locked memory. A view costs microseconds, so each size is viewed once."""

    def __init__(self, capacity: int) -> None:
        self.words = torch.empty(capacity, dtype=torch.int32, pin_memory=True)
        self._views: dict[int, tuple[Tensor, Int32]] = {}

    def first(self, size: int) -> tuple[Tensor, Int32]:
        """The first ``size`` words, as a tensor and as an array. For few different sizes."""
        views = self._views.get(size)
        if views is None:
            part = self.words[:size]
            views = self._views[size] = (part, part.numpy())
        return views


class Staging:
    """CUDA's uploader. A pinned buffer is not rewritten before its last copy has been read."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._device = device
        self._buffers = [Pinned(capacity) for _ in range(SLOTS)]
        self._events = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        self._next = 0

    def upload(self, arrays: Mapping[str, Int32]) -> dict[str, Tensor]:
        """Pack, copy without waiting, and view the parts."""
        total = sum(aligned(v.size) for v in arrays.values())
        host = self._acquire(total).words
        flat = host.numpy()
        at, spans = 0, {}
        for name, array in arrays.items():
            flat[at : at + array.size] = array.reshape(-1)
            spans[name] = (at, at + array.size, array.shape)
            at += aligned(array.size)
        packed = host[:total].to(self._device, non_blocking=True)
        self._events[self._next].record()
        return {k: packed[a:b].view(shape) for k, (a, b, shape) in spans.items()}

    def fill(self, target: Tensor, write: Callable[[Int32], None]) -> None:
        """Let ``write`` fill a pinned buffer of the size of ``target``, and copy it there."""
        size = target.numel()
        host, array = self._acquire(size).first(size)
        write(array)
        target.copy_(host, non_blocking=True)
        self._events[self._next].record()

    def _acquire(self, size: int) -> Pinned:
        self._next = (self._next + 1) % SLOTS
        self._events[self._next].synchronize()
        if self._buffers[self._next].words.numel() < size:
            self._buffers[self._next] = Pinned(2 * size)
        return self._buffers[self._next]


class Returns:
    """Step results on their way to the host: a ring of pinned buffers and events.

    A slot is used again ``SLOTS`` steps later; by then its step was collected, because no more than
    one step is launched ahead.
    """

    def __init__(self, capacity: int) -> None:
        self._buffers = [Pinned(capacity) for _ in range(SLOTS)]
        self._events = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        self._next = 0

    def start(self, results: Tensor) -> tuple[Int32, torch.cuda.Event]:
        """Copy i32 ``results`` without waiting: the array they will be in, and when."""
        self._next = (self._next + 1) % SLOTS
        target, array = self._buffers[self._next].first(results.numel())
        target.copy_(results.view(-1), non_blocking=True)
        event = self._events[self._next]
        event.record()
        return array, event
