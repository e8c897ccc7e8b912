"""Sampling kernels for rows of logits, for the set that ``infer.ops.truncate`` defines.

Three launches, and no sorting. The first takes the maxima of small blocks of logits, all tiles side
by side. The second, side by side too, has the best score of each tile of rows that keep everything
(or all above min-p), and the probability of each tile of rows with top-p alone. The third finishes
a row in one program. A block maximum is a logit too: so the k-th largest of them bounds the k-th
largest logit from below, and only blocks that reach the bound are read again. The few logits above
it move to a scratch buffer, and all that follows looks at those alone. Top-p needs no search: the
best score is taken, and if the probability before that token already reaches p, the token is
outside, and so is all that comes after it in order; then the best of what is left is taken. The
first try is inside with probability p.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.ops import truncate
from infer.ops.sampling import Sampled, SamplingRows
from infer.ops.triton_common import cdiv, interpreted, next_power_of_2
from infer.ops.triton_noise import GREEDY_BELOW, row_keys, sampling_score

UNIT = tl.constexpr(truncate.WEIGHT_UNIT)
LOWEST = tl.constexpr(truncate.LOWEST_KEY)
NO_ID = tl.constexpr(0x7FFFFFFF)
SMALL = 256  # logits a block maximum stands for
MAX_CANDIDATES = 4096
NUCLEUS = tl.constexpr(64)  # block maxima above which a nucleus is looked for first


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
def _row_parameters(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab):
    """Temperature, top-k (0 is off), top-p and min-p of a row; of a greedy one 1, and all off."""
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature < GREEDY_BELOW
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where(greedy | (top_k < 0) | (top_k >= vocab), 0, top_k)
    top_p = tl.where(greedy, 1.0, tl.load(top_p_ptr + row))
    min_p = tl.where(greedy, 0.0, tl.load(min_p_ptr + row))
    return tl.where(greedy, 1.0, temperature), top_k, top_p, min_p


@triton.jit
def _row_noise(row, seed_ptr, choice_ptr, positions_ptr):
    return row_keys(
        tl.load(seed_ptr + 2 * row),
        tl.load(seed_ptr + 2 * row + 1),
        tl.load(choice_ptr + row),
        tl.load(positions_ptr + row),
    )


@triton.jit
def _largest(maxima, num_blocks, BLOCKS: tl.constexpr):
    """A row's largest scaled logit, from its block maxima."""
    index = tl.arange(0, BLOCKS)
    key = tl.max(tl.load(maxima + index, mask=index < num_blocks, other=LOWEST), axis=0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _maxima_kernel(
    logits_ptr, sources_ptr, temperature_ptr, maxima_ptr, bad_ptr, vocab, num_blocks,
    BLOCK: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Ordered maxima i32[rows, num_blocks] of blocks; whether each tile holds a NaN."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    temperature = tl.where(temperature < GREEDY_BELOW, 1.0, temperature)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    source = logits_ptr + tl.load(sources_ptr + row).to(tl.int64) * vocab
    logit = tl.load(source + at, mask=at < vocab, other=float("-inf"))
    bad = tl.max((logit != logit).to(tl.int32), axis=0)
    x = tl.where(logit == logit, logit, float("-inf")) / temperature
    blocks = tile * (BLOCK // SMALL) + tl.arange(0, BLOCK // SMALL)
    top = tl.max(tl.reshape(_ordered(x), (BLOCK // SMALL, SMALL)), axis=1)
    tl.store(maxima_ptr + row * num_blocks + blocks, top, mask=blocks < num_blocks)
    tl.store(bad_ptr + row * tl.num_programs(1) + tile, bad)


@triton.jit
def _tile_kernel(
    logits_ptr, sources_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    seed_ptr, choice_ptr, maxima_ptr, mass_ptr, score_ptr, token_ptr, vocab, vocab_offset,
    num_blocks, FAST: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Of each tile: the mass where top-p alone truncates, the best score where neither does."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    temperature, top_k, top_p, min_p = _row_parameters(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab
    )
    if top_k == 0:
        source = logits_ptr + tl.load(sources_ptr + row).to(tl.int64) * vocab
        largest = _largest(maxima_ptr + row * num_blocks, num_blocks, BLOCKS)
        logit, x, ids, there = _load(
            source, token_ptr, tile * BLOCK, vocab, temperature, False, BLOCK
        )
        weight = _weight(x, largest)
        inside = there & (weight >= min_p)
        out = row * tl.num_programs(1) + tile
        if top_p < 1:
            mass = tl.sum(tl.where(inside, weight, 0.0).to(tl.float64), axis=0)
            tl.store(mass_ptr + out, mass)
        else:
            first, second = _row_noise(row, seed_ptr, choice_ptr, positions_ptr)
            own = tl.load(temperature_ptr + row)
            score = sampling_score(logit, own, first, second, ids + vocab_offset, FAST)
            score = tl.where(inside, score, float("-inf"))
            best = tl.max(score, axis=0)
            tl.store(score_ptr + out, best)
            tl.store(
                token_ptr + out, tl.min(tl.where(inside & (score == best), ids, NO_ID), axis=0)
            )


@triton.jit
def _gather(
    logits, maxima, blocks, values, ids, temperature, bound, vocab, num_blocks,
    BLOCK: tl.constexpr, SMALL: tl.constexpr, BLOCKS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write the logits at or above ``bound``, and their ids in order; returns their number."""
    index = tl.arange(0, BLOCKS)
    reach = tl.load(maxima + index, mask=index < num_blocks, other=LOWEST) >= bound
    reach = reach & (index < num_blocks)
    tl.store(blocks + tl.cumsum(reach.to(tl.int32), axis=0) - 1, index, mask=reach)
    tl.debug_barrier()  # other threads read the list
    found = 0
    total = tl.sum(reach.to(tl.int32), axis=0) * SMALL
    for start in range(0, total, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token = tl.load(blocks + at // SMALL, mask=at < total, other=0) * SMALL + at % SMALL
        there = (at < total) & (token < vocab)
        logit = tl.load(logits + token, mask=there, other=float("-inf"))
        logit = tl.where(logit == logit, logit, float("-inf"))
        keep = there & (_ordered(logit / temperature) >= bound)
        place = found + tl.cumsum(keep.to(tl.int32), axis=0) - 1
        tl.store(values + place, logit, mask=keep & (place < CANDIDATES))
        tl.store(ids + place, token, mask=keep & (place < CANDIDATES))
        found += tl.sum(keep.to(tl.int32), axis=0)
    tl.debug_barrier()
    return found


@triton.jit
def _finish_kernel(
    logits_ptr, sources_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    seed_ptr, choice_ptr, maxima_ptr, bad_ptr, mass_ptr, tile_score_ptr, tile_token_ptr,
    blocks_ptr, values_ptr, ids_ptr, token_ptr, score_ptr, nan_ptr,
    vocab, vocab_offset, num_blocks, num_tiles,
    FAST: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr, BLOCKS: tl.constexpr,
    TILES: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """A row's token, score, and whether it held a NaN."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p = _row_parameters(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab
    )
    tiles = tl.arange(0, TILES)
    of_tile = row * num_tiles + tiles
    bad = tl.load(bad_ptr + of_tile, mask=tiles < num_tiles, other=0)
    tl.store(nan_ptr + row, tl.max(bad, axis=0) > 0)
    if (top_k == 0) & (top_p >= 1):
        scores = tl.load(tile_score_ptr + of_tile, mask=tiles < num_tiles, other=float("-inf"))
        tokens = tl.load(tile_token_ptr + of_tile, mask=tiles < num_tiles, other=NO_ID)
        best = tl.max(scores, axis=0)
        token = tl.min(tl.where(scores == best, tokens, NO_ID), axis=0)
    else:
        best, token = _truncated(
            logits_ptr + tl.load(sources_ptr + row).to(tl.int64) * vocab,
            maxima_ptr + row * num_blocks, blocks_ptr + row * num_blocks,
            values_ptr + row * CANDIDATES, ids_ptr + row * CANDIDATES, mass_ptr + row * num_tiles,
            temperature, top_k, top_p, min_p, tl.load(temperature_ptr + row),
            _row_noise(row, seed_ptr, choice_ptr, positions_ptr),
            vocab, vocab_offset, num_blocks, num_tiles,
            FAST, BLOCK, SMALL, BLOCKS, TILES, CANDIDATES,
        )  # fmt: skip
    tl.store(token_ptr + row, tl.where(token == NO_ID, 0, token) + vocab_offset)
    tl.store(score_ptr + row, best)


@triton.jit
def _truncated(
    logits, maxima, blocks, values, ids, masses, temperature, top_k, top_p, min_p, own_temperature,
    noise, vocab, vocab_offset, num_blocks, num_tiles,
    FAST: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr, BLOCKS: tl.constexpr,
    TILES: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Score and id of the best token of the kept set, for rows with top-k or top-p."""
    first, second = noise
    largest = _largest(maxima, num_blocks, BLOCKS)
    share = top_p.to(tl.float64)
    if top_k == 0:
        tiles = tl.arange(0, TILES)
        share *= tl.sum(tl.load(masses + tiles, mask=tiles < num_tiles, other=0.0), axis=0)

    source = logits
    count = vocab
    compact = False
    wanted = tl.where(top_k == 0, tl.minimum(NUCLEUS, num_blocks), top_k)
    if wanted <= num_blocks:
        index = tl.arange(0, BLOCKS)
        keys = tl.load(maxima + index, mask=index < num_blocks, other=LOWEST)
        found = _gather(
            logits, maxima, blocks, values, ids, temperature, _kth_largest(keys, wanted), vocab,
            num_blocks, BLOCK, SMALL, BLOCKS, CANDIDATES,
        )  # fmt: skip
        if found <= CANDIDATES:
            enough = top_k > 0
            if top_k == 0:
                enough = share <= _mass_up_to(
                    values, ids, found, temperature, True, largest, min_p, LOWEST, NO_ID, BLOCK
                )
            if enough:
                source = values
                count = found
                compact = True

    key = LOWEST
    last = NO_ID
    if top_k > 0:
        key, last = _top_k_bound(source, ids, count, temperature, compact, top_k, BLOCK)
        if top_p < 1:
            share *= _mass_up_to(
                source, ids, count, temperature, compact, largest, min_p, key, last, BLOCK
            )
    best = float("-inf")
    token = NO_ID
    searching = True
    while searching:
        best, token, order = _best(
            source, ids, count, temperature, compact, largest, min_p, key, last,
            own_temperature, first, second, vocab_offset, FAST, BLOCK,
        )  # fmt: skip
        searching = False
        if (top_p < 1) & (token != NO_ID):
            key = order
            last = token - 1  # so that what is up to (key, last) is what comes before the token
            searching = share <= _mass_up_to(
                source, ids, count, temperature, compact, largest, min_p, key, last, BLOCK
            )
    return best, token


def sample_rows(
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
    vocab, rows, device = logits.shape[-1], sample_logits.shape[0], logits.device
    num_blocks, num_tiles = cdiv(vocab, SMALL), cdiv(vocab, block)

    def scratch(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, columns), dtype=dtype, device=device)

    maxima, bad = scratch(num_blocks, torch.int32), scratch(num_tiles, torch.int32)
    mass = scratch(num_tiles, torch.float64)
    scores, tokens = scratch(num_tiles, torch.float32), scratch(num_tiles, torch.int32)
    sampled = Sampled(
        tokens=torch.empty(rows, dtype=torch.int32, device=device),
        scores=torch.empty(rows, dtype=torch.float32, device=device),
        nan=torch.empty(rows, dtype=torch.bool, device=device),
    )
    inputs = (
        logits, sample_logits, positions, params.temperature, params.top_k, params.top_p,
        params.min_p, params.seed, params.choice,
    )  # fmt: skip
    blocks = next_power_of_2(num_blocks)
    fast = not interpreted()
    _maxima_kernel[(rows, num_tiles)](
        logits, sample_logits, params.temperature, maxima, bad, vocab, num_blocks,
        BLOCK=block, SMALL=SMALL, num_warps=8,
    )  # fmt: skip
    _tile_kernel[(rows, num_tiles)](
        *inputs, maxima, mass, scores, tokens, vocab, vocab_offset, num_blocks,
        FAST=fast, BLOCK=block, BLOCKS=blocks, num_warps=8,
    )  # fmt: skip
    _finish_kernel[(rows,)](
        *inputs, maxima, bad, mass, scores, tokens, scratch(num_blocks, torch.int32),
        scratch(MAX_CANDIDATES, torch.float32), scratch(MAX_CANDIDATES, torch.int32),
        sampled.tokens, sampled.scores, sampled.nan, vocab, vocab_offset, num_blocks, num_tiles,
        FAST=fast, BLOCK=block, SMALL=SMALL, BLOCKS=blocks, TILES=next_power_of_2(num_tiles),
        CANDIDATES=MAX_CANDIDATES, num_warps=16,
    )  # fmt: skip
    return sampled
