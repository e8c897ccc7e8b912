"""Logarithmic bins of durations: any of them can be added up and still tell percentiles."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

SHORTEST_S = 1e-5  # bin 0 is everything up to here
GROWTH = 1.05
NUM_BINS = 400  # the last one is everything beyond 2,700 s

_CENTRES = SHORTEST_S * GROWTH ** (np.arange(NUM_BINS) - 0.5)


def place(value: float) -> int:
    """The bin of a duration in seconds."""
    if value <= SHORTEST_S:
        return 0
    return min(math.ceil(math.log(value / SHORTEST_S) / math.log(GROWTH)), NUM_BINS - 1)


def places(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """``place`` of each; values: f64[n]."""
    scaled = np.log(np.maximum(values, SHORTEST_S) / SHORTEST_S) / math.log(GROWTH)
    return np.minimum(np.ceil(scaled).astype(np.int64), NUM_BINS - 1)


def quantile(counts: NDArray[np.uint32], q: float) -> NDArray[np.float64]:
    """The ``q``-quantile of each row of counts, in seconds; NaN where a row is empty.

    counts: u32[..., NUM_BINS]. Within 2.5 % of the observation of rank ``ceil(q * n)``.
    """
    cumulative = np.cumsum(counts, axis=-1, dtype=np.int64)
    total = cumulative[..., -1]
    rank = np.maximum(1, np.ceil(q * total))
    found = np.argmax(cumulative >= rank[..., None], axis=-1)
    return np.where(total > 0, _CENTRES[found], np.nan)
