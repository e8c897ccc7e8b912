"""Sampling parameters as command-line options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from infer.errors import RequestError
from infer.types import SamplingParams

NUMBERS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy (default: the model's)"),
    "top_k": (int, "sample among the K best; 0 is off"),
    "top_p": (float, "sample among the best that make up this probability"),
    "min_p": (float, "drop tokens below this share of the best one's probability"),
    "repetition_penalty": (float, "above 1 discourages tokens seen in prompt or answer"),
    "presence_penalty": (float, "taken off the logit of every generated token"),
    "frequency_penalty": (float, "the same for each time it was generated"),
    "seed": (int, "makes sampling repeatable"),
    "n": (int, "answers a prompt"),
    "max_tokens": (int, "longest answer (default: up to max_model_len)"),
    "min_tokens": (int, "no end before this many tokens"),
    "logprobs": (int, "log-probabilities: of the sampled token and of the N best"),
    "prompt_logprobs": (int, "the same for the prompt's tokens"),
}


def add_sampling_options(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """Add one option for every field of ``SamplingParams`` but those ``without``."""
    group = parser.add_argument_group("sampling")

    def add(name: str, **how: Any) -> None:
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, dest=name, default=argparse.SUPPRESS, **how)

    for name, (kind, text) in NUMBERS.items():
        if name in without:
            continue
        add(name, type=kind, metavar="N" if kind is int else "X", help=text)
    add("stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add(
        "stop_token_ids",
        action="append",
        type=int,
        metavar="ID",
        help="end at this token; may be repeated",
    )
    add("logit_bias", type=_bias, metavar="JSON", help='add to logits, {"token id": number}')
    add("ignore_eos", action="store_true", help="go on after an end-of-sequence token")
    add("include_stop_str_in_output", action="store_true", help="keep the stop string")
    add(
        "skip_special_tokens",
        action=argparse.BooleanOptionalAction,
        help="leave special tokens out of the text (default: on)",
    )


def _bias(text: str) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object of numbers") from error


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that the user gave."""
    values = vars(args)
    return {f.name: values[f.name] for f in fields(SamplingParams) if f.name in values}


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Parameters from option names that may come from a file.

    Raises:
        RequestError: an unknown name, or a value of the wrong type or out of range.
    """
    known = {f.name for f in fields(SamplingParams)}
    for name in options:
        if name not in known:
            raise RequestError(
                f"unknown sampling option {name!r}; the options are {', '.join(sorted(known))}"
            )
    try:
        return SamplingParams(**options)
    except TypeError as error:
        raise RequestError(f"a sampling option has the wrong type: {error}") from error
