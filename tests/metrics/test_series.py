"""Histograms, buckets and the window against naive counts."""

from __future__ import annotations

import math
import random
from statistics import mean

import numpy as np
import pytest

from metrics import bins, buckets, window
from metrics.names import table
from metrics.reader import history
from metrics.series import Histogram
from metrics.window import SECONDS, Window
from tests.metrics.samples import INFO, STEP, replace

# The bounds that vLLM 0.32 uses: an objective or a heatmap at one of them must find it here.
VLLM_TTFT = [.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
             160, 640, 2560]  # fmt: skip
VLLM_ITL = [.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40,
            80]  # fmt: skip
VLLM_LATENCY = [.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
                7680]  # fmt: skip


@pytest.mark.parametrize(
    ("bounds", "vllm"),
    [
        (buckets.TTFT, VLLM_TTFT),
        (buckets.TOKEN, VLLM_ITL),
        (buckets.REQUEST, VLLM_LATENCY),
        (buckets.CHOICES, [1, 2, 5, 10, 20]),
        (buckets.PREEMPTIONS, [1, 2, 3, 4, 5, 10, 20]),
        (buckets.one_two_five(4096), [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]),
        (buckets.step_tokens(32768), [1, *(2**power for power in range(3, 15))]),
    ],
)  # fmt: skip
def test_buckets_hold_vllms(bounds: tuple[float, ...], vllm: list[float]) -> None:
    assert set(vllm) <= set(bounds)


def test_every_histogram_has_ascending_bounds_and_fits_the_engine() -> None:
    metrics = table(INFO)
    for metric in metrics.values():
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
    assert metrics["batch_size"].buckets == (1, 2, 4, 8, 16, 24)
    assert metrics["iteration_tokens"].buckets[-1] == 2048
    assert metrics["request_prompt_tokens"].buckets[-2:] == (2000, 4096)


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 100, 256, 500])
def test_size_buckets_end_with_the_limit(largest: int) -> None:
    for series in (buckets.one_two_five, buckets.powers_of_two, buckets.step_tokens):
        bounds = series(largest)
        assert bounds[0] == 1
        assert bounds[-1] == largest
        assert list(bounds) == sorted(set(bounds))


@pytest.mark.parametrize("bounds", [(0.0, 1.0, 2.5, 10.0), buckets.TOKEN])
def test_histogram_counts_like_a_naive_one(bounds: tuple[float, ...]) -> None:
    """Also at the bounds and next to them."""
    rng = random.Random(1)
    edges = [edge for bound in bounds for edge in neighbours(bound)]
    observed = [0.0, 4500.0, 1e9, *edges, *(rng.lognormvariate(-3, 3) for _ in range(3000))]
    one, many = Histogram(bounds), Histogram(bounds)
    for value in observed:
        one.observe(value)
    values = np.array(observed)
    many.observe_all(values)
    naive = [sum(value <= bound for value in observed) for bound in bounds]
    for histogram in (one, many):
        assert histogram.cumulative() == [*naive, len(observed)]
        assert histogram.sum == pytest.approx(sum(observed))


def neighbours(value: float) -> list[float]:
    return [math.nextafter(value, 0), value, math.nextafter(value, math.inf)]


def test_one_and_many_share_their_bins() -> None:
    values = np.random.default_rng(6).lognormal(-4, 4, 2000)
    assert [bins.place(value) for value in values.tolist()] == bins.places(values).tolist()


@pytest.mark.parametrize("q", [0.01, 0.5, 0.95, 0.99, 1.0])
def test_percentiles_are_within_their_promise(q: float) -> None:
    rng = np.random.default_rng(2)
    values = rng.lognormal(-4, 1.5, 2001)
    ring = Window(0.0)
    ring.observe_all(0.5, "itl", values[:2000])
    ring.observe(0.5, "itl", float(values[2000]))
    (found,) = bins.quantile(ring.last(1.0, 1).bins[window.LATENCIES.index("itl")], q)
    exact = np.quantile(values, q, method="inverted_cdf")
    assert found == pytest.approx(exact, rel=0.026)


def test_percentile_of_nothing_is_nan() -> None:
    assert np.isnan(bins.quantile(np.zeros(bins.NUM_BINS, np.uint32), 0.5))


def test_extreme_latencies_are_kept() -> None:
    ring = Window(0.0)
    ring.observe(0.1, "e2e", 0.0)
    ring.observe_all(0.2, "e2e", np.array([1e9]))
    assert ring.last(1.0, 1).bins.sum() == 2


def test_window_like_a_naive_one() -> None:
    """Random steps with gaps up to beyond the window's length, against sums over a plain list."""
    rng = random.Random(3)
    ring, at, steps = Window(100.0), 100.0, []
    for number in range(1500):
        at += rng.choice([0.01, 0.3, 0.9, 5.0]) if number != 700 else 2000.0
        step = replace(
            STEP,
            num_running=rng.randrange(9),
            num_sequences=rng.randrange(9),
            num_generated_tokens=rng.randrange(9),
            num_free_blocks=rng.randrange(200),
        )
        steps.append((int(at), step))
        ring.step(at, step)
        if number % 250 == 249:
            now = at + rng.choice([0.0, 3.0])
            check_window(ring, now, steps, every=rng.choice([1, 5, 30]))


def check_window(ring: Window, now: float, steps: list[tuple[int, object]], every: int) -> None:
    past = history(ring.last(now, SECONDS), every, unix_offset=0.0)
    assert past.times[-1] == int(now)
    assert len(past.times) == SECONDS // every
    for place in random.Random(4).sample(range(len(past.times)), 30):
        end = int(past.times[place])
        inside = [step for second, step in steps if end - every <= second < end]
        before = [step for second, step in steps if second < end]
        batches = [step.num_sequences for step in inside if step.num_sequences]
        got = {name: numbers[place] for name, numbers in past.series.items()}
        assert got["batch_size"] == (pytest.approx(mean(batches), rel=1e-5) if batches else None)
        tokens = sum(step.num_generated_tokens for step in inside)
        assert got["generated_tokens"] == pytest.approx(tokens / every, rel=1e-5)
        assert got["prefix_hit_ratio"] == (0.5 if inside else None)
        last = before[-1] if before else None
        assert got["running"] == (last.num_running if last else 0)
        assert got["kv_usage"] == pytest.approx(last.kv_usage if last else 0, rel=1e-5)
