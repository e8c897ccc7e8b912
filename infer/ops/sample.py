"""Pick one token for every sampling row: greedy, or by Gumbel-max over a truncated distribution.

The order of the edits is vLLM's: allowed tokens, minimum length, bias, penalties (all in
``infer.ops.logit_edits``), then temperature, min-p, top-k, top-p. What a row draws depends on its
own logits, parameters, seed, choice and position; never on the other rows of a batch.

The kept set is exact. Order a row by (logit descending, id ascending) and let ``w`` be
exp(logit - max) rounded down to a multiple of 2**-34. min-p keeps tokens with w >= min_p. top-k
keeps the first k of those. top-p keeps the shortest beginning of those whose share of their total
``w`` is at least p, and at least one token. Sums of such ``w`` are exact in float64, in any order,
so the set does not depend on how it is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.ops.noise import log_exponential, noise_bits, row_keys

GREEDY_BELOW = 1e-5  # temperatures under this are greedy: logits would overflow
NUM_CANDIDATES = 256  # largest logits a CPU row looks at before it searches the vocabulary
_WEIGHT_UNIT = 2.0**34
_LOWEST_KEY = -(1 << 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Sampling parameters of every row of the engine, on the device. Off: 0, 0, 1 and 0."""

    temperature: Tensor  # f32[R]
    top_k: Tensor  # i32[R]
    top_p: Tensor  # f32[R]
    min_p: Tensor  # f32[R]
    seed: Tensor  # i32[R, 2], low and high word
    choice: Tensor  # i32[R], index among the request's n continuations

    def select(self, rows: Tensor) -> SamplingRows:
        """Parameters of these rows (i32[M]), in this order."""
        return SamplingRows(
            temperature=self.temperature.index_select(0, rows),
            top_k=self.top_k.index_select(0, rows),
            top_p=self.top_p.index_select(0, rows),
            min_p=self.min_p.index_select(0, rows),
            seed=self.seed.index_select(0, rows),
            choice=self.choice.index_select(0, rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFlags:
    """What the host knows of a batch; it selects code, and never changes a result."""

    greedy: bool = False  # every row is greedy
    top_k: bool = False  # some row truncates in this way
    top_p: bool = False
    min_p: bool = False

    @property
    def truncates(self) -> bool:
        """Some row truncates."""
        return self.top_k or self.top_p or self.min_p


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens and how they won. Over vocabulary shards the largest score wins (``best_shard``)."""

    tokens: Tensor  # i32[M]
    scores: Tensor  # f32[M]
    nan: Tensor  # bool[M], the row's logits held a NaN: its token means nothing


def sample(
    logits: Tensor,
    sample_logits: Tensor,
    positions: Tensor,
    params: SamplingRows,
    flags: SampleFlags,
    *,
    vocab_offset: int = 0,
) -> Sampled:
    """Sample from rows of logits that need no edits, or have had them.

    Args:
        logits: float[L, V]; a vocabulary shard only when no row truncates.
        sample_logits: i32[M], the logits row each sampling row reads.
        positions: i32[M], position of the token to be sampled.
        params: of these M sampling rows (``SamplingRows.select``).
        flags: must hold for all M rows.
        vocab_offset: vocabulary id of column 0.

    Returns:
        Tokens that are valid ids whatever the logits are.
    """
    if flags.greedy:
        return _greedy(logits, sample_logits, vocab_offset)
    greedy = params.temperature < GREEDY_BELOW
    scaled = logits.index_select(0, sample_logits).float()
    scaled = scaled / torch.where(greedy, 1.0, params.temperature).unsqueeze(-1)
    keys = row_keys(params.seed, params.choice, positions)
    if scaled.is_cpu and not torch.compiler.is_compiling():
        ids, scores = _by_kind(scaled, keys, greedy, params, vocab_offset)
    else:
        kept = _truncate(scaled, params, flags) if flags.truncates else scaled
        scores, ids = _scores(kept, keys, greedy, vocab_offset).max(dim=-1)
    return Sampled(
        tokens=ids.to(torch.int32) + vocab_offset,
        scores=scores,
        nan=torch.isnan(scaled.amax(dim=-1)),
    )


def best_shard(tokens: Tensor, scores: Tensor) -> Tensor:
    """Join shards: tokens i32[W, M] and scores f32[W, M] of W ranks -> i32[M].

    The first of equal scores wins, which is the lowest id when shards are in order.
    """
    return tokens.gather(0, scores.argmax(dim=0, keepdim=True)).squeeze(0)


def _greedy(logits: Tensor, sample_logits: Tensor, vocab_offset: int) -> Sampled:
    # Several samples may read one row, and rows may be there that nobody samples.
    shared = logits.shape[0] <= sample_logits.shape[0]
    values, ids = (logits if shared else logits.index_select(0, sample_logits)).max(dim=-1)
    if shared:
        values, ids = values.index_select(0, sample_logits), ids.index_select(0, sample_logits)
    return Sampled(ids.to(torch.int32) + vocab_offset, values.float(), torch.isnan(values))


def _scores(
    scaled: Tensor, keys: tuple[Tensor, Tensor], greedy: Tensor, vocab_offset: int
) -> Tensor:
    """Scaled logits plus Gumbel noise f32[M, V]; greedy rows without."""
    columns = torch.arange(scaled.shape[-1], dtype=torch.int32, device=scaled.device)
    noise = log_exponential(noise_bits(keys, columns + vocab_offset))
    return torch.where(greedy.unsqueeze(-1), scaled, scaled - noise)


# --- the kept set, with fixed shapes ------------------------------------------------------------


def _truncate(scaled: Tensor, params: SamplingRows, flags: SampleFlags) -> Tensor:
    """``scaled`` f32[M, V] with -inf outside the kept set. No sorting, no host synchronization.

    The kept set is what lies above a threshold, and the first few (by id) of what equals it.
    Thresholds are found bit by bit in an integer order of floats.
    """
    vocab = scaled.shape[-1]
    order = _ordered(scaled)
    weights = _weights(scaled, scaled.amax(dim=-1, keepdim=True))
    if flags.min_p:
        low = weights < params.min_p.unsqueeze(-1)
        weights = torch.where(low, 0.0, weights)
        scaled = torch.where(low, -torch.inf, scaled)
    if not (flags.top_k or flags.top_p):
        return scaled
    threshold = torch.full_like(order[:, 0], _LOWEST_KEY)
    num_ties = torch.full_like(threshold, vocab, dtype=torch.int64)
    if flags.top_k:
        top_k = torch.where(params.top_k <= 0, vocab, params.top_k.clamp(max=vocab))
        threshold = _search(lambda t: (order >= t).sum(-1) >= top_k, threshold)
        num_ties = top_k - (order > threshold.unsqueeze(-1)).sum(-1)
    if flags.top_p:
        nucleus, needed = _nucleus(order, weights, params.top_p, threshold, num_ties)
        on = params.top_p < 1
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
    needed = torch.ceil((target - above) / weight.clamp(min=1 / _WEIGHT_UNIT)).clamp(min=1)
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
    found = torch.full_like(like, _LOWEST_KEY)
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


def _weights(scaled: Tensor, largest: Tensor) -> Tensor:
    """exp(scaled - largest), rounded down so that sums are exact; 1 where that is undefined."""
    weights = torch.nan_to_num(torch.exp(scaled - largest), nan=1.0)
    return torch.floor(weights * _WEIGHT_UNIT) * (1 / _WEIGHT_UNIT)


# --- the CPU: each kind of row does its own work only ------------------------------------------


def _by_kind(
    scaled: Tensor,
    keys: tuple[Tensor, Tensor],
    greedy: Tensor,
    params: SamplingRows,
    vocab_offset: int,
) -> tuple[Tensor, Tensor]:
    """(ids i64[M], scores f32[M]) as the fixed-shape path gives them."""
    vocab = scaled.shape[-1]
    limited = (params.top_k > 0) & (params.top_k < vocab)
    truncates = ~greedy & (limited | (params.top_p < 1) | (params.min_p > 0))
    scores, ids = scaled.max(dim=-1) if bool(greedy.any()) else _empty(scaled)
    rest = ~greedy
    rows = truncates.nonzero().squeeze(-1)
    if rows.numel():
        best, token, found = _from_candidates(
            scaled[rows], (keys[0][rows], keys[1][rows]), params.select(rows), vocab_offset
        )
        scores[rows], ids[rows] = best, token
        rest[rows] = ~found
    # Row by row, so that the integer work stays in the core's cache.
    for row in rest.nonzero().squeeze(-1).tolist():
        one = slice(row, row + 1)
        values = scaled[one]
        if truncates[row]:
            flags = SampleFlags(top_k=True, top_p=True, min_p=True)
            values = _truncate(values, params.select(torch.tensor([row])), flags)
        values = _scores(values, (keys[0][one], keys[1][one]), greedy[one], vocab_offset)
        scores[one], ids[one] = values.max(dim=-1)
    return ids, scores


def _empty(scaled: Tensor) -> tuple[Tensor, Tensor]:
    rows = scaled.shape[0]
    return scaled.new_empty(rows), torch.empty(rows, dtype=torch.int64, device=scaled.device)


def _from_candidates(
    scaled: Tensor, keys: tuple[Tensor, Tensor], params: SamplingRows, vocab_offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample truncated rows from their largest logits: scores, ids, and where those are enough."""
    vocab = scaled.shape[-1]
    width = min(NUM_CANDIDATES, vocab)
    values, ids = scaled.topk(width, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, by_value)

    weights = _weights(values, values[:, :1])
    low = weights < params.min_p.unsqueeze(-1)
    weights = torch.where(low, 0.0, weights)
    limit = torch.where(params.top_k <= 0, vocab, params.top_k.clamp(max=vocab)).to(torch.int64)
    mass = weights.cumsum(-1, dtype=torch.float64)
    total = mass.gather(-1, limit.clamp(max=width).unsqueeze(-1) - 1).squeeze(-1)
    nucleus = params.top_p < 1
    # Without top-k the total is the vocabulary's. A top-k wider than the candidates is not found.
    whole = (nucleus & (limit == vocab) & (vocab > width)).nonzero().squeeze(-1)
    if whole.numel():
        every = _weights(scaled[whole], values[whole, :1])
        every = torch.where(every < params.min_p[whole].unsqueeze(-1), 0.0, every)
        total[whole] = every.sum(-1, dtype=torch.float64)
    target = params.top_p.double() * total
    count = torch.minimum(limit, torch.where(params.min_p > 0, (~low).sum(-1), vocab))
    shortest = (mass < target.unsqueeze(-1)).sum(-1) + 1
    count = torch.where(nucleus, torch.minimum(count, shortest), count)

    last = values.gather(-1, count.clamp(max=width).unsqueeze(-1) - 1).squeeze(-1)
    # A tie of the last kept token may lie outside: then these candidates do not know the order.
    found = (
        (count < width) & (last > values[:, -1]) & ~(nucleus & (limit > width) & (limit < vocab))
    )
    if width == vocab:
        found = torch.ones_like(found)
    keep = torch.arange(width, device=ids.device) < count.unsqueeze(-1)
    noise = log_exponential(noise_bits(keys, ids.to(torch.int32) + vocab_offset))
    candidates = torch.where(keep, values - noise, -torch.inf)
    best = candidates.amax(-1)
    token = torch.where(candidates == best.unsqueeze(-1), ids, vocab - 1).amin(-1)
    return best, token, found
