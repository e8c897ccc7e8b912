"""``infer chat``: a conversation in the terminal, streamed."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from infer.commands.sampling import add_sampling_options, given_sampling, sampling_params
from infer.engineoptions import add_engine_options, llm_options
from infer.errors import InferError
from infer.types import FinishReason, SamplingParams

HELP = """Type a message and press Enter; Ctrl-C stops an answer, Ctrl-D or /exit leaves.
/reset forgets the conversation, /undo the last exchange, /system TEXT sets the system message."""


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``infer chat``."""
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="enable_thinking of the chat template",
    )
    add_sampling_options(parser, without=("n", "logprobs", "prompt_logprobs"))  # only text is shown
    add_engine_options(parser, without=("seed",))  # --seed is the request's


def run_chat(args: argparse.Namespace) -> int:
    """Talk until the user leaves."""
    from infer.llm import LLM
    from infer.presets import DEFAULT, find_preset

    model, engine = llm_options(args, without=("seed",))
    preset = find_preset(model or DEFAULT)
    chosen = {**(preset.chat if preset else {}), **given_sampling(args)}
    params = sampling_params(chosen)
    llm = LLM(model, **engine)
    template = {} if args.think is None else {"enable_thinking": args.think}
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{llm.model.name} on {llm.model.device}. {HELP}\n")
    conversation = _Conversation(args.system)
    while (text := _read(interactive)) is not None:
        if text.startswith("/"):
            if text == "/exit":
                break
            print(conversation.command(text))
        elif text:
            _exchange(llm, conversation, text, params, template)
    return 0


class _Conversation:
    def __init__(self, system: str | None) -> None:
        self._system = system
        self.messages: list[dict[str, Any]] = []

    def prompt(self, text: str) -> list[dict[str, Any]]:
        """All messages with one more of the user's."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self.messages, {"role": "user", "content": text}]

    def add(self, question: str, answer: str) -> None:
        """Remember an exchange."""
        self.messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def command(self, text: str) -> str:
        """Carry out a slash command; what to tell the user."""
        name, _, rest = text.partition(" ")
        if name == "/reset":
            self.messages = []
            return "The conversation is empty."
        if name == "/undo":
            self.messages = self.messages[:-2]
            return f"{len(self.messages) // 2} exchanges left."
        if name == "/system":
            self._system = rest or None
            return "The system message is set." if rest else "The system message is off."
        return HELP


def _read(interactive: bool) -> str | None:
    try:
        return input("> " if interactive else "").strip()
    except (EOFError, KeyboardInterrupt):
        if interactive:
            print()
        return None


def _exchange(
    llm: Any, conversation: _Conversation, text: str, params: SamplingParams, template: Any
) -> None:
    parts: list[str] = []
    reason = None
    deltas = llm.stream(conversation.prompt(text), params, **template)
    try:
        for delta in deltas:
            parts.append(delta.text)
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            reason = delta.finish_reason or reason
    except KeyboardInterrupt:
        deltas.close()
        sys.stdout.write(" [stopped]")
    except InferError as error:
        print(f"error: {error}", file=sys.stderr)
        return
    print(" [length]\n" if reason is FinishReason.LENGTH else "\n")
    conversation.add(text, "".join(parts))
