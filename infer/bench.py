"""``infer bench``: named workloads, each figure beside the floor that the hardware sets."""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from infer.errors import ConfigError
from infer.llm import LLM
from infer.types import RequestStats, SamplingParams

DECODE_BATCHES = (1, 8, 32, 64, 128, 256)
PROMPT_LEN, OUTPUT_LEN, REPEATS = 128, 129, 3
TEMPERATURE = 0.6
# Memory bandwidth in bytes/s and dense bf16 rate in FLOP/s that set the floors, by device name.
PEAKS = {"NVIDIA H200": (4.8e12, 989e12), "NVIDIA H100": (3.35e12, 989e12)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number."""

    workload: str
    name: str
    value: float
    unit: str
    floor: float | None = None  # the best the hardware allows, in the same unit
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def percent_of_floor(self) -> float | None:
        """How much of the floor's speed was reached, 100 being all of it."""
        if self.floor is None:
            return None
        rate = self.unit.endswith("/s")
        return 100 * (self.value / self.floor if rate else self.floor / self.value)


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes and operations of a model, against the device's peaks."""

    weight_bytes: int  # read once a decode step
    kv_bytes: int  # a context position
    flops: int  # a token, without attention
    bandwidth: float
    rate: float

    def decode_s(self, batch: int, context: float) -> float:
        """Seconds of a decode step that reads weights once and every context once."""
        return (self.weight_bytes + batch * context * self.kv_bytes) / self.bandwidth

    def prefill_s(self, tokens: int) -> float:
        """Seconds to multiply ``tokens`` positions."""
        return tokens * self.flops / self.rate


def floor_of(llm: LLM) -> Floor | None:
    """The floor on a known GPU; None elsewhere."""
    model = llm.model
    if model.device.type != "cuda":
        return None
    peaks = PEAKS.get(torch.cuda.get_device_name(model.device))
    if peaks is None:
        return None
    cfg, size = model.config, model.dtype.itemsize
    layer = cfg.hidden_size * (2 * cfg.q_size + 2 * cfg.kv_size + 3 * cfg.intermediate_size)
    body = cfg.num_layers * layer
    head = cfg.vocab_size * cfg.hidden_size
    kv = cfg.num_layers * 2 * cfg.kv_size * size
    return Floor((body + head) * size, kv, 2 * body, *peaks)


def random_prompts(rng: random.Random, count: int, length: int, vocab: int) -> list[list[int]]:
    """Prompts without a common prefix."""
    return [[rng.randrange(min(vocab, 10_000)) for _ in range(length)] for _ in range(count)]


def _timed(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> float:
    started = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return time.perf_counter() - started


def _fixed(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=TEMPERATURE, max_tokens=tokens, ignore_eos=True)


def bench_decode(llm: LLM, batches: Sequence[int] = DECODE_BATCHES) -> list[Figure]:
    """Milliseconds a decode step: (time for 129 tokens - time for 1) / 128, best of three each."""
    rng, floor, figures = random.Random(0), floor_of(llm), []
    for batch in batches:
        if batch > llm.state.limits.max_num_seqs:
            continue
        best = {}
        for tokens in (1, OUTPUT_LEN):
            runs = []
            for _ in range(REPEATS):
                prompts = random_prompts(rng, batch, PROMPT_LEN, llm.model.config.vocab_size)
                runs.append(_timed(llm, prompts, _fixed(tokens)))
            best[tokens] = min(runs)
        step = (best[OUTPUT_LEN] - best[1]) / (OUTPUT_LEN - 1)
        context = PROMPT_LEN + OUTPUT_LEN / 2
        figures.append(
            Figure(
                workload="decode",
                name=f"batch {batch}",
                value=1e3 * step,
                unit="ms/step",
                floor=1e3 * floor.decode_s(batch, context) if floor else None,
            )
        )
    return figures


def bench_offline(llm: LLM) -> list[Figure]:
    """256 requests, prompts and outputs uniform in 100..1024 tokens: output tokens a second."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    vocab = llm.model.config.vocab_size
    prompts = [[token % vocab for token in prompt] for prompt in prompts]
    params = [_fixed(rng.randint(100, 1024)) for _ in range(256)]
    llm.generate([[1, 2, 3]], _fixed(2), progress=False)
    seconds = _timed(llm, prompts, params)
    outputs = sum(p.max_tokens or 0 for p in params)
    inputs = sum(map(len, prompts))
    floor = floor_of(llm)
    best = None
    if floor:
        contexts = [
            len(p) * o.max_tokens + o.max_tokens * (o.max_tokens + 1) / 2
            for p, o in zip(prompts, params, strict=True)
            if o.max_tokens
        ]
        longest = max(p.max_tokens or 0 for p in params)
        read = sum(contexts) * floor.kv_bytes + longest * floor.weight_bytes
        best = outputs / (read / floor.bandwidth + floor.prefill_s(inputs))
    return [
        Figure(
            workload="offline",
            name="output tokens",
            value=outputs / seconds,
            unit="tok/s",
            floor=best,
            detail={"prompt_tokens": inputs, "output_tokens": outputs, "seconds": seconds},
        )
    ]


def bench_prefill(llm: LLM) -> list[Figure]:
    """Time to the first token of one prompt of 128, and tokens a second of 8 prompts of 2,048."""
    rng, vocab = random.Random(1), llm.model.config.vocab_size
    floor = floor_of(llm)
    single = []
    for _ in range(10):
        stats: RequestStats = llm.generate(
            random_prompts(rng, 1, PROMPT_LEN, vocab), _fixed(1), progress=False
        )[0].metrics
        assert stats.ttft_s is not None
        single.append(stats.ttft_s)
    figures = [
        Figure(
            workload="prefill",
            name="time to first token, 128",
            value=1e3 * min(single),
            unit="ms",
            floor=1e3 * floor.decode_s(1, PROMPT_LEN) if floor else None,
            detail={"median": 1e3 * sorted(single)[len(single) // 2]},
        )
    ]
    length = min(2048, llm.state.limits.max_model_len - 1)
    runs = [_timed(llm, random_prompts(rng, 8, length, vocab), _fixed(1)) for _ in range(REPEATS)]
    figures.append(
        Figure(
            workload="prefill",
            name=f"8 prompts of {length}",
            value=8 * length / min(runs),
            unit="tok/s",
            floor=8 * length / floor.prefill_s(8 * length) if floor else None,
        )
    )
    return figures


def bench_peer(llm: LLM) -> list[Figure]:
    """See ``infer.bench_peer``; transformers is imported only for it."""
    from infer.bench_peer import bench_peer as measure

    return measure(llm)


WORKLOADS: dict[str, Callable[[LLM], list[Figure]]] = {
    "decode": bench_decode,
    "offline": bench_offline,
    "prefill": bench_prefill,
    "peer": bench_peer,
}
STANDARD = ("decode", "offline", "prefill")  # what runs when no workload is named


def conditions(llm: LLM) -> dict[str, Any]:
    """What a figure depends on: date, device, versions, commit, engine options."""
    model, state = llm.model, llm.state
    cuda = model.device.type == "cuda"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(model.device)
        if cuda
        else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": commit or "unknown",
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": state.runtime.ops.name,
        "engine": asdict(state.config),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
    return "\n".join(lines)


def run(
    llm: LLM, names: Sequence[str], *, ready_s: float | None = None, as_json: bool = False
) -> list[Figure]:
    """Run workloads, print the report, and return the figures."""
    figures = []
    if ready_s is not None:
        figures.append(Figure(workload="start", name="load to ready", value=ready_s, unit="s"))
    for name in names:
        if name not in WORKLOADS:
            raise ConfigError(f"unknown workload {name!r}; choose start, {', '.join(WORKLOADS)}")
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
    llm.generate(prompts, _fixed(4), progress=False)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if llm.model.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    prompts = random_prompts(rng, batch, PROMPT_LEN, llm.model.config.vocab_size)
    with torch.profiler.profile(activities=activities) as prof:
        llm.generate(prompts, _fixed(33), progress=False)
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
    parser.add_argument("--profile-batch", type=int, default=1, metavar="N")


def run_bench(make: Callable[[], LLM], args: argparse.Namespace) -> int:
    """``infer bench``: build the engine, measure, report."""
    started = time.perf_counter()
    llm = make()
    llm.generate([[1, 2, 3]], _fixed(1), progress=False)
    ready = time.perf_counter() - started
    names = [name for name in args.workloads if name != "start"]
    run(llm, names, ready_s=ready if "start" in args.workloads else None, as_json=args.json)
    if args.profile:
        profile(llm, args.profile, args.profile_batch)
    return 0
