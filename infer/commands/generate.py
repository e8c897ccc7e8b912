"""``infer generate``: answers for prompts from the command line or a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.commands.sampling import add_sampling_options, given_sampling, sampling_params
from infer.engineoptions import add_engine_options, llm_options
from infer.errors import RequestError
from infer.outputs import Completion, RequestOutput
from infer.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt: a text, token ids, or the messages of a chat."""

    prompt: str | list[int] | list[dict[str, Any]]
    params: SamplingParams


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``infer generate``."""
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    add(
        "--prompt-ids",
        action="append",
        default=[],
        metavar="JSON",
        help="a prompt as a JSON list of token ids; may be repeated",
    )
    add(
        "--input",
        metavar="FILE.jsonl",
        help='one JSON object a line: "prompt", "prompt_token_ids" or "messages", '
        "and sampling options; - reads standard input",
    )
    add("--chat", action="store_true", help="put each text prompt into the chat template")
    add("--system", metavar="TEXT", help="system message of --chat")
    add("--json", action="store_true", help="print one JSON object an answer")
    add_sampling_options(parser)
    add_engine_options(parser, without=("seed",))  # --seed is the request's


def run_generate(args: argparse.Namespace) -> int:
    """Generate and print; progress goes to standard error."""
    jobs = list(_jobs(args))
    if not jobs:
        raise RequestError("there is no prompt; give --prompt, --prompt-ids or --input")
    model, engine = llm_options(args, without=("seed",))
    from infer.llm import LLM

    llm = LLM(model, **engine)
    prompts = [llm.encode(job.prompt) for job in jobs]
    progress = sys.stderr.isatty()
    outputs = llm.generate(prompts, [job.params for job in jobs], progress=progress)
    for output in outputs:
        for completion in output.outputs:
            print(_json(output, completion) if args.json else _text(completion), flush=True)
    return 0


def _jobs(args: argparse.Namespace) -> Iterator[Job]:
    base = given_sampling(args)
    params = sampling_params(base)
    for text in args.prompt:
        yield Job(_chat(args, text) if args.chat else text, params)
    for text in args.prompt_ids:
        yield Job(_ids(text, "--prompt-ids"), params)
    if args.input is None:
        return
    for number, line in enumerate(_lines(args.input), 1):
        where = f"{args.input}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise RequestError(f"{where} is not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise RequestError(f"{where} is not a JSON object")
        yield _entry(args, entry, base, where)


def _lines(name: str) -> list[str]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {name}: {error}") from error
    return [line for line in text.splitlines() if line.strip()]


def _entry(
    args: argparse.Namespace, entry: dict[str, Any], base: dict[str, Any], where: str
) -> Job:
    kinds = [k for k in ("prompt", "prompt_token_ids", "messages") if k in entry]
    if len(kinds) != 1:
        raise RequestError(f"{where} needs one of prompt, prompt_token_ids and messages")
    value = entry.pop(kinds[0])
    try:
        params = sampling_params({**base, **entry})
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from error
    if kinds[0] == "prompt_token_ids":
        return Job(_ids(json.dumps(value), where), params)
    if kinds[0] == "messages":
        if not isinstance(value, list) or not value:
            raise RequestError(f"{where}: messages must be a list of at least one message")
        return Job(value, params)
    if not isinstance(value, str):
        raise RequestError(f"{where}: prompt must be a text")
    return Job(_chat(args, value) if args.chat else value, params)


def _ids(text: str, where: str) -> list[int]:
    try:
        ids = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{where} is not JSON: {error}") from error
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise RequestError(f"{where} must be a JSON list of token ids, it is {text[:80]}")
    return ids


def _chat(args: argparse.Namespace, text: str) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": text}]


def _text(completion: Completion) -> str:
    if completion.text is None:
        return " ".join(map(str, completion.token_ids))
    return completion.text


def _json(output: RequestOutput, completion: Completion) -> str:
    metrics = output.metrics
    entry: dict[str, Any] = {
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "num_cached_tokens": output.num_cached_tokens,
        "ttft_s": metrics.ttft_s,
        "tpot_s": metrics.tpot_s,
    }
    if len(output.outputs) > 1:
        entry["index"] = completion.index
    if completion.logprobs is not None:
        entry["logprobs"] = [_logprob(own, top) for own, top in completion.logprobs]
    if output.prompt_logprobs is not None:
        entry["prompt_logprobs"] = [_logprob(own, top) for own, top in output.prompt_logprobs]
    return json.dumps(entry, ensure_ascii=False)


def _logprob(own: Any, top: Any) -> dict[str, Any]:
    return {
        "token_id": own.token_id,
        "logprob": own.logprob,
        "rank": own.rank,
        "top": [{"token_id": t.token_id, "logprob": t.logprob} for t in top],
    }
