"""Upper bounds of the histograms, in seconds or counts.

The lists hold every bound that vLLM 0.32 uses for the series of the same suffix, so that its
heatmaps and objectives read the same here, and finer ones between, because small models are faster
than its first bucket.
"""

from __future__ import annotations

from itertools import count, takewhile

# fmt: off
TTFT = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.125, 0.15,
    0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
)
TOKEN = (  # inter-token latency and time per output token
    0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03,
    0.04, 0.05, 0.06, 0.075, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)
REQUEST = (  # parts of a request's life, queueing included
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0,
    20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
STEP = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075,
    0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 64.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
# fmt: on


def one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to ``largest``, which is always the last."""
    series = (digit * 10.0**power for power in count() for digit in (1, 2, 5))
    return (*takewhile(lambda bound: bound < largest, series), float(largest))


def powers_of_two(largest: int, start: int = 1) -> tuple[float, ...]:
    """``start``, twice that, four times ... up to ``largest``, which is always the last."""
    series = (float(start << shift) for shift in count())
    return (*takewhile(lambda bound: bound < largest, series), float(largest))


def step_tokens(largest: int) -> tuple[float, ...]:
    """1, 8, 16, 32 ... 16384 (vLLM's), and ``largest`` among or after them."""
    vllm = (1.0, *powers_of_two(16384, start=8))
    return tuple(sorted({*(bound for bound in vllm if bound < largest), float(largest)}))
