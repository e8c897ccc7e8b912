"""Arrivals at three times what the engine can do: refusals at once, bounded waits, no collapse."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from infer.client import Engine
from infer.loadtarget import StartedServer, started_server
from infer.types import RejectionKind, StepStats
from tests.reliability.engines import real
from tests.server.harness import Running

ROWS, QUEUE = 4, 6
PLACES = ROWS + QUEUE
EDGE_S = 3.0  # of a measured load, at either end
TOKENS = 240  # so many that the work is the engine's, not that of HTTP's two ends
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


def client(server: Running | StartedServer) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60, trust_env=False)


async def closed(server: Running | StartedServer, seconds: float) -> Seen:
    """As many clients as there are places: full, and nobody is refused."""
    seen, until = Seen(), time.monotonic() + seconds

    async def worker(number: int, http: httpx.AsyncClient) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            await ask(http, rng, seen)

    async with client(server) as http:
        await asyncio.gather(*(worker(i, http) for i in range(PLACES)))
    return seen


async def arrivals(server: Running | StartedServer, per_s: float, seconds: float) -> Seen:
    """Poisson arrivals that nobody waits for."""
    seen, rng = Seen(), random.Random(5)
    began = at = time.monotonic()
    async with client(server) as http, asyncio.TaskGroup() as group:
        while at < began + seconds:
            at += rng.expovariate(per_s)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            group.create_task(ask(http, rng, seen))
    return seen


@dataclass(frozen=True)
class Turn:
    """One turn of the engine's loop."""

    time: float  # monotonic seconds
    cpu: float  # seconds the engine's thread has computed so far
    stats: StepStats


def noted(turns: list[Turn]) -> Callable[[Engine], Engine]:
    """An engine that tells how long its thread has computed: other processes do not count."""

    def change(engine: Engine) -> Engine:
        advance = engine.transitions.advance

        def note(model: Any, state: Any, tickets: tuple[Any, ...]) -> Any:
            state, tickets, reports = advance(model, state, tickets)
            now, cpu = time.monotonic(), time.thread_time()
            turns.extend(Turn(now, cpu, report.stats) for report in reports)
            return state, tickets, reports

        return replace(engine, transitions=replace(engine.transitions, advance=note))

    return change


@dataclass(frozen=True)
class Rate:
    """Answers a second while every row was busy: by the clock, and of the engine's own time."""

    wall: float
    cpu: float

    @classmethod
    def of(cls, turns: list[Turn]) -> Rate:
        answers = wall = cpu = 0.0
        for before, turn in pairwise(turns):
            if before.stats.num_running >= ROWS <= turn.stats.num_running:
                answers += turn.stats.num_generated_tokens / TOKENS
                wall += turn.time - before.time
                cpu += turn.cpu - before.cpu
        return cls(answers / wall, answers / cpu)


def overload(tiny: Path, seconds: float) -> dict[str, Any]:
    """Peak, overload, peak again."""
    turns: list[Turn] = []
    with real(tiny, change=noted(turns), engine={"max_num_seqs": ROWS}, max_queue=QUEUE) as server:

        def full(duration: float) -> tuple[Seen, Rate]:
            first = len(turns)
            seen = asyncio.run(closed(server, duration))
            assert seen.odd == []
            assert seen.refused == 0
            return seen, Rate.of(turns[first:])

        full(1.0)  # warm
        calm, peak = full(seconds / 2)
        first = len(turns)
        seen = asyncio.run(arrivals(server, 3 * peak.wall, seconds))
        crowded = turns[first:]
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
        "longest_queue": max(t.stats.num_running + t.stats.num_waiting for t in crowded),
        "peak": peak,
        "overload": Rate.of(crowded),
        "recovered": recovered,
        "full_median_s": round(calm_ordered[len(calm_ordered) // 2], 3),
        "median_s": round(ordered[len(ordered) // 2], 3),
        "p99_s": round(ordered[int(len(ordered) * 0.99)], 3),
        "refusal_median_s": round(sorted(seen.refusal_seconds)[seen.refused // 2], 4),
    }


def judge(figures: dict[str, Any], kept: float) -> None:
    """``kept`` is the share of the peak that is asked for."""
    print(figures)
    rates: list[Rate] = [figures[name] for name in ("peak", "overload", "recovered")]
    assert figures["refused"] > figures["arrivals"] * 0.3
    assert figures["longest_queue"] <= PLACES
    # An admitted request waits for those in the places before it, and for nobody else.
    assert figures["p99_s"] < 3 * PLACES / min(rate.wall for rate in rates) + 1
    # Refusals cost the engine nothing. By the clock they compete with it for a core, and so does
    # whatever else runs on this machine.
    assert all(rate.cpu > kept * rates[0].cpu for rate in rates)


def tokens_generated(server: StartedServer) -> float:
    text = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=30).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "infer_generation_tokens_total"
    )


async def token_rate(server: StartedServer, seconds: float, load: Coroutine[Any, Any, Seen]) -> Any:
    """Tokens a second while ``load`` keeps every row busy, without its first and last moments."""
    task = asyncio.create_task(load)
    await asyncio.sleep(EDGE_S)
    began, before = time.monotonic(), tokens_generated(server)
    await asyncio.sleep(seconds - 2 * EDGE_S)
    rate = (tokens_generated(server) - before) / (time.monotonic() - began)
    seen = await task
    assert seen.odd == []
    return rate, seen


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_real_model_keeps_its_throughput_under_overload() -> None:
    """The default model in a process of its own: within 5 % of its peak, by the clock."""
    options = f"--max-num-seqs {ROWS} --max-queue {QUEUE} --no-dashboard"
    with started_server(options) as server:

        async def measured() -> tuple[list[float], Seen]:
            full = functools.partial(closed, server, 25.0)
            await closed(server, 3.0)  # warm
            peak, calm = await token_rate(server, 25.0, full())
            per_s = 3 * peak / TOKENS
            crowded, seen = await token_rate(server, 60.0, arrivals(server, per_s, 60.0))
            recovered, after = await token_rate(server, 25.0, full())
            assert calm.refused == after.refused == 0
            return [peak, crowded, recovered], seen

        rates, seen = asyncio.run(measured())
    print([round(rate, 1) for rate in rates], seen.answered, seen.refused)
    assert seen.refused > seen.answered
    assert min(rates[1:]) > 0.95 * rates[0]


def test_three_times_too_much(tiny: Path) -> None:
    judge(overload(tiny, 6.0), kept=0.6)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_three_times_too_much_for_a_minute(tiny: Path) -> None:
    judge(overload(tiny, 60.0), kept=0.75)
