"""``infer bench``: named workloads in this process. ``infer bench serve`` is ``infer.loadgen``."""

from __future__ import annotations

import argparse

from infer.bench.run import add_bench_arguments, run_bench
from infer.engineoptions import add_engine_options, llm_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``infer bench``."""
    add_bench_arguments(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    model, engine = llm_options(args)
    from infer.llm import LLM

    return run_bench(lambda: LLM(model, **engine), args)
