"""``infer models``: what can be loaded by name, and what is on this machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``infer models``."""
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run_models(args: argparse.Namespace) -> int:
    """Print presets and cached checkpoints."""
    from infer.catalog import known_models

    entries = known_models()
    if args.json:
        for entry in entries:
            print(json.dumps(asdict(entry)))
        return 0
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        size = f"{entry.num_bytes / 1e6:,.0f} MB" if entry.num_bytes else ""
        print(f"{entry.name:{width}}  {entry.state:8}  {size:>10}  {entry.source}")
        if entry.description:
            print(f"{'':{width}}  {entry.description}")
    return 0
