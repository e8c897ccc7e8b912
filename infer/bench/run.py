"""``infer bench``: run named workloads and report them with their conditions."""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from infer.bench.figures import Figure, random_prompts
from infer.bench.peer import bench_peer
from infer.bench.workloads import (
    PROMPT_LEN,
    bench_decode,
    bench_offline,
    bench_prefill,
    fixed_length,
)
from infer.errors import ConfigError
from infer.llm import LLM
from infer.provenance import commit, processor, versions

WORKLOADS: dict[str, Callable[[LLM], list[Figure]]] = {
    "decode": bench_decode,
    "offline": bench_offline,
    "prefill": bench_prefill,
    "peer": bench_peer,
}
STANDARD = ("decode", "offline", "prefill")  # what runs when no workload is named


def conditions(llm: LLM) -> dict[str, Any]:
    """What a figure depends on: date, device, versions, commit, engine options."""
    model, state, link = llm.model, llm.state, llm.model.tp.link
    found = versions()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": processor(model.device),
        "threads": torch.get_num_threads(),
        "python": found["python"],
        "torch": torch.__version__,
        "triton": found.get("triton"),
        "commit": commit() or "unknown",
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": state.runtime.ops.name,
        "engine": asdict(state.config),
        "ranks": [structs.asdict(report) for report in link.reports()] if link else [],
    }


def markdown(figures: Sequence[Figure], where: dict[str, Any]) -> str:
    """A short report."""
    title = (
        f"{where['model']} {where['dtype']} on {where['device']}, backend {where['backend']}, "
        f"torch {where['torch']}, commit {where['commit']}, {where['date']}"
    )
    lines = [
        title,
        "",
        "| workload | figure | value | floor | of floor | detail |",
        "|---|---|---|---|---|---|",
    ]
    for f in figures:
        floor = "" if f.floor is None else f"{f.floor:,.2f}"
        share = "" if f.percent_of_floor is None else f"{f.percent_of_floor:.0f} %"
        detail = ", ".join(f"{k} {v}" for k, v in f.detail.items())
        cells = (f.workload, f.name, f"{f.value:,.2f} {f.unit}", floor, share, detail)
        lines.append("| " + " | ".join(cells) + " |")
    for rank in where["ranks"]:
        a_step = 1e3 * rank["busy_s"] / max(1, rank["steps"])
        memory = rank["memory_bytes"] / (1 << 30)
        figure = f"{memory:.2f} GiB, {rank['steps']} steps, {a_step:.2f} ms in each"
        lines += ["", f"Rank {rank['rank']} on {rank['device']}: {figure}"]
    return "\n".join(lines)


def run(
    llm: LLM, names: Sequence[str], *, ready_s: float | None = None, as_json: bool = False
) -> list[Figure]:
    """Run workloads, print the report, and return the figures."""
    figures = []
    if ready_s is not None:
        figures.append(Figure(workload="start", name="load to ready", value=ready_s, unit="s"))
    for name in names:
        figures += WORKLOADS[name](llm)
    where = conditions(llm)
    if as_json:
        print(json.dumps({"conditions": where, "figures": [asdict(f) for f in figures]}))
    else:
        print(markdown(figures, where))
    return figures


def profile(llm: LLM, folder: str, batch: int = 1) -> None:
    """Write a trace of some decode steps and a table of kernels a step into ``folder``."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(2)
    prompts = random_prompts(rng, batch, PROMPT_LEN, llm.model.config.vocab_size)
    llm.generate(prompts, fixed_length(4), progress=False)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if llm.model.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    prompts = random_prompts(rng, batch, PROMPT_LEN, llm.model.config.vocab_size)
    with torch.profiler.profile(activities=activities) as prof:
        llm.generate(prompts, fixed_length(33), progress=False)
    prof.export_chrome_trace(str(out / f"trace-batch{batch}.json"))
    key = "self_cuda_time_total" if len(activities) > 1 else "self_cpu_time_total"
    table = prof.key_averages().table(sort_by=key, row_limit=40)
    (out / f"kernels-batch{batch}.txt").write_text(table, encoding="utf-8")
    print(f"wrote {out}/trace-batch{batch}.json and kernels-batch{batch}.txt", file=sys.stderr)


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``infer bench`` beside the engine's own."""
    parser.add_argument(
        "workloads",
        nargs="*",
        default=["start", *STANDARD],
        help=f"start, {', '.join(WORKLOADS)} (default: start, {', '.join(STANDARD)})",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of Markdown")
    parser.add_argument("--profile", metavar="DIR", help="also write a trace and a kernel table")
    parser.add_argument(
        "--profile-batch", type=int, metavar="N", help="sequences in that trace (default: 1)"
    )


def run_bench(make: Callable[[], LLM], args: argparse.Namespace) -> int:
    """``infer bench``: build the engine, measure, report.

    Raises:
        ConfigError: an unknown workload, or a profile that cannot be made.
    """
    _check(args)
    started = time.perf_counter()
    llm = make()
    llm.generate([[1, 2, 3]], fixed_length(1), progress=False)
    ready = time.perf_counter() - started
    gc.collect()
    gc.freeze()  # as in an engine's own process
    names = [name for name in args.workloads if name != "start"]
    run(llm, names, ready_s=ready if "start" in args.workloads else None, as_json=args.json)
    if args.profile:
        profile(llm, args.profile, args.profile_batch or 1)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Before a model is loaded and the first workloads are measured."""
    for name in args.workloads:
        if name != "start" and name not in WORKLOADS:
            raise ConfigError(f"unknown workload {name!r}; choose start, {', '.join(WORKLOADS)}")
    batch = args.profile_batch
    if batch is not None and batch < 1:
        raise ConfigError(f"profile_batch is {batch}, it must be at least 1")
    if batch is not None and not args.profile:
        raise ConfigError(f"profile_batch is {batch}, but nothing is profiled; add --profile DIR")
