"""Truncated sampling in one kernel, for the set that ``infer.ops.truncate`` defines.

One program takes one row and never sorts it. With top-k, the k-th largest of the maxima of small
blocks bounds the k-th largest logit from below; the few logits above that bound move to a scratch
buffer, and all that follows looks at those alone. Top-p needs no search: the best score is taken,
and if the probability before that token already reaches p, the token is outside, and so is all that
comes after it in order; then the best of what is left is taken. The first try is inside with
probability p.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.ops import truncate
from infer.ops.sample import Sampled, SamplingRows
from infer.ops.triton_common import cdiv, interpreted, next_power_of_2
from infer.ops.triton_noise import GREEDY_BELOW, row_keys, sampling_score

UNIT = tl.constexpr(truncate.WEIGHT_UNIT)
LOWEST = tl.constexpr(truncate.LOWEST_KEY)
NO_ID = tl.constexpr(0x7FFFFFFF)
SMALL = 256  # logits a block maximum stands for
MAX_CANDIDATES = 4096


@triton.jit
def _ordered(x):
    """See ``truncate._ordered``."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load(logits, ids_ptr, start, count, temperature, compact, BLOCK: tl.constexpr):
    """Logits, scaled logits (NaN as -inf) and ids of the next elements, and which there are."""
    at = start + tl.arange(0, BLOCK)
    there = at < count
    logit = tl.load(logits + at, mask=there, other=float("-inf"))
    logit = tl.where(logit == logit, logit, float("-inf"))
    ids = at
    if compact:
        ids = tl.load(ids_ptr + at, mask=there, other=NO_ID)
    return logit, logit / temperature, ids, there


@triton.jit
def _weight(x, largest):
    """See ``truncate.weights_of``; the largest has weight 1 even if it is infinite."""
    finite = tl.minimum(tl.maximum(largest, -3.0e38), 3.0e38)
    weight = tl.exp(tl.minimum(tl.maximum(x - finite, -30.0), 0.0))
    weight = tl.where(x == largest, 1.0, weight)
    return tl.floor(weight * UNIT) * (1 / UNIT)


@triton.jit
def _kth_largest(keys, k):
    """The k-th largest of a vector of ordered integers."""
    found = LOWEST
    bit = LOWEST
    for step in range(32):  # noqa: B007
        higher = found ^ bit
        bit = (bit >> 1) & 0x7FFFFFFF
        found = tl.where(tl.sum((keys >= higher).to(tl.int32), axis=0) >= k, higher, found)
    return found


@triton.jit
def _count_from(logits, ids_ptr, count, temperature, compact, key, BLOCK: tl.constexpr):
    """How many elements are at or above ``key``."""
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        _, x, _, there = _load(logits, ids_ptr, start, count, temperature, compact, BLOCK)
        total += (there & (_ordered(x) >= key)).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def _top_k_bound(logits, ids_ptr, count, temperature, compact, k, BLOCK: tl.constexpr):
    """Key and id of the last of the first k tokens by (logit descending, id ascending)."""
    key = LOWEST
    above = 0  # tokens above the key: what the last threshold that was too high counted
    bit = LOWEST
    for step in range(32):  # noqa: B007
        higher = key ^ bit  # which adds the bit: the lowest key has the sign bit alone
        bit = (bit >> 1) & 0x7FFFFFFF
        number = _count_from(logits, ids_ptr, count, temperature, compact, higher, BLOCK)
        key = tl.where(number >= k, higher, key)
        above = tl.where(number >= k, above, number)
    room = k - above
    seen = 0
    last = -1
    for start in range(0, count, BLOCK):
        _, x, ids, there = _load(logits, ids_ptr, start, count, temperature, compact, BLOCK)
        tie = (there & (_ordered(x) == key)).to(tl.int32)
        rank = seen + tl.cumsum(tie, axis=0)
        last = tl.maximum(last, tl.max(tl.where((tie > 0) & (rank <= room), ids, -1), axis=0))
        seen += tl.sum(tie, axis=0)
    return key, last


@triton.jit
def _mass_up_to(
    logits, ids_ptr, count, temperature, compact, largest, min_p, key, last, BLOCK: tl.constexpr
):
    """Weight of all tokens up to (key, last) in order."""
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        _, x, ids, there = _load(logits, ids_ptr, start, count, temperature, compact, BLOCK)
        order = _ordered(x)
        weight = _weight(x, largest)
        inside = there & ((order > key) | ((order == key) & (ids <= last)))
        inside = inside & (weight >= min_p)
        mass += tl.where(inside, weight, 0.0).to(tl.float64)
    return tl.sum(mass, axis=0)


@triton.jit
def _best(
    logits, ids_ptr, count, temperature, compact, largest, min_p, key, last,
    own_temperature, first, second, vocab_offset, FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Score, id and key of the best token up to (key, last) in order."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], NO_ID, tl.int32)
    found = tl.full([BLOCK], LOWEST, tl.int32)
    for start in range(0, count, BLOCK):
        logit, x, ids, there = _load(logits, ids_ptr, start, count, temperature, compact, BLOCK)
        order = _ordered(x)
        inside = there & ((order > key) | ((order == key) & (ids <= last)))
        inside = inside & (_weight(x, largest) >= min_p)
        score = sampling_score(logit, own_temperature, first, second, ids + vocab_offset, FAST)
        better = inside & ((score > best) | (token == NO_ID))
        best = tl.where(better, score, best)
        token = tl.where(better, ids, token)
        found = tl.where(better, order, found)
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top, token, NO_ID), axis=0)
    return top, winner, tl.max(tl.where(token == winner, found, LOWEST), axis=0)


@triton.jit
def _sample_kernel(
    logits_ptr, sources_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    seed_ptr, choice_ptr, maxima_ptr, values_ptr, ids_ptr, token_ptr, score_ptr, nan_ptr,
    vocab, vocab_offset, num_blocks,
    FAST: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr, BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + tl.load(sources_ptr + row).to(tl.int64) * vocab
    own_temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if own_temperature < GREEDY_BELOW:
        temperature = 1.0
        top_k = 0
        top_p = 1.0
        min_p = 0.0
    else:
        temperature = own_temperature
    first, second = row_keys(
        tl.load(seed_ptr + 2 * row),
        tl.load(seed_ptr + 2 * row + 1),
        tl.load(choice_ptr + row),
        tl.load(positions_ptr + row),
    )
    maxima = maxima_ptr + row * num_blocks
    values = values_ptr + row * CANDIDATES
    ids = ids_ptr + row * CANDIDATES

    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
        bad += (logit != logit).to(tl.int32)
        x = tl.where(logit == logit, logit, float("-inf")) / temperature
        highest = tl.maximum(highest, x)
        blocks = start // SMALL + tl.arange(0, BLOCK // SMALL)
        top = tl.max(tl.reshape(_ordered(x), (BLOCK // SMALL, SMALL)), axis=1)
        tl.store(maxima + blocks, top, mask=blocks < num_blocks)
    largest = tl.max(highest, axis=0)
    tl.debug_barrier()  # other threads read the maxima

    source = logits
    count = vocab
    compact = False
    limited = (top_k > 0) & (top_k < vocab)
    if limited & (top_k <= num_blocks):
        index = tl.arange(0, BLOCKS)
        bound = _kth_largest(tl.load(maxima + index, mask=index < num_blocks, other=LOWEST), top_k)
        found = 0
        for start in range(0, vocab, BLOCK):
            logit, x, token, there = _load(logits, ids, start, vocab, temperature, False, BLOCK)
            keep = there & (_ordered(x) >= bound)
            place = found + tl.cumsum(keep.to(tl.int32), axis=0) - 1
            fits = keep & (place < CANDIDATES)
            tl.store(values + place, logit, mask=fits)
            tl.store(ids + place, token, mask=fits)
            found += tl.sum(keep.to(tl.int32), axis=0)
        tl.debug_barrier()
        if found <= CANDIDATES:
            source = values
            count = found
            compact = True

    key = LOWEST
    last = NO_ID
    if limited:
        key, last = _top_k_bound(source, ids, count, temperature, compact, top_k, BLOCK)
    share = top_p.to(tl.float64)
    if top_p < 1:
        share *= _mass_up_to(
            source, ids, count, temperature, compact, largest, min_p, key, last, BLOCK
        )
    searching = True
    best = float("-inf")
    token = NO_ID
    while searching:
        best, token, order = _best(
            source, ids, count, temperature, compact, largest, min_p, key, last,
            own_temperature, first, second, vocab_offset, FAST, BLOCK,
        )  # fmt: skip
        searching = False
        if top_p < 1:
            key = order
            last = token - 1  # so that what is up to (key, last) is what comes before the token
            searching = share <= _mass_up_to(
                source, ids, count, temperature, compact, largest, min_p, key, last, BLOCK
            )
        searching = searching & (token != NO_ID)
    tl.store(token_ptr + row, tl.where(token == NO_ID, 0, token) + vocab_offset)
    tl.store(score_ptr + row, best)
    tl.store(nan_ptr + row, tl.max(bad, axis=0) > 0)


def sample_truncated(
    logits: Tensor,
    sample_logits: Tensor,
    positions: Tensor,
    params: SamplingRows,
    *,
    vocab_offset: int = 0,
    block: int = 4096,
) -> Sampled:
    """``infer.ops.sample.sample`` for rows of any kind: greedy, plain or truncated.

    Args:
        logits: f32[L, V], contiguous.
        sample_logits, positions, params: as ``sample`` takes them.
        block: logits a program reads at a time, a power of two of at least ``SMALL``.
    """
    vocab, rows = logits.shape[-1], sample_logits.shape[0]
    device = logits.device
    num_blocks = cdiv(vocab, SMALL)
    maxima = torch.empty((rows, num_blocks), dtype=torch.int32, device=device)
    values = torch.empty((rows, MAX_CANDIDATES), dtype=torch.float32, device=device)
    ids = torch.empty((rows, MAX_CANDIDATES), dtype=torch.int32, device=device)
    sampled = Sampled(
        tokens=torch.empty(rows, dtype=torch.int32, device=device),
        scores=torch.empty(rows, dtype=torch.float32, device=device),
        nan=torch.empty(rows, dtype=torch.bool, device=device),
    )
    _sample_kernel[(rows,)](
        logits, sample_logits, positions, params.temperature, params.top_k, params.top_p,
        params.min_p, params.seed, params.choice, maxima, values, ids,
        sampled.tokens, sampled.scores, sampled.nan, vocab, vocab_offset, num_blocks,
        FAST=not interpreted(), BLOCK=block, SMALL=SMALL, BLOCKS=next_power_of_2(num_blocks),
        CANDIDATES=MAX_CANDIDATES, num_warps=16,
    )  # fmt: skip
    return sampled
