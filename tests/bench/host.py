"""Host time of a step: schedule, build and commit, without a device.

CPU time of the one thread, so that a busy machine measures the same as an idle one.

    python -m tests.bench.host [--json] [--steps 400]

``decode``: 1, 8 or 256 running sequences of about a thousand tokens, and nobody ends. ``churn``:
sequences end and start all the time over a full prefix cache, so that every few steps evict.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from infer import host as hosts
from infer.commit import commit
from infer.config import GenerationDefaults, Limits
from infer.host import Host
from infer.hostbatch import build
from infer.schedule import schedule
from infer.types import Request, SamplingParams

MAX_NUM_SEQS = 256
VOCAB = 50_000
TARGET_MS = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """One load."""

    name: str
    block_size: int
    num_blocks: int
    num_waiting: int
    num_seqs: int = MAX_NUM_SEQS
    churn: bool = False


CASES = (
    tuple(Case("decode", 64, 17_000, 0, num_seqs) for num_seqs in (1, 8))
    + tuple(
        Case("decode", block_size, num_blocks, num_waiting)
        for block_size in (16, 64)
        for num_blocks in (17_000, 68_000)
        for num_waiting in (0, 20_000)
    )
    + tuple(
        Case("churn", 16, num_blocks, num_waiting, churn=True)
        for num_blocks in (17_000, 68_000)
        for num_waiting in (0, 20_000)
    )
)


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds a step, over all timed steps."""

    case: Case
    schedule_ms: float  # means
    build_ms: float
    commit_ms: float
    p50_ms: float  # of the three together
    p99_ms: float
    max_ms: float

    @property
    def mean_ms(self) -> float:
        return self.schedule_ms + self.build_ms + self.commit_ms


def requests(case: Case, first: int, rng: np.random.Generator) -> Iterator[Request]:
    """Endless distinct requests of 700 to 1000 tokens."""
    number = first
    while True:
        length = int(rng.integers(700, 1000))
        prompt = tuple(rng.integers(0, VOCAB, length).tolist())
        max_tokens = int(rng.integers(50, 200)) if case.churn else 2000
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        yield Request(request_id=f"r{number}", prompt_token_ids=prompt, params=params)
        number += 1


def limits(case: Case) -> Limits:
    """An engine as a large GPU would run it."""
    return Limits(
        max_model_len=4096,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=8192,
        block_size=case.block_size,
        num_blocks=case.num_blocks,
        prefix_caching=True,
        vocab_size=VOCAB,
        defaults=GenerationDefaults(eos_token_ids=(2,)),
    )


def one_step(host: Host, bounds: Limits, rng: np.random.Generator) -> tuple[Host, list[float]]:
    """Run a step and time its three parts, in seconds."""
    marks = [time.thread_time()]
    plan, host = schedule(host, bounds)
    marks.append(time.thread_time())
    build(plan, host.seqs)
    marks.append(time.thread_time())
    tokens = rng.integers(3, VOCAB, plan.sample_rows.size).astype(np.int32)
    marks.append(time.thread_time())
    _, host = commit(host, bounds, plan, tokens)
    marks.append(time.thread_time())
    return host, [marks[1] - marks[0], marks[2] - marks[1], marks[4] - marks[3]]


def measure(case: Case, steps: int) -> Result:
    """Fill the engine, then time ``steps`` steps."""
    rng = np.random.default_rng(0)
    bounds, host = limits(case), hosts.make(limits(case))
    source = requests(case, 0, rng)
    host = hosts.submit(host, [next(source) for _ in range(case.num_seqs)], bounds)
    while len(host.waiting) or (host.seqs.num_total - host.seqs.num_cached_tokens > 1).any():
        host, _ = one_step(host, bounds, rng)
    template = next(source)
    waiting = [
        Request(
            request_id=f"w{i}", prompt_token_ids=template.prompt_token_ids, params=template.params
        )
        for i in range(case.num_waiting)
    ]
    host = hosts.submit(host, waiting, bounds)
    if case.churn:  # until the whole pool has been used once
        while host.pool.num_free:
            host = _top_up(host, bounds, source)
            host, _ = one_step(host, bounds, rng)
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(steps):
        if case.churn:
            host = _top_up(host, bounds, source)
        host, spent = one_step(host, bounds, rng)
        times.append(spent)
    gc.unfreeze()
    parts = np.array(times) * 1e3
    total = parts.sum(axis=1)
    p50, p99 = np.percentile(total, [50, 99]).tolist()
    return Result(case, *parts.mean(axis=0).tolist(), p50, p99, float(total.max()))


def _top_up(host: Host, bounds: Limits, source: Iterator[Request]) -> Host:
    missing = MAX_NUM_SEQS - len(host.seqs.rows_of) - len(host.waiting)
    return hosts.submit(host, [next(source) for _ in range(missing)], bounds)


def main() -> None:
    """Measure every case and print a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    results = []
    if not args.json:
        print(
            "case    seqs block   pool waiting  schedule   build  commit |"
            "    mean     p50     p99     max"
        )
    for case in CASES:
        r = measure(case, args.steps)
        results.append(r)
        if not args.json:
            print(
                f"{case.name:7}{case.num_seqs:5}{case.block_size:6}{case.num_blocks:7}{case.num_waiting:8}"
                f"{r.schedule_ms:10.3f}{r.build_ms:8.3f}{r.commit_ms:8.3f} |"
                f"{r.mean_ms:8.3f}{r.p50_ms:8.3f}{r.p99_ms:8.3f}{r.max_ms:8.3f}",
                flush=True,
            )
    if args.json:
        print(json.dumps([_as_json(r) for r in results], indent=2))


def _as_json(r: Result) -> dict[str, object]:
    names = ("schedule_ms", "build_ms", "commit_ms", "mean_ms", "p50_ms", "p99_ms", "max_ms")
    values = {name: round(getattr(r, name), 4) for name in names}
    case = {
        name: getattr(r.case, name)
        for name in ("name", "num_seqs", "block_size", "num_blocks", "num_waiting")
    }
    return {**case, **values, "target_ms": TARGET_MS}


if __name__ == "__main__":
    main()
