"""Pick one token for every sampling row: greedy, or by Gumbel-max over a truncated distribution.

The order of the edits is vLLM's: allowed tokens, minimum length, bias, penalties (all in
``infer.ops.logit_edits``), then temperature, min-p, top-k, top-p. What a row draws depends on its
own logits, parameters, seed, choice and position; never on the other rows of a batch.

``infer.ops.truncate`` says exactly which tokens the last three keep.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from infer.ops.noise import log_exponential, noise_bits, row_keys
from infer.ops.sampling import GREEDY_BELOW, Sampled, SampleFlags, SamplingRows
from infer.ops.truncate import truncate, weights_of

NUM_CANDIDATES = 256  # largest logits that a CPU row sorts before it sorts the vocabulary
_TILE = 1 << 16  # elements of noise that a CPU core makes at once


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
    if logits.is_cuda:
        from infer.ops.triton_sample import sample_rows  # an install for CPUs has no Triton

        logits = logits.float().contiguous()
        return sample_rows(logits, sample_logits, positions, params, vocab_offset=vocab_offset)
    greedy = params.temperature < GREEDY_BELOW
    scaled = logits.index_select(0, sample_logits).float()
    scaled = scaled / torch.where(greedy, 1.0, params.temperature).unsqueeze(-1)
    keys = row_keys(params.seed, params.choice, positions)
    if scaled.is_cpu and not torch.compiler.is_compiling():
        ids, scores = _by_kind(scaled, keys, greedy, params, vocab_offset)
    else:
        kept = truncate(
            scaled,
            params.top_k if flags.top_k else None,
            params.top_p if flags.top_p else None,
            params.min_p if flags.min_p else None,
        )
        noise = torch.where(greedy.unsqueeze(-1), 0.0, _noise(keys, kept, vocab_offset))
        scores, ids = (kept - noise).max(dim=-1)
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


def _noise(keys: tuple[Tensor, Tensor], like: Tensor, vocab_offset: int) -> Tensor:
    """Noise f32[M, V] to subtract from all columns of ``like``."""
    columns = torch.arange(like.shape[-1], dtype=torch.int32, device=like.device)
    return log_exponential(noise_bits(keys, columns + vocab_offset))


# --- the CPU: every kind of row does its own work only ------------------------------------------


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
    truncated = ~greedy & (limited | (params.top_p < 1) | (params.min_p > 0))
    ids = torch.zeros(scaled.shape[0], dtype=torch.int64)
    scores = torch.zeros(scaled.shape[0], dtype=torch.float32)
    rows = greedy.nonzero().squeeze(-1)
    if rows.numel():
        scores[rows], ids[rows] = scaled[rows].max(dim=-1)
    # A few rows at a time, so that the integer work stays in the core's cache.
    plain = (~greedy & ~truncated).nonzero().squeeze(-1)
    for rows in torch.split(plain, max(1, _TILE // vocab)):
        values = scaled[rows]
        noise = _noise((keys[0][rows], keys[1][rows]), values, vocab_offset)
        scores[rows], ids[rows] = (values - noise).max(dim=-1)
    rows = truncated.nonzero().squeeze(-1)
    for width in (min(NUM_CANDIDATES, vocab), vocab):
        if rows.numel():
            best, token, found = _from_largest(
                scaled[rows],
                (keys[0][rows], keys[1][rows]),
                params.select(rows),
                width,
                vocab_offset,
            )
            scores[rows], ids[rows] = best, token
            rows = rows[~found]
    return ids, scores


def _from_largest(
    scaled: Tensor, keys: tuple[Tensor, Tensor], params: SamplingRows, width: int, vocab_offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample among the ``width`` largest logits: scores, ids, and if they hold all that is kept."""
    vocab = scaled.shape[-1]
    ids = _largest(scaled, width)
    values = scaled.gather(-1, ids)
    weights = weights_of(values, values[:, :1])
    count = torch.where(params.top_k <= 0, vocab, params.top_k.clamp(max=vocab)).to(torch.int64)
    low = weights < params.min_p.unsqueeze(-1)
    weights = torch.where(low, 0.0, weights)
    count = torch.where(low.any(-1), torch.minimum(count, (~low).sum(-1)), count)

    # What top-p is a share of: the first k tokens, or all. The share of a k in between is unknown.
    mass = weights.cumsum(-1, dtype=torch.float64)
    total = mass.gather(-1, count.clamp(1, width).unsqueeze(-1) - 1).squeeze(-1)
    nucleus = params.top_p < 1
    whole = (nucleus & (count == vocab)).nonzero().squeeze(-1)
    if whole.numel() and width < vocab:
        every = weights_of(scaled[whole], values[whole, :1])
        every *= every >= params.min_p[whole].unsqueeze(-1)
        total[whole] = every.sum(-1, dtype=torch.float64)
    unknown = nucleus & (count > width) & (count < vocab)
    target = (params.top_p.double() * total).unsqueeze(-1)
    shortest = (mass < target).sum(-1) + 1
    count = torch.where(nucleus, torch.minimum(count, shortest), count)

    keep = torch.arange(width) < count.unsqueeze(-1)
    noise = log_exponential(noise_bits(keys, ids.to(torch.int32) + vocab_offset))
    candidates = torch.where(keep, values - noise, -torch.inf)
    best = candidates.amax(-1)
    token = torch.where(candidates == best.unsqueeze(-1), ids, vocab - 1).amin(-1)
    return best, token, (count <= width) & ~unknown


def _largest(scaled: Tensor, width: int) -> Tensor:
    """Ids i64[M, width] by (logit descending, id ascending)."""
    vocab = scaled.shape[-1]
    # One integer carries both, all are different, and numpy sorts integers in vector registers.
    pairs = np.empty((vocab, 2), dtype="<i4")
    pairs[:, 0] = np.arange(vocab - 1, -1, -1)
    both = pairs.view("<i8")[:, 0]
    result = np.empty((scaled.shape[0], width), dtype=np.int64)
    for row, values in enumerate(scaled.numpy()):
        bits = (values + np.float32(0)).view(np.int32)  # -0.0 becomes 0.0
        np.bitwise_xor(bits, (bits >> 31) & 0x7FFFFFFF, out=pairs[:, 1])
        top = np.partition(both, vocab - width)[vocab - width :] if width < vocab else both
        result[row] = np.sort(top)[::-1] & 0xFFFFFFFF
    return torch.from_numpy(vocab - 1 - result)
