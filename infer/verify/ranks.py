"""Several ranks beside transformers, through what an engine of ranks tells: log-probabilities.

A rank has the logits of its own part of the vocabulary only. Whole paths are therefore submitted as
prompts whose log-probabilities are asked for, which feeds the same tokens on every rank, and the
prompts are continued greedily beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from infer import engine
from infer.errors import ConfigError
from infer.initialize import init
from infer.model import Model
from infer.types import Logprob, PromptLogprobsEvent, Request, SamplingParams, TokenEvent
from infer.verify.compare import Errors, compare, joined
from infer.verify.context import AGAINST_TRANSFORMERS, Context
from infer.verify.paths import Path
from infer.verify.peak import Peak
from infer.verify.result import Row, judged, not_run

TOP = 20
Entries = list[tuple[int, Logprob, tuple[Logprob, ...]]]  # position, the path's own, the best


def tensor_parallel(name: str, title: str, c: Context) -> Row:
    """``c.tp`` ranks, beside transformers."""
    if c.tp == 1:
        return not_run(name, title, _why_one(c))
    title = f"{c.tp} ranks and transformers"
    try:
        model = c.subject.load(torch.float32, tp=c.tp)
    except ConfigError as error:
        return not_run(name, title, str(error))
    try:
        with Peak(model.device) as peak:
            began = time.perf_counter()
            entries, tokens = _run(model, c)
    finally:
        if model.tp.link is not None:
            model.tp.link.close()
    errors = joined([_apart(entries[path.name], c.reference[path.name]) for path in c.paths])
    right = sum(
        got == want
        for path in c.paths
        for got, want in zip(tokens[path.name], path.tokens[path.num_prompt :], strict=True)
    )
    return judged(
        name,
        title,
        errors,
        tolerance=AGAINST_TRANSFORMERS,
        tokens=(right, sum(path.num_generated for path in c.paths)),
        counts={"ranks": model.tp.size},
        expected={"ranks": c.tp},
        peak_bytes=peak.bytes,
        seconds=time.perf_counter() - began,
    )


def _why_one(c: Context) -> str:
    if c.model.device.type == "cuda":
        return f"there is {torch.cuda.device_count()} GPU here; ranks need one each"
    return "one rank was asked for; add --tp 2"


def _run(model: Model, c: Context) -> tuple[dict[str, Entries], dict[str, list[int]]]:
    state = init(model, c.config(max_num_seqs=8))
    state = engine.submit(state, [r for path in c.paths for r in _requests(path)])
    entries: dict[str, Entries] = {path.name: [] for path in c.paths}
    tokens: dict[str, list[int]] = {path.name: [] for path in c.paths}
    while engine.has_work(state):
        state, report = engine.step(model, state)
        for event in report.events:
            if isinstance(event, PromptLogprobsEvent):
                name = event.request_id.removesuffix("/whole")
                entries[name] += [(i, own, best) for i, (own, best) in enumerate(event.logprobs)]
            elif isinstance(event, TokenEvent) and event.request_id in tokens:
                tokens[event.request_id].append(event.token_id)
    return entries, tokens


def _requests(path: Path) -> Sequence[Request]:
    whole = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=TOP)
    greedy = SamplingParams(temperature=0.0, max_tokens=path.num_generated, ignore_eos=True)
    return (
        Request(request_id=f"{path.name}/whole", prompt_token_ids=path.tokens[:-1], params=whole),
        Request(request_id=path.name, prompt_token_ids=path.prompt, params=greedy),
    )


def _apart(entries: Entries, logits: Tensor) -> Errors:
    """Log-probabilities of the path's own token and of the best, where the engine ranked them."""
    want_all = logits.double().log_softmax(dim=-1)
    got, ids = [], []
    for _, own, best in entries:
        got.append([own.logprob, *(b.logprob for b in best)])
        ids.append([own.token_id, *(b.token_id for b in best)])
    at = [position for position, _, _ in entries]
    chosen = torch.tensor(ids)
    errors = compare(torch.tensor(got), want_all[at].gather(1, chosen))
    lead = want_all[at].amax(dim=-1) - want_all[at].gather(1, chosen[:, 1:2])[:, 0]
    differs = lead > 0
    ties = differs & (lead <= 2 * errors.max_abs)
    return replace(errors, agreed=int((~differs).sum()), ties=int(ties.sum()))
