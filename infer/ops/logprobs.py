"""Log-probabilities of tokens under the raw distribution, before any sampling edit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """For every row: its token's log-probability and rank, and the ``top_n`` most likely tokens."""

    token: Tensor  # f32[M]
    rank: Tensor  # i32[M], 1 + the number of strictly likelier tokens
    top_ids: Tensor  # i32[M, top_n], likelier first, equals by id
    top: Tensor  # f32[M, top_n]


def logprobs(logits: Tensor, sample_logits: Tensor, tokens: Tensor, top_n: int) -> Logprobs:
    """Log-probabilities of sampling rows.

    Args:
        logits: float[L, V], the whole vocabulary.
        sample_logits: i32[M], the logits row of each sampling row.
        tokens: i32[M].
        top_n: may be 0.
    """
    values = logits.index_select(0, sample_logits).float()
    normalizer = values.logsumexp(dim=-1, keepdim=True)
    own = values.gather(-1, tokens.to(torch.int64).unsqueeze(-1))
    top_n = min(top_n, values.shape[-1])
    top_ids = _top_ids(values, top_n)
    return Logprobs(
        token=(own - normalizer).squeeze(-1),
        rank=((values > own).sum(-1) + 1).to(torch.int32),
        top_ids=top_ids.to(torch.int32),
        top=values.gather(-1, top_ids) - normalizer,
    )


def logprobs_in_slices(
    logits_of: Callable[[int, int], Tensor], tokens: Tensor, top_n: int, *, rows: int = 256
) -> Logprobs:
    """``logprobs`` of many positions without holding the logits of more than ``rows`` of them.

    Args:
        logits_of: gives float[end - start, V] for the positions from start to end.
        tokens: i32[P], P > 0: the token at each position.
    """
    parts = []
    for start in range(0, tokens.shape[0], rows):
        targets = tokens[start : start + rows]
        index = torch.arange(targets.shape[0], dtype=torch.int32, device=tokens.device)
        logits = logits_of(start, start + targets.shape[0])
        parts.append(logprobs(logits, index, targets, top_n))
    return Logprobs(
        token=torch.cat([part.token for part in parts]),
        rank=torch.cat([part.rank for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        top=torch.cat([part.top for part in parts]),
    )


def _top_ids(values: Tensor, top_n: int) -> Tensor:
    """Ids i64[M, top_n] of the largest values, largest first; equal values by id."""
    if top_n == 0:
        return torch.empty((values.shape[0], 0), dtype=torch.int64, device=values.device)
    ids = top_set(values, top_n)
    order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)


def top_set(values: Tensor, top_n: int) -> Tensor:
    """Ids i64[M, top_n > 0] of the largest values, in order of id.

    Of values that equal the smallest chosen, the first by id are chosen, which topk does not
    promise.
    """
    threshold = values.topk(top_n, dim=-1).values[:, -1:]
    above = values > threshold
    tie = values == threshold
    room = top_n - above.sum(-1, keepdim=True)
    chosen = above | (tie & (tie.cumsum(-1, dtype=torch.int32) <= room))
    # Exactly top_n are chosen; a stable sort of them keeps equal values in order of id.
    ids = torch.arange(values.shape[-1], device=values.device).expand_as(values)
    ids = torch.where(chosen, ids, values.shape[-1]).topk(top_n, dim=-1, largest=False).values
    return ids.sort(dim=-1).values.clamp(max=values.shape[-1] - 1)  # a NaN row may choose fewer
