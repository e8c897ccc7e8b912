"""The numbers behind the table: counters, gauges and histograms, without locks or formats."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from metrics.names import Kind, Metric

Labels = tuple[str, ...]


class Histogram:
    """Counts of observations by upper bound (``value <= bound``), and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last one is beyond every bound
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: NDArray[np.float64]) -> None:
        """The same as ``observe`` for each of them; values: f64[n]."""
        places = np.searchsorted(self.bounds, values, side="left")
        added = np.bincount(places, minlength=len(self.counts))
        self.counts = [old + new for old, new in zip(self.counts, added.tolist(), strict=True)]
        self.sum += float(values.sum())

    def cumulative(self) -> list[int]:
        """Observations at or below each bound; the last one is all of them."""
        return list(accumulate(self.counts))


class Series:
    """All series of a table of metrics, at zero. Names and labels outside the table are errors."""

    __slots__ = ("histograms", "values")

    def __init__(self, table: Mapping[str, Metric]) -> None:
        self.values: dict[str, dict[Labels, float]] = {}
        self.histograms: dict[str, dict[Labels, Histogram]] = {}
        for name, metric in table.items():
            if metric.kind is Kind.HISTOGRAM:
                self.histograms[name] = {
                    labels: Histogram(metric.buckets) for labels in metric.label_values
                }
            else:
                self.values[name] = dict.fromkeys(metric.label_values, 0.0)

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Count upwards.

        Raises:
            KeyError: no such counter or label value.
        """
        values = self.values[name]
        values[labels] = values[labels] + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """A gauge's value now."""
        self.values[name][labels] = value

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add to a histogram. Below 0, which clocks that disagree can give, counts as 0: the sum
        of a histogram never falls."""
        self.histograms[name][labels].observe(max(0.0, value))

    def observe_all(self, name: str, values: NDArray[np.float64]) -> None:
        """The same as ``observe`` for each of ``values``, f64[n], without labels."""
        self.histograms[name][()].observe_all(np.maximum(values, 0.0))

    def labelled(self, name: str) -> Iterator[tuple[Labels, float]]:
        yield from self.values[name].items()
