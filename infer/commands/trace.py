"""``infer trace``: write down every step of a run, and what to do with such a file."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from infer.engineoptions import add_engine_options, llm_options
from infer.errors import ConfigError, RequestError

ACTIONS = {
    "record": "run prompts or a case and write events (the default)",
    "replay": "run a trace again and compare: exit status 1 if it differs",
    "view": "draw a trace in the terminal",
    "perfetto": "write a trace for ui.perfetto.dev",
    "cases": "list the built-in cases",
}


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``infer trace``."""
    add = parser.add_argument
    texts = "; ".join(f"{name}: {text}" for name, text in ACTIONS.items())
    add("action", nargs="?", default="record", choices=ACTIONS, help=texts)
    add("file", nargs="?", metavar="FILE", help="a trace, for replay, view and perfetto")
    add("--case", metavar="NAME", help="a built-in run on a tiny random model, or on --model")
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    add(
        "--prompt-ids",
        action="append",
        default=[],
        metavar="JSON",
        help="a prompt as a JSON list of token ids; may be repeated",
    )
    add("--max-tokens", type=int, default=16, metavar="N", help="of a prompt (default: 16)")
    add("--out", metavar="FILE", help="where to write; default: standard output")
    add("--shapes", action="store_true", help="record the shapes of every layer's tensors")
    add("--tokens-only", action="store_true", help="replay: compare only what was generated")
    add("--step", type=int, action="append", default=[], metavar="N", help="view: steps to show")
    add("--brief", action="store_true", help="view: the timeline alone")
    add_engine_options(parser, without=("pipeline_depth",))


def run_trace(args: argparse.Namespace) -> int:
    """Do what the action says."""
    if args.action == "record":
        return _record(args)
    if args.action == "cases":
        return _cases(args)
    if args.file is None:
        raise ConfigError(f"infer trace {args.action} needs a FILE: a trace that was recorded")
    from infer.trace.files import damage_told, read

    events = read(args.file)
    if args.action == "replay":
        return _replay(args, events)
    with damage_told(args.file):
        if args.action == "view":
            from infer.trace.view import draw

            text = draw(events, steps=args.step, details=not args.brief)
        else:
            from infer.trace.perfetto import chrome_trace

            text = chrome_trace(events)
    with _output(args.out) as out:
        out.write(text + "\n")
    return 0


def _record(args: argparse.Namespace) -> int:
    from infer.trace.files import write
    from infer.trace.record import record

    if args.file is not None:
        raise ConfigError(f"infer trace record takes no FILE; write with --out {args.file}")
    model, setup = _prepared(args)
    with _output(args.out) as out:
        write(record(model, setup, shapes=args.shapes), out)
    return 0


def _prepared(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model and the run that the command line describes."""
    from infer.trace.cases import case_setup
    from infer.trace.setup import TINY, Setup, arrival, load_model

    name, options = llm_options(args, without=("pipeline_depth",))
    load, engine = _split(options)
    if args.case is not None:
        if args.prompt or args.prompt_ids:
            raise RequestError("give --case or prompts, not both")
        setup = case_setup(args.case, name or TINY, load, engine)
        return load_model(setup), setup
    if not args.prompt and not args.prompt_ids:
        raise RequestError("there is nothing to trace; give --case, --prompt or --prompt-ids")
    setup = Setup(model=name, load=load, engine=engine)
    model = load_model(setup)
    prompts = [_encoded(model, text) for text in args.prompt]
    prompts += [_ids(text) for text in args.prompt_ids]
    arrivals = tuple(
        arrival(f"R{i}", ids, args.max_tokens, ignore_eos=False) for i, ids in enumerate(prompts, 1)
    )
    return model, Setup(model=name, load=load, engine=engine, arrivals=arrivals)


def _replay(args: argparse.Namespace, events: list[Any]) -> int:
    from dataclasses import replace

    from infer.trace.files import setup_from
    from infer.trace.record import record
    from infer.trace.replay import differences
    from infer.trace.setup import load_model

    setup = setup_from(events)
    name, options = llm_options(args, without=("pipeline_depth",))
    load, engine = _split(options)
    setup = replace(
        setup,
        model=name or setup.model,
        load={**setup.load, **load},
        engine={**setup.engine, **engine},
    )
    found = differences(events, record(load_model(setup), setup), tokens_only=args.tokens_only)
    for difference in found:
        print(difference)
    what = "tokens" if args.tokens_only else f"{len(events)} events"
    print(f"differs from {args.file}" if found else f"the same: {what}")
    return 1 if found else 0


def _cases(args: argparse.Namespace) -> int:
    from infer.trace.cases import CASES, case_text

    for name in CASES:
        print(f"{name:12}{case_text(name)}")
    return 0


def _split(options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of loading, and options of the engine."""
    from dataclasses import fields

    from infer.config import EngineConfig

    names = {f.name for f in fields(EngineConfig)}
    engine = {k: v for k, v in options.items() if k in names}
    return {k: v for k, v in options.items() if k not in names}, engine


def _encoded(model: Any, text: str) -> list[int]:
    if model.tokenizer is None:
        raise RequestError(f"model {model.name!r} has no tokenizer; give --prompt-ids")
    ids: list[int] = model.tokenizer.encode(text)
    return ids


def _ids(text: str) -> list[int]:
    try:
        ids = json.loads(text)
    except ValueError as error:
        raise RequestError(f"--prompt-ids is not JSON: {error}") from error
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise RequestError(f"--prompt-ids must be a JSON list of token ids, it is {text[:80]}")
    return ids


@contextlib.contextmanager
def _output(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
