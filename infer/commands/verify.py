"""``infer verify``: evidence that a model computes here what it should."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from infer.engineoptions import LOAD_TEXTS, LoadOptions
from infer.errors import ConfigError
from infer.options import add_options, build, given


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``infer verify``."""
    own = ("dtype", "tp")
    texts = {name: text for name, text in LOAD_TEXTS.items() if name not in own}
    add_options(parser, "model", LoadOptions, texts)
    add = parser.add_argument
    add("--only", action="append", default=[], metavar="NAME", help="a comparison; may be repeated")
    add("--list", action="store_true", help="list the comparisons")
    add("--tp", type=int, metavar="N", help="ranks beside one; default: 2 where there can be two")
    add("--no-half", action="store_true", help="leave bfloat16 out")
    add("--weights-seed", type=int, default=0, metavar="N", help="of random weights")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add("--html", metavar="FILE", help="write a report with plots")


def run_verify(args: argparse.Namespace) -> int:
    """Compare and report; status 1 if a comparison failed, or none was made."""
    from infer.verify.report import as_json, summary, table
    from infer.verify.run import ALL_CHECKS, verify

    if args.list:
        width = max(len(check.name) for check in ALL_CHECKS)
        for check in ALL_CHECKS:
            print(f"{check.name:{width}}  {check.title}")
        return 0
    _check_writable(args.html)
    done: list[Any] = []

    def tell(row: Any) -> None:
        done.append(row)
        verdict, took = row.status, row.seconds
        print(f"{row.title}: {verdict} ({took:.1f} s)", file=sys.stderr, flush=True)

    outcome = verify(_subject(args), only=args.only, tp=_ranks(args), half=not args.no_half,
                     tell=tell)  # fmt: skip
    if args.html is not None:
        from infer.verify.html import as_html

        Path(args.html).write_text(as_html(outcome), encoding="utf-8")
    if args.json:
        print(as_json(outcome))
    else:
        print(table(outcome.rows))
        print(f"\n{summary(outcome)}")
    return 0 if outcome.passed else 1


def _subject(args: argparse.Namespace) -> Any:
    from infer.verify.subject import Subject

    options = {k: v for k, v in given(args, LoadOptions).items() if k != "tp"}
    build(LoadOptions, options)
    model = options.pop("model", None)
    if args.weights_seed:
        options["seed"] = args.weights_seed
    return Subject(model=model, options=options)


def _ranks(args: argparse.Namespace) -> int:
    if args.tp is not None:
        if args.tp < 1:
            raise ConfigError(f"tp is {args.tp}, it must be at least 1")
        return int(args.tp)
    import torch

    device = given(args, LoadOptions).get("device", "auto")
    if device == "cpu" or not torch.cuda.is_available():
        return 2
    return min(2, torch.cuda.device_count())


def _check_writable(path: str | None) -> None:
    """Better now than after minutes of work."""
    if path is None:
        return
    try:
        with Path(path).open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
