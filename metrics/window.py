"""The last 15 minutes, second by second, in arrays of a fixed size.

Sums and gauges are kept a second, and latencies as counts in logarithmic bins, so that any stretch
of seconds can be merged into one and still has its percentiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infer.types import StepStats
from metrics.bins import NUM_BINS, place, places

SECONDS = 900
SUMS = (
    "steps", "sequences", "prefill_tokens", "decode_tokens", "generated_tokens", "preemptions",
    "prefix_queries", "prefix_hits", "host_s", "device_s", "requests",
)  # fmt: skip
GAUGES = ("running", "waiting", "free_blocks", "used_blocks", "cached_blocks")
LATENCIES = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Seconds:
    """A copy of consecutive complete seconds, oldest first."""

    end: int  # monotonic second after the last one
    sums: NDArray[np.float64]  # [seconds, len(SUMS)]
    gauges: NDArray[np.float64]  # [seconds, len(GAUGES)], at the end of each second
    bins: NDArray[np.uint32]  # [len(LATENCIES), seconds, NUM_BINS]

    def tail(self, seconds: int) -> Seconds:
        """The last ``seconds`` of them."""
        cut = slice(self.sums.shape[0] - seconds, None)
        return Seconds(self.end, self.sums[cut], self.gauges[cut], self.bins[:, cut])


class Window:
    """The ring. Not thread-safe; its owner holds a lock."""

    __slots__ = ("_bins", "_gauges", "_second", "_sums")

    def __init__(self, now: float) -> None:
        self._second = math.floor(now)  # the running one
        self._sums = np.zeros((SECONDS + 1, len(SUMS)))
        self._gauges = np.zeros((SECONDS + 1, len(GAUGES)))
        self._bins = np.zeros((len(LATENCIES), SECONDS + 1, NUM_BINS), np.uint32)

    def step(self, at: float, step: StepStats) -> None:
        """Add a step made at ``at`` (monotonic seconds)."""
        slot = self._slot(at)
        used = step.num_blocks - step.num_free_blocks - step.num_cached_blocks
        self._sums[slot] += (
            1 if step.num_sequences else 0, step.num_sequences, step.num_prefill_tokens,
            step.num_decode_tokens, step.num_generated_tokens, step.num_preempted,
            step.prefix_queries, step.prefix_hits, step.host_s, step.device_s, 0,
        )  # fmt: skip
        self._gauges[slot] = (
            step.num_running, step.num_waiting, step.num_free_blocks, used, step.num_cached_blocks,
        )  # fmt: skip

    def count(self, at: float, name: str) -> None:
        self._sums[self._slot(at), SUMS.index(name)] += 1

    def observe(self, at: float, name: str, value: float) -> None:
        """Add one latency in seconds."""
        self._bins[LATENCIES.index(name), self._slot(at), place(value)] += 1

    def observe_all(self, at: float, name: str, values: NDArray[np.float64]) -> None:
        """Add latencies; values: f64[n], seconds."""
        counts = np.bincount(places(values), minlength=NUM_BINS).astype(np.uint32)
        self._bins[LATENCIES.index(name), self._slot(at)] += counts

    def last(self, now: float, seconds: int) -> Seconds:
        """The complete seconds before ``now``, at most ``seconds`` (up to 900) of them."""
        self._slot(now)
        slots = np.arange(self._second - min(seconds, SECONDS), self._second) % (SECONDS + 1)
        bins = self._bins[:, slots]
        return Seconds(self._second, self._sums[slots], self._gauges[slots], bins)

    def _slot(self, at: float) -> int:
        """The slot of the second of ``at``; forgets what the ring has no room for any more.

        Observations arrive in order but for threads racing by microseconds: a time before the
        running second counts in that second.
        """
        second = math.floor(at)
        missed = second - self._second
        if missed > 0:
            before = self._gauges[self._second % (SECONDS + 1)].copy()
            slots = np.arange(second - min(missed, SECONDS + 1) + 1, second + 1) % (SECONDS + 1)
            self._sums[slots] = 0
            self._bins[:, slots] = 0
            self._gauges[slots] = before  # a gauge keeps its value until a step changes it
            self._second = second
        return self._second % (SECONDS + 1)
