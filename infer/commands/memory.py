"""``infer memory``: what a model needs, before anything is loaded."""

from __future__ import annotations

import argparse

from infer.errors import ConfigError


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``infer memory``."""
    add = parser.add_argument
    add("--model", metavar="NAME", help="preset, folder, .gguf file or hub name; default: embedded")
    add("--dtype", metavar="TYPE", help="float32, bfloat16 or float16; default: the checkpoint's")
    add("--tp", type=int, default=1, metavar="N", help="ranks that share the model (default: 1)")
    add("--block-size", type=int, default=16, metavar="N", help="positions a block (default: 16)")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="rows (default: 256)")
    add(
        "--context",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="positions whose KV to state; may be repeated (default: 4096)",
    )
    add("--memory", type=float, metavar="GIB", help="memory of a rank; default: this machine's GPU")
    add(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="X",
        help="share of it to use (default: 0.9)",
    )
    add("--json", action="store_true", help="print one JSON object, sizes in bytes")


def run_memory(args: argparse.Namespace) -> int:
    """Print the plan."""
    from infer.memoryplan import as_json, as_text, find_config, memory_plan

    name, cfg = find_config(args.model)
    plan = memory_plan(
        name,
        cfg,
        dtype=args.dtype or cfg.dtype,
        tp=args.tp,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        contexts=args.context or [4096],
        budget=_budget(args),
    )
    print(as_json(plan) if args.json else as_text(plan))
    return 0


def _budget(args: argparse.Namespace) -> int | None:
    share = args.gpu_memory_utilization
    if not 0 < share <= 1:
        raise ConfigError(f"gpu_memory_utilization is {share}, it must be above 0 and at most 1")
    if args.memory is not None:
        if args.memory <= 0:
            raise ConfigError(f"memory is {args.memory} GiB, it must be above 0")
        return int(args.memory * (1 << 30) * share)
    import torch

    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory * share)
