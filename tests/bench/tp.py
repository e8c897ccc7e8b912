"""Tensor parallelism on the GPUs of one host: decode and prefill for each number of ranks.

    python -m tests.bench.tp [--sizes 1,2] [--models qwen3-0.6b,qwen3-8b] [--batches 1,64]

Random weights; every case is a process of its own. Decode is the time from step to step of B
sequences with contexts of 128 to 328 tokens, CUDA Graphs on; the share of collectives is their part
of rank 0's kernel time in a profile of other steps, waiting for the other ranks included. Prefill
is 8 prompts of 2,048 tokens. Prints Markdown; ``--json FILE`` also keeps the numbers.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

import infer
from infer import EngineConfig, Model, Request, SamplingParams
from infer.llm import advance
from infer.state import EngineState, Ticket

PROMPT, WARM, TIMED, PROFILED = 128, 40, 120, 20
COLLECTIVE = re.compile(r"nccl|all_?reduce|all_?gather|gloo", re.IGNORECASE)


def requests(count: int, length: int, max_tokens: int, vocab: int, seed: int) -> list[Request]:
    """Greedy requests of one length."""
    rng = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [
        Request(
            request_id=f"{seed}-{i}",
            prompt_token_ids=tuple(rng.randrange(vocab) for _ in range(length)),
            params=params,
        )
        for i in range(count)
    ]


class Engine:
    """A state and the tickets of its launched steps."""

    def __init__(self, model: Model, state: EngineState) -> None:
        self.model = model
        self.state = state
        self._tickets: tuple[Ticket, ...] = ()

    def step(self) -> infer.Report | None:
        """One turn of the loop; the last report that came of it."""
        self.state, self._tickets, reports = advance(self.model, self.state, self._tickets)
        return reports[-1] if reports else None

    def finish(self) -> None:
        """Step until nothing is left."""
        while infer.has_work(self.state):
            self.step()


def decode(engine: Engine, batch: int) -> dict[str, float]:
    """Milliseconds a decode step, and the share of collectives in its kernels."""
    vocab = engine.model.config.vocab_size
    wanted = requests(batch, PROMPT, WARM + TIMED + PROFILED + 8, vocab, batch)
    engine.state = infer.submit(engine.state, wanted)
    decoding = 0
    while decoding < WARM:
        report = engine.step()
        decoding += report is not None and report.stats.num_decode_tokens == batch
    times = []
    last = time.perf_counter()
    for _ in range(TIMED):
        engine.step()
        now = time.perf_counter()
        times.append(1e3 * (now - last))
        last = now
    share = collectives(engine)
    engine.finish()
    return {
        "decode_ms": statistics.mean(times),
        "decode_p95_ms": sorted(times)[int(0.95 * len(times))],
        "collectives": share,
    }


def collectives(engine: Engine) -> float:
    """The share of kernel time that collectives take."""
    cuda = engine.model.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            engine.step()
        if cuda:
            torch.cuda.synchronize(engine.model.device)
    name = "self_device_time_total" if cuda else "self_cpu_time_total"
    spent = [(event.key, getattr(event, name)) for event in profile.key_averages()]
    total = sum(us for _, us in spent)
    return sum(us for key, us in spent if COLLECTIVE.search(key)) / total if total else 0.0


def prefill(engine: Engine, count: int, length: int) -> float:
    """Tokens a second, the better of three runs."""
    rates = []
    for run in range(3):
        wanted = requests(count, length, 1, engine.model.config.vocab_size, 1000 + run)
        began = time.perf_counter()
        engine.state = infer.submit(engine.state, wanted)
        engine.finish()
        rates.append(count * length / (time.perf_counter() - began))
    return max(rates)


def case(options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model on one number of ranks."""
    began = time.perf_counter()
    model = infer.load(
        options.case,
        load_format="random",
        device=options.device,
        tp=options.ranks,
        progress=False,
    )
    loaded = time.perf_counter()
    length = min(2048, options.max_model_len - 1)
    state = infer.init(
        model,
        EngineConfig(
            max_model_len=options.max_model_len,
            max_num_seqs=max(options.batches),
            prefix_caching=False,
            gpu_memory_utilization=0.85,
        ),
    )
    ready = time.perf_counter()
    engine = Engine(model, state)
    del state
    found: dict[str, Any] = {
        "model": options.case,
        "ranks": options.ranks,
        "load_s": loaded - began,
        "init_s": ready - loaded,
        "one_shot": model.tp.scratch is not None,
        "num_blocks": engine.state.limits.num_blocks,
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "decode": {batch: decode(engine, batch) for batch in options.batches},
        "prefill_tok_s": prefill(engine, 8, length),
        "prefill_length": length,
    }
    if model.tp.link is not None:
        found["each_rank"] = [structs.asdict(report) for report in model.tp.link.reports()]
        model.tp.link.close()
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    """The figures as Markdown; speed is that of one rank over that of these."""
    lines = [
        "| model | ranks | work | figure | speed against 1 rank | collectives |",
        "|---|---|---|---|---|---|",
    ]
    alone = {found["model"]: found for found in results if found["ranks"] == 1}
    for found in results:
        one = alone.get(found["model"])
        name = f"| {found['model']} | {found['ranks']} |"
        for batch, figures in found["decode"].items():
            speed = one["decode"][batch]["decode_ms"] / figures["decode_ms"] if one else 0
            lines.append(
                f"{name} decode, batch {batch} | {figures['decode_ms']:.2f} ms | {speed:.2f} "
                f"| {100 * figures['collectives']:.0f} % |"
            )
        rate = found["prefill_tok_s"]
        speed = rate / one["prefill_tok_s"] if one else 0
        work = f"prefill, 8 x {found['prefill_length']}"
        lines.append(f"{name} {work} | {rate:,.0f} tok/s | {speed:.2f} | |")
        lines.append(f"{name} load, init | {found['load_s']:.1f}, {found['init_s']:.1f} s | | |")
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    """Comma-separated integers."""
    return [int(part) for part in text.split(",")]


def main() -> int:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=numbers, default=[1, 2])
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-8b")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 64])
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--timeout", type=float, default=280, help="seconds a case may take")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print("RESULT " + json.dumps(case(options)), flush=True)
        return 0
    results = []
    for model in options.models.split(","):
        for size in options.sizes:
            command = [sys.executable, "-m", "tests.bench.tp", *sys.argv[1:]]
            command += ["--case", model, "--ranks", str(size)]
            try:
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, text=True, timeout=options.timeout, check=False
                )
            except subprocess.TimeoutExpired:
                print(f"{model} on {size}: no result within {options.timeout:.0f} s", flush=True)
                continue
            result = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not result:
                print(f"{model} on {size}: exit code {done.returncode}", flush=True)
                continue
            results.append(json.loads(result[-1]))
            print(result[-1], flush=True)
            if options.json:
                Path(options.json).write_text(json.dumps(results, indent=1))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
