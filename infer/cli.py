"""The command ``infer``. Subcommands import what they need when they run, so that help is quick."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from infer import __version__
from infer.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    InferError,
    RequestError,
)

USER_ERRORS = (ConfigError, RequestError, CapacityError, CheckpointError)

# name: (what it does, module, function adding its arguments, function running it)
COMMANDS: dict[str, tuple[str, str, str, str]] = {
    "chat": (
        "talk to a model in the terminal",
        "infer.commands.chat",
        "add_chat_arguments",
        "run_chat",
    ),
    "generate": (
        "answer prompts from the command line or a file",
        "infer.commands.generate",
        "add_generate_arguments",
        "run_generate",
    ),
    "serve": (
        "run an OpenAI-compatible server",
        "infer.app",
        "add_serve_arguments",
        "run_serve",
    ),
    "dashboard": (
        "the chat page in a process of its own, for a server anywhere",
        "dashboard.command",
        "add_dashboard_arguments",
        "run_dashboard",
    ),
    "models": (
        "list models by name and what is cached",
        "infer.commands.models",
        "add_models_arguments",
        "run_models",
    ),
    "memory": (
        "what a model needs, before anything is loaded",
        "infer.commands.memory",
        "add_memory_arguments",
        "run_memory",
    ),
    "trace": (
        "write down every step; replay, view and export traces",
        "infer.commands.trace",
        "add_trace_arguments",
        "run_trace",
    ),
    "verify": (
        "compare the engine with transformers and with itself",
        "infer.commands.verify",
        "add_verify_arguments",
        "run_verify",
    ),
    "bench": (
        "measure named workloads (bench serve: a running server)",
        "infer.commands.bench",
        "add_arguments",
        "run",
    ),
    "bench-serve": (
        "put load on a running server",
        "infer.loadgen",
        "add_load_arguments",
        "run_load",
    ),
}

RANKED = ("chat", "generate", "serve", "bench")  # the first rank runs them, the others follow it


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line: the usage of some commands fills a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. User mistakes end in one line and status 2."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except InferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141


def _run(arguments: list[str]) -> int:
    if arguments[:2] == ["bench", "serve"]:
        arguments[:2] = ["bench-serve"]
    name = next((a for a in arguments if not a.startswith("-")), None)
    parser = _Parser(
        prog="infer", description="Language-model inference whose whole state is a value."
    )
    parser.add_argument("--version", action="version", version=f"purestep {__version__}")
    chosen = parser
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command, (text, module, add, _) in COMMANDS.items():
        if "-" in command and command != name:
            continue  # `bench serve` is listed with `bench`
        sub = commands.add_parser(
            command,
            prog=f"infer {command.replace('-', ' ')}",
            description=text[0].upper() + text[1:] + ".",
            help=text,
        )
        if command == name:
            chosen = sub
            getattr(import_module(module), add)(sub)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}")
    _, module, _, run = COMMANDS[args.command]
    if args.command in RANKED and getattr(args, "tp", None) != 1 and follows_torchrun():
        return 0
    status: int = getattr(import_module(module), run)(args)
    return status


def follows_torchrun() -> bool:
    """Whether torchrun started this process as another rank than the first; then follow it."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in names) or int(os.environ["RANK"]) == 0:
        return False
    from infer.worker import follow_torchrun

    follow_torchrun(int(os.environ["RANK"]))
    return True


if __name__ == "__main__":
    sys.exit(main())
