"""Arrivals at three times what the engine can do: refusals at once, bounded waits, no collapse."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer.types import RejectionKind, StepStats
from tests.reliability.engines import real
from tests.server.harness import Running

ROWS, QUEUE = 4, 6
PLACES = ROWS + QUEUE
TOKENS = 120  # so many that the work is the engine's, not that of HTTP's two ends
BODY: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


@dataclass
class Seen:
    """What the clients saw."""

    answered: int = 0
    refused: int = 0
    odd: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of admitted requests
    refusal_seconds: list[float] = field(default_factory=list)


async def ask(http: httpx.AsyncClient, rng: random.Random, seen: Seen) -> None:
    began = time.monotonic()
    prompt = [rng.randrange(256) for _ in range(20)]
    answer = await http.post("/v1/completions", json={**BODY, "prompt": prompt})
    took = time.monotonic() - began
    if answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == TOKENS:
        seen.answered += 1
        seen.seconds.append(took)
    elif answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1:
        seen.refused += 1
        seen.refusal_seconds.append(took)
    else:
        seen.odd.append(answer.text)


def client(server: Running) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60, trust_env=False)


async def closed(server: Running, seconds: float) -> Seen:
    """As many clients as there are places: full, and nobody is refused."""
    seen, until = Seen(), time.monotonic() + seconds

    async def worker(number: int, http: httpx.AsyncClient) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            await ask(http, rng, seen)

    async with client(server) as http:
        await asyncio.gather(*(worker(i, http) for i in range(PLACES)))
    return seen


async def arrivals(server: Running, per_s: float, seconds: float) -> Seen:
    """Poisson arrivals that nobody waits for."""
    seen, rng = Seen(), random.Random(5)
    began = at = time.monotonic()
    async with client(server) as http, asyncio.TaskGroup() as group:
        while at < began + seconds:
            at += rng.expovariate(per_s)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            group.create_task(ask(http, rng, seen))
    return seen


def rate(steps: list[StepStats]) -> float:
    """Answers a second while every row was busy, from the engine's own steps."""
    busy = [step for step in steps if step.num_running >= ROWS]
    tokens = sum(step.num_generated_tokens for step in busy[1:])
    return tokens / TOKENS / (busy[-1].time - busy[0].time)


def overload(tiny: Path, seconds: float) -> dict[str, Any]:
    """Peak, overload, peak again."""
    with real(tiny, engine={"max_num_seqs": ROWS}, max_queue=QUEUE) as server:

        def full(duration: float) -> tuple[Seen, float]:
            first = len(server.notes.steps)
            seen = asyncio.run(closed(server, duration))
            assert seen.odd == []
            assert seen.refused == 0
            return seen, rate(server.notes.steps[first:])

        full(1.0)  # warm
        calm, peak = full(seconds / 2)
        first = len(server.notes.steps)
        seen = asyncio.run(arrivals(server, 3 * peak, seconds))
        steps = server.notes.steps[first:]
        recovered = full(seconds / 2)[1]
        rejections = server.notes.rejections
        server.notes.wait_for(lambda: server.notes.steps[-1].num_running == 0)
        last = server.notes.steps[-1]
        assert last.num_free_blocks + last.num_cached_blocks == last.num_blocks
    assert seen.odd == []
    assert rejections.count(RejectionKind.CAPACITY) == seen.refused == len(rejections)
    ordered, calm_ordered = sorted(seen.seconds), sorted(calm.seconds)
    return {
        "arrivals": seen.answered + seen.refused,
        "answered": seen.answered,
        "refused": seen.refused,
        "longest_queue": max(step.num_running + step.num_waiting for step in steps),
        "peak_per_s": round(peak, 2),
        "overload_per_s": round(rate(steps), 2),
        "recovered_per_s": round(recovered, 2),
        "full_median_s": round(calm_ordered[len(calm_ordered) // 2], 3),
        "median_s": round(ordered[len(ordered) // 2], 3),
        "p99_s": round(ordered[int(len(ordered) * 0.99)], 3),
        "refusal_median_s": round(sorted(seen.refusal_seconds)[seen.refused // 2], 4),
    }


def judge(figures: dict[str, Any], kept: float) -> None:
    """``kept`` is the share of the peak that is asked for."""
    print(figures)
    assert figures["refused"] > figures["arrivals"] * 0.3
    assert figures["longest_queue"] <= PLACES
    # An admitted request waits for those in the places before it, and for nobody else.
    assert figures["p99_s"] < 3 * PLACES / figures["peak_per_s"] + 1
    assert figures["overload_per_s"] > kept * figures["peak_per_s"]
    assert figures["recovered_per_s"] > kept * figures["peak_per_s"]


def test_three_times_too_much(tiny: Path) -> None:
    """Short. Clients and server share two cores with whatever else runs: half is asked for."""
    judge(overload(tiny, 6.0), kept=0.5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_times_too_much_for_a_minute(tiny: Path) -> None:
    """The figure to read is ``overload_per_s`` beside ``peak_per_s``, on a machine at rest."""
    judge(overload(tiny, 60.0), kept=0.7)
