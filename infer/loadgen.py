"""``infer bench serve``: load for a running server, and what its clients see.

Closed loop (a fixed number of clients), Poisson arrivals at a rate, or the arrivals of a trace
file. Every figure is measured here, at the client, on a monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import itertools
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from infer.errors import ConfigError, InferError
from infer.loadreport import Result, Slo, render, summary
from infer.loadtarget import started_server


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request of a load."""

    at: float  # seconds after the start; 0 in a closed loop
    prompt: str | list[int]
    max_tokens: int


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``infer bench serve``."""
    add = parser.add_argument
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--url", default="http://127.0.0.1:8000", help="server (default: %(default)s)"
    )
    target.add_argument(
        "--start",
        metavar="OPTIONS",
        nargs="?",
        const="",
        help="start `infer serve OPTIONS` for the load (--start='--max-num-seqs 32'), and report "
        "its start and idle memory",
    )
    add("--allow-remote", action="store_true", help="allow a server on another machine")
    add("--api-key", help="the server's API key")
    add("--model", help="model name; default: the server's first")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, metavar="N", help="closed loop of N (default: 8)")
    load.add_argument("--rate", type=float, metavar="X", help="Poisson arrivals, X a second")
    load.add_argument(
        "--trace",
        metavar="FILE",
        help='JSON lines {"at": seconds, "input_tokens": n or "prompt": text, "output_tokens": n}',
    )
    add("--requests", type=int, default=64, metavar="N", help="requests (default: %(default)s)")
    add("--input-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--output-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--vocab", type=int, default=1000, metavar="N", help="prompt ids are below N")
    add("--warmup", type=int, default=2, metavar="N", help="requests before the measurement")
    add("--slo", type=Slo.parse, default=Slo(), metavar="BOUNDS", help="ttft=0.5,tpot=0.05,e2e=10")
    add("--timeout", type=float, default=600.0, metavar="X", help="seconds a request")
    add("--seed", type=int, default=0, metavar="N", help="prompts and arrivals")
    add("--json", metavar="FILE", help="write the report as JSON; - is standard output")


def run_load(args: argparse.Namespace) -> int:
    """Run a load and print its report; the exit status (1 when a request failed)."""
    try:
        jobs = make_jobs(args)
        if args.start is not None:
            with started_server(args.start, args.api_key) as started:
                report = asyncio.run(measure(args, jobs, started.url))
                report["start"] = started.figures()
        else:
            check_target(args.url, args.allow_remote)
            report = asyncio.run(measure(args, jobs, args.url))
    except InferError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    text = json.dumps(report, indent=2)
    if args.json == "-":
        sys.stdout.write(text + "\n")
    else:
        if args.json:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
        sys.stdout.write(render(report))
    return 1 if report["failed"] else 0


def check_target(url: str, allow_remote: bool) -> None:
    """Refuse to load somebody else's machine by mistake.

    Raises:
        ConfigError: not an HTTP address, or not on this machine.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url is {url!r}, it must be like http://127.0.0.1:8000")
    try:
        loopback = ipaddress.ip_address(parts.hostname).is_loopback
    except ValueError:
        loopback = parts.hostname == "localhost"
    if not (loopback or allow_remote):
        raise ConfigError(
            f"{parts.hostname} is another machine; add --allow-remote if it may be loaded"
        )


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """The requests of a load, the same for the same seed.

    Raises:
        ConfigError: a count out of range, or a trace that cannot be read.
    """
    rng = random.Random(args.seed)
    for name in ("requests", "input_tokens", "output_tokens", "vocab", "concurrency"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, it must be at least 1")
    if args.warmup < 0:
        raise ConfigError(f"warmup is {args.warmup}, it must be at least 0")
    if not args.timeout > 0:
        raise ConfigError(f"timeout is {args.timeout}, it must be above 0")

    def prompt(count: int) -> list[int]:
        return [rng.randrange(args.vocab) for _ in range(count)]

    if args.trace is not None:
        return _trace_jobs(args.trace, prompt, args.output_tokens)
    if args.rate is not None and not args.rate > 0:
        raise ConfigError(f"rate is {args.rate}, it must be above 0")
    at = 0.0
    jobs = []
    for _ in range(args.requests):
        jobs.append(Job(at=at, prompt=prompt(args.input_tokens), max_tokens=args.output_tokens))
        at += rng.expovariate(args.rate) if args.rate is not None else 0.0
    return jobs


def _trace_jobs(path: str, prompt: Callable[[int], list[int]], output_tokens: int) -> list[Job]:
    jobs = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        for line in filter(str.strip, lines):
            row = json.loads(line)
            text = row.get("prompt")
            jobs.append(
                Job(
                    at=float(row["at"]),
                    prompt=text if isinstance(text, str) else prompt(int(row["input_tokens"])),
                    max_tokens=int(row.get("output_tokens", output_tokens)),
                )
            )
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"trace {path}, line {len(jobs) + 1}: {error!r}") from error
    if not jobs:
        raise ConfigError(f"trace {path} has no requests")
    return sorted(jobs, key=lambda job: job.at)


async def measure(args: argparse.Namespace, jobs: Sequence[Job], url: str) -> dict[str, Any]:
    """Warm up, send every job, and sum up.

    Raises:
        ConfigError: the server does not answer.
    """
    headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=args.timeout, trust_env=False
    ) as http:
        model = args.model or await _first_model(http)

        async def send(job: Job) -> Result:
            return await _send(http, model, job)

        for job in itertools.islice(itertools.cycle(jobs), args.warmup):
            await send(job)
        began = time.monotonic()
        if args.trace is None and args.rate is None:
            results = await _closed_loop(send, jobs, args.concurrency or 8)
        else:
            results = await _open_loop(send, jobs)
        seconds = time.monotonic() - began
    return summary(results, seconds, args.slo) | {"model": model, "load": _load_name(args)}


async def _closed_loop(
    send: Callable[[Job], Awaitable[Result]], jobs: Sequence[Job], clients: int
) -> list[Result]:
    left = iter(jobs)
    results: list[Result] = []

    async def client() -> None:
        for job in left:
            result = await send(job)
            results.append(result)

    await asyncio.gather(*(client() for _ in range(clients)))
    return results


async def _open_loop(send: Callable[[Job], Awaitable[Result]], jobs: Sequence[Job]) -> list[Result]:
    began = time.monotonic()

    async def one(job: Job) -> Result:
        await asyncio.sleep(began + job.at - time.monotonic())
        return await send(job)

    return list(await asyncio.gather(*(one(job) for job in jobs)))


async def _first_model(http: httpx.AsyncClient) -> str:
    try:
        answer = await http.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise ConfigError(
            f"{http.base_url} does not answer as a server should ({error}); "
            "start one with `infer serve`"
        ) from error


async def _send(http: httpx.AsyncClient, model: str, job: Job) -> Result:
    body = {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    began = time.monotonic()
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return Result(error=f"HTTP {answer.status_code}: {answer.text[:200]}")
            stamped = [(time.monotonic() - began, event) async for event in _events(answer)]
    except httpx.HTTPError as error:
        return Result(error=f"{type(error).__name__}: {error}")
    return _result(stamped)


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in answer.aiter_raw():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event[6:]


def _result(stamped: Sequence[tuple[float, bytes]]) -> Result:
    """Read the events after the fact, so that parsing delays none of them."""
    times: list[float] = []
    tokens = prompt_tokens = 0
    for when, event in stamped:
        if event == b"[DONE]":
            break
        document = json.loads(event)
        if "error" in document:
            return Result(error=str(document["error"].get("message")))
        usage = document.get("usage") or {}
        prompt_tokens = usage.get("prompt_tokens", prompt_tokens)
        if usage.get("completion_tokens", 0) > tokens:
            tokens = usage["completion_tokens"]
            times.append(when)
    if not times:
        return Result(error="the answer had no tokens")
    return Result(
        prompt_tokens=prompt_tokens,
        output_tokens=tokens,
        ttft=times[0],
        gaps=tuple(b - a for a, b in itertools.pairwise(times)),
        total=times[-1],
    )


def _load_name(args: argparse.Namespace) -> str:
    if args.trace is not None:
        return f"trace {args.trace}"
    if args.rate is not None:
        return f"Poisson, {args.rate:g} requests/s"
    return f"closed loop, {args.concurrency or 8} clients"
