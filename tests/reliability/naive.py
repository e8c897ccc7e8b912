"""The plainest generator there is: one request at a time, transformers' logits, one token a draw.

The edits of the logits are written here once more from their definition. Greedy tokens owe nothing
to the engine; for random ones the engine's sampler draws, over one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.ops.sample import sample
from infer.ops.sampling import SampleFlags
from infer.types import FinishReason, SamplingParams
from tests.engine.models import reference
from tests.ops.sampling import rows_of

EVERY_FLAG = SampleFlags(greedy=False, top_k=True, top_p=True, min_p=True)
SLACK = 2e-4  # by which two float32 forward passes may differ in a logit


@dataclass(frozen=True)
class Job:
    """One sequence: what was asked for, and everything that decides its tokens."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    choice: int = 0
    begun: tuple[int, ...] = ()  # tokens it had before it was forked off


@torch.no_grad()
def raw_logits(tokens: Sequence[int]) -> Tensor:
    """transformers' logits at every position, f32[len(tokens), vocab]."""
    return reference()(torch.tensor([list(tokens)])).logits[0]


def edited(raw: Tensor, job: Job, generated: Sequence[int], eos: Sequence[int]) -> Tensor:
    """``raw`` as the request wants it, by the definition of each option."""
    p, logits = job.params, raw.clone()
    if len(generated) < p.min_tokens:
        for token in (*p.stop_token_ids, *(() if p.ignore_eos else eos)):
            logits[token] = -torch.inf
    for token, value in (p.logit_bias or {}).items():
        logits[token] += value
    for token in {*job.prompt, *generated}:
        factor = 1.0 if p.repetition_penalty is None else p.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(generated):
        count = list(generated).count(token)
        logits[token] -= p.frequency_penalty * count + p.presence_penalty
    return logits


def pick(logits: Tensor, job: Job, position: int) -> int:
    """The token at ``position``, from edited logits."""
    p = job.params
    if p.temperature == 0:
        return int(logits.argmax())
    row = rows_of(
        1,
        temperature=1.0 if p.temperature is None else p.temperature,
        top_k=max(0, p.top_k or 0),
        top_p=1.0 if p.top_p is None else p.top_p,
        min_p=p.min_p or 0.0,
        seed=job.seed,
        choice=job.choice,
    )
    zero = torch.zeros(1, dtype=torch.int32)
    at = torch.tensor([position], dtype=torch.int32)
    return int(sample(logits[None], zero, at, row, EVERY_FLAG).tokens[0])


def could_be(logits: Tensor, job: Job, position: int, token: int) -> bool:
    """Whether logits that differ by no more than ``SLACK`` give ``token``: it is nearly a tie."""
    draw = torch.Generator().manual_seed(position)
    for _ in range(200):
        noise = (torch.rand(logits.shape, generator=draw) * 2 - 1) * SLACK
        if pick(logits + noise, job, position) == token:
            return True
    return False


def compare(job: Job, got: Sequence[int], eos: Sequence[int]) -> int:
    """Assert that ``got`` is what the naive generator makes; return how many near ties it had.

    Each token is checked after the tokens before it, which by induction is equality of the whole.
    """
    if not got:
        return 0
    known = [*job.begun, *got]
    raw = raw_logits([*job.prompt, *known[:-1]])
    ties = 0
    for i in range(len(job.begun), len(known)):
        position = len(job.prompt) + i
        logits = edited(raw[position - 1], job, known[:i], eos)
        token = pick(logits, job, position)
        if token != known[i]:
            assert could_be(logits, job, position, known[i]), (
                f"token {i} is {known[i]}, the naive generator's is {token}: {job}"
            )
            ties += 1
    return ties


def ending(
    job: Job,
    known: Sequence[int],
    eos: Sequence[int],
    max_model_len: int,
    token_bytes: Sequence[bytes],
) -> FinishReason | None:
    """Why ``known`` (all generated tokens) is a whole answer; None when it must go on.

    Also asserts that it did not have to end earlier.
    """
    p = job.params
    limit = max_model_len - len(job.prompt)
    limit = limit if p.max_tokens is None else min(limit, p.max_tokens)
    for count in range(1, len(known) + 1):
        reason = _ends_at(job, known[:count], eos, token_bytes)
        if reason is None and count == limit:
            reason = FinishReason.LENGTH
        if reason is not None:
            assert count == len(known), f"it should have ended after {count} tokens: {job}"
            return reason
    return None


def _ends_at(
    job: Job, known: Sequence[int], eos: Sequence[int], token_bytes: Sequence[bytes]
) -> FinishReason | None:
    p = job.params
    if len(known) <= p.min_tokens or len(known) <= len(job.begun):
        return None
    if (known[-1] in eos and not p.ignore_eos) or known[-1] in p.stop_token_ids:
        return FinishReason.STOP
    before = b"".join(token_bytes[token] for token in known[:-1])
    text = before + token_bytes[known[-1]]
    for stop in p.stop:
        at = text.find(stop.encode(), max(0, len(before) - len(stop.encode()) + 1))
        if at >= 0:
            return FinishReason.STOP
    return None
