"""Which tokens of a row may be sampled: min-p, then top-k, then top-p, defined exactly.

Order a row by (logit descending, id ascending) and let ``w`` be exp(logit - max) rounded down to a
multiple of 2**-34. min-p keeps tokens with w >= min_p. top-k keeps the first k of those. top-p
keeps the shortest beginning of those whose share of their total ``w`` is at least p, and at least
one token. Sums of such ``w`` are exact in float64, in any order, so the set does not depend on how
it is found.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WEIGHT_UNIT = 2.0**34
LOWEST_KEY = -(1 << 31)


def truncate(
    scaled: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """``scaled`` f32[M, V] with -inf outside the kept set. No sorting, no host synchronization.

    ``top_k`` i32[M] (below 1 is off), ``top_p`` f32[M] (1 is off), ``min_p`` f32[M] (0 is off);
    None is off for all rows. The kept set is what lies above a threshold, and the first few (by
    id) of what equals it. Thresholds are found bit by bit in an integer order of floats.
    """
    vocab = scaled.shape[-1]
    order = _ordered(scaled)
    weights = weights_of(scaled, scaled.amax(dim=-1, keepdim=True))
    if min_p is not None:
        low = weights < min_p.unsqueeze(-1)
        weights = torch.where(low, 0.0, weights)
        scaled = torch.where(low, -torch.inf, scaled)
    if top_k is None and top_p is None:
        return scaled
    threshold = torch.full_like(order[:, 0], LOWEST_KEY)
    num_ties = torch.full_like(threshold, vocab, dtype=torch.int64)
    if top_k is not None:
        limit = torch.where(top_k <= 0, vocab, top_k.clamp(max=vocab))
        threshold = _search(lambda t: (order >= t).sum(-1) >= limit, threshold)
        num_ties = limit - (order > threshold.unsqueeze(-1)).sum(-1)
    if top_p is not None:
        nucleus, needed = _nucleus(order, weights, top_p, threshold, num_ties)
        on = top_p < 1
        threshold = torch.where(on, nucleus, threshold)
        num_ties = torch.where(on, needed, num_ties)
    tie = order == threshold.unsqueeze(-1)
    first_ties = tie & (tie.cumsum(-1, dtype=torch.int32) <= num_ties.unsqueeze(-1))
    return torch.where((order > threshold.unsqueeze(-1)) | first_ties, scaled, -torch.inf)


def _nucleus(
    order: Tensor, weights: Tensor, top_p: Tensor, threshold: Tensor, num_ties: Tensor
) -> tuple[Tensor, Tensor]:
    """Threshold and ties of top-p within the set that ``threshold`` and ``num_ties`` keep.

    The result's threshold is never below the given one, so the two need not be intersected.
    """
    weight, count, above = _at(order, weights, threshold)
    target = top_p.double() * (above + torch.minimum(num_ties, count) * weight)
    nucleus = _search(
        lambda t: torch.where(order >= t, weights, 0.0).sum(-1, dtype=torch.float64) >= target,
        threshold,
    )
    weight, _, above = _at(order, weights, nucleus)
    needed = torch.ceil((target - above) / weight.clamp(min=1 / WEIGHT_UNIT)).clamp(min=1)
    # The quotient is rounded; the products are exact.
    needed = torch.where(
        (needed > 1) & (above + (needed - 1) * weight >= target), needed - 1, needed
    )
    needed = torch.where(above + needed * weight < target, needed + 1, needed)
    return nucleus, needed.to(torch.int64)


def _at(order: Tensor, weights: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weight f64[M] and number i64[M] of tokens at a threshold, and the mass f64[M] above it."""
    threshold = threshold.unsqueeze(-1)
    at = order == threshold
    weight = torch.where(at, weights, 0.0).amax(-1).double()
    above = torch.where(order > threshold, weights, 0.0).sum(-1, dtype=torch.float64)
    return weight, at.sum(-1), above


def _search(enough: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Largest i32[M] threshold for which ``enough(threshold[M, 1])`` holds.

    ``enough`` is monotone: true for the lowest, up to some threshold, and false above it.
    """
    found = torch.full_like(like, LOWEST_KEY)
    found = torch.where(enough(torch.zeros_like(found).unsqueeze(-1)), 0, found)
    for bit in range(30, -1, -1):
        higher = found + (1 << bit)
        found = torch.where(enough(higher.unsqueeze(-1)), higher, found)
    return found


def _ordered(values: Tensor) -> Tensor:
    """Map f32 to i32 so that integers compare as the floats do; both zeros are equal."""
    bits = values.view(torch.int32)
    bits = torch.where(values == 0, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def weights_of(scaled: Tensor, largest: Tensor) -> Tensor:
    """exp(scaled - largest), rounded down so that sums are exact; 1 where that is undefined."""
    # Below -30 a weight is 0 anyway, and subnormal numbers are slow.
    weights = torch.nan_to_num(torch.exp((scaled - largest).clamp(min=-30)), nan=1.0)
    return torch.floor(weights * WEIGHT_UNIT) * (1 / WEIGHT_UNIT)
