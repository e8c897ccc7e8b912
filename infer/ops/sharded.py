"""Sampling over a vocabulary that is split among ranks; every rank ends up with the same tokens.

A rank scores its own ids, and the best score of any rank wins, so greedy and random rows exchange
three numbers each. Only what needs the whole distribution gathers it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infer.ops.sample import Sampled, SampleFlags, SamplingRows, best_shard, sample
from infer.parallel import TP, all_gather


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
) -> Sampled:
    """``infer.ops.sample.sample`` for this rank's columns of the logits."""
    if shard.tp.size == 1:
        return sample(logits, sample_logits, positions, params, flags)
    if not flags.greedy and (flags.top_k or flags.top_p or flags.min_p):
        return sample(whole(logits, shard), sample_logits, positions, params, flags)
    if shard.size < shard.columns:
        padding = torch.arange(shard.columns, device=logits.device) >= shard.size
        logits = logits.masked_fill(padding, -torch.inf)
    own = sample(logits, sample_logits, positions, params, flags, vocab_offset=shard.start)
    return _joined(own, shard)


def _joined(own: Sampled, shard: Shard) -> Sampled:
    """The best of all ranks, by one exchange of ``[3, M]`` words."""
    words = torch.stack((own.tokens, own.scores.view(torch.int32), own.nan.to(torch.int32)))
    tokens, bits, nan = all_gather(words, shard.tp).unbind(1)
    scores = bits.contiguous().view(torch.float32)
    return Sampled(
        tokens=best_shard(tokens, scores).clamp(max=shard.vocab_size - 1),
        scores=scores.amax(0),
        nan=nan.any(0),
    )
