"""Sampling over a vocabulary that is split among ranks; every rank ends up with the same tokens.

A rank scores its own ids, and the best score of any rank wins, so greedy and random rows exchange
three numbers each. Rows with a top-k exchange that many candidates of each rank. Only what needs
the whole distribution gathers it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infer.ops.logprobs import top_set
from infer.ops.noise import log_exponential, noise_bits, row_keys
from infer.ops.sample import best_shard, sample
from infer.ops.sampling import GREEDY_BELOW, Sampled, SampleFlags, SamplingRows
from infer.ops.truncate import truncate
from infer.parallel import TP, all_gather

MAX_CANDIDATES = 256  # of a rank; beyond, the whole row is as cheap


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the vocabulary whose logits this rank has: ids from ``start``, ``size`` of them.

    Logits have ``columns`` columns on every rank; those past ``size`` are padding. Shards are in
    the order of ids, so padding is only at the end of the last ones.
    """

    tp: TP
    start: int
    size: int
    columns: int
    vocab_size: int  # of all ranks


def whole(logits: Tensor, shard: Shard) -> Tensor:
    """Logits ``[L, vocab_size]`` of all ranks from this rank's ``[L, columns]``."""
    if shard.tp.size == 1:
        return logits
    every = all_gather(logits, shard.tp).transpose(0, 1).flatten(1)
    return every[:, : shard.vocab_size]


def sample_sharded(
    logits: Tensor,
    sample_logits: Tensor,
    positions: Tensor,
    params: SamplingRows,
    flags: SampleFlags,
    shard: Shard,
    num_candidates: int | None = None,
) -> Sampled:
    """``infer.ops.sample.sample`` for this rank's columns of the logits.

    ``num_candidates`` is a bound on the top-k of rows that truncate; None: some have no top-k.
    """
    if shard.tp.size == 1:
        return sample(logits, sample_logits, positions, params, flags)
    truncates = not flags.greedy and (flags.top_k or flags.top_p or flags.min_p)
    if truncates and (num_candidates is None or num_candidates > MAX_CANDIDATES):
        return sample(whole(logits, shard), sample_logits, positions, params, flags)
    if shard.size < shard.columns:
        padding = torch.arange(shard.columns, device=logits.device) >= shard.size
        logits = logits.masked_fill(padding, -torch.inf)
    own = sample(logits, sample_logits, positions, params, flags, vocab_offset=shard.start)
    best = joined(own, shard)
    if not truncates:
        return best
    assert num_candidates is not None
    greedy = params.temperature < GREEDY_BELOW
    temperature = torch.where(greedy, 1.0, params.temperature).unsqueeze(-1)
    scaled = logits.index_select(0, sample_logits).float() / temperature
    tokens, scores = _from_candidates(scaled, positions, params, shard, num_candidates)
    chosen = ~greedy & (params.top_k > 0)
    return Sampled(
        tokens=torch.where(chosen, tokens, best.tokens),
        scores=torch.where(chosen, scores, best.scores),
        nan=best.nan,
    )


def _from_candidates(
    scaled: Tensor, positions: Tensor, params: SamplingRows, shard: Shard, count: int
) -> tuple[Tensor, Tensor]:
    """Tokens i32[M] and scores f32[M] of rows whose top-k is at most ``count``.

    The ``count`` largest of every rank hold the largest of all, and lie in the order of their ids,
    so that truncation keeps the very tokens that it keeps of the whole row.
    """
    ids = top_set(scaled, min(count, shard.columns))
    words = torch.stack((scaled.gather(-1, ids).view(torch.int32), (ids + shard.start).int()))
    bits, every = all_gather(words, shard.tp).permute(1, 2, 0, 3).flatten(2).unbind(0)
    values = bits.contiguous().view(torch.float32)
    kept = truncate(values, params.top_k, params.top_p, params.min_p)
    keys = row_keys(params.seed, params.choice, positions)
    scores, at = (kept - log_exponential(noise_bits(keys, every))).max(dim=-1)
    return every.gather(-1, at.unsqueeze(-1)).squeeze(-1), scores


def joined(own: Sampled, shard: Shard) -> Sampled:
    """The best of all ranks, by one exchange of ``[3, M]`` words; ``own`` where there is one."""
    if shard.tp.size == 1:
        return own
    words = torch.stack((own.tokens, own.scores.view(torch.int32), own.nan.to(torch.int32)))
    tokens, bits, nan = all_gather(words, shard.tp).unbind(1)
    scores = bits.contiguous().view(torch.float32)
    return Sampled(
        tokens=best_shard(tokens, scores).clamp(max=shard.vocab_size - 1),
        scores=scores.amax(0),
        nan=nan.any(0),
    )
