"""LM head and plain sampling in one pass: the logits need not be written.

Every program scores its tile of the vocabulary (the logit where greedy, Gumbel-max else) and keeps
the best; a second, small kernel takes the best of the tiles. Equal scores give the lowest id.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.ops.sampling import Sampled, SamplingRows
from infer.ops.triton_common import (
    await_predecessor,
    cdiv,
    dot,
    dot_precision,
    interpreted,
    launch_options,
    next_power_of_2,
    release_successor,
)
from infer.ops.triton_head_hopper import score_tiles, suits_hopper_head
from infer.ops.triton_noise import may_beat, row_keys, sampling_score

FUSED_ROWS = 96  # above, cuBLAS makes the logits: its tiles read x less often
LOWEST = tl.constexpr(-3.0e38)  # finite, so that differences are too
SCORE_BLOCK = 2048
SCORE_PROGRAMS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Tile of a program, warps and pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def head_config(rows: int, bits: int) -> HeadConfig:
    """The table of configurations."""
    if bits == 32:
        return HeadConfig(block_m=16, block_n=16, block_k=32, num_warps=4, num_stages=1)
    block_m = max(16, min(64, next_power_of_2(rows)))
    if block_m < 64:
        return HeadConfig(block_m=block_m, block_n=64, block_k=128, num_warps=4, num_stages=3)
    return HeadConfig(block_m=block_m, block_n=64, block_k=64, num_warps=4, num_stages=4)


@triton.jit
def _head_kernel(
    x_ptr, x_stride, w_ptr, best_ptr, id_ptr, sample_rows, positions, temperatures, seeds, choices,
    num_rows, first_id,
    SIZE_N: tl.constexpr, SIZE_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits of normed rows and best of a tile. Row tiles of one weight tile run side by side."""
    release_successor(PDL)
    tile = tl.program_id(1)
    num_tiles = tl.num_programs(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    mask_m = m < num_rows
    mask_n = n < SIZE_N
    param = tl.load(sample_rows + m, mask=mask_m, other=0)
    temperature = tl.load(temperatures + param, mask=mask_m, other=0.0)
    first, second = row_keys(
        tl.load(seeds + 2 * param, mask=mask_m, other=0),
        tl.load(seeds + 2 * param + 1, mask=mask_m, other=0),
        tl.load(choices + param, mask=mask_m, other=0),
        tl.load(positions + m, mask=mask_m, other=0),
    )
    await_predecessor(PDL)
    x_where = x_ptr + m[:, None] * x_stride + k[None, :]
    w_where = w_ptr + n.to(tl.int64)[:, None] * SIZE_K + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, SIZE_K, BLOCK_K):
        if SIZE_K % BLOCK_K == 0:
            mask_x = mask_m[:, None]
            mask_w = mask_n[:, None]
        else:
            mask_x = mask_m[:, None] & (start + k < SIZE_K)[None, :]
            mask_w = mask_n[:, None] & (start + k < SIZE_K)[None, :]
        x = tl.load(x_where + start, mask=mask_x, other=0.0)
        w = tl.load(w_where + start, mask=mask_w, other=0.0)
        acc = dot(x, tl.trans(w), acc, PRECISION)
    ids = (n + first_id)[None, :]
    score = sampling_score(acc, temperature[:, None], first[:, None], second[:, None], ids, FAST)
    score = tl.where(mask_n[None, :] & (score == score), score, float("-inf"))
    best, where = tl.max(score, axis=1, return_indices=True)
    bad = tl.sum((mask_n[None, :] & (acc != acc)).to(tl.int32), axis=1) > 0
    tl.store(best_ptr + m * num_tiles + tile, tl.where(bad, float("nan"), best), mask=mask_m)
    tl.store(id_ptr + m * num_tiles + tile, tile * BLOCK_N + where + first_id, mask=mask_m)


@triton.jit
def _load_logits(row_ptr, n, end):
    return tl.load(row_ptr + n, mask=n < end, other=float("-inf")).to(tl.float32)


@triton.jit
def _score_kernel(
    logits_ptr, logits_stride, best_ptr, id_ptr, sample_rows, positions, temperatures, seeds,
    choices, span, first_id,
    SIZE_N: tl.constexpr, BLOCK_N: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Best of ``span`` columns of one row of logits that are there already.

    Blocks in which nothing can beat the best so far, which soon are most, are not scored.
    """
    part = tl.program_id(0)
    row = tl.program_id(1)
    param = tl.load(sample_rows + row)
    first, second = row_keys(
        tl.load(seeds + 2 * param), tl.load(seeds + 2 * param + 1),
        tl.load(choices + param), tl.load(positions + row),
    )  # fmt: skip
    temperature = tl.load(temperatures + param)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    end = tl.minimum((part + 1) * span, SIZE_N)
    cols = tl.arange(0, BLOCK_N)
    best = LOWEST
    winner = part * span
    bad = 0
    following = _load_logits(row_ptr, part * span + cols, end)
    for start in range(part * span, end, BLOCK_N):
        n = start + cols
        logit = following
        following = _load_logits(row_ptr, n + BLOCK_N, end)
        hope = may_beat(best, logit, temperature, first, second, n + first_id)
        if tl.max(hope.to(tl.int32), axis=0) > 0:
            score = sampling_score(logit, temperature, first, second, n + first_id, FAST)
            score = tl.where(score == score, score, float("-inf"))
            top, where = tl.max(score, axis=0, return_indices=True)
            bad += tl.sum((logit != logit).to(tl.int32), axis=0)
            winner = tl.where(top > best, start + where, winner)
            best = tl.maximum(top, best)
    best = tl.where(best > LOWEST, best, float("-inf"))
    out = row * tl.num_programs(0) + part
    tl.store(best_ptr + out, tl.where(bad > 0, float("nan"), best))
    tl.store(id_ptr + out, winner + first_id)


@triton.jit
def _best_tile_kernel(
    best_ptr, id_ptr, token_ptr, nan_ptr, score_ptr, sample_rows, last_token, num_tiles,
    BLOCK: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best tile of one row. STEP: NaN marks follow the tokens, and the row remembers its own;
    else there is a score.
    """
    release_successor(PDL)
    row = tl.program_id(0)
    tiles = tl.arange(0, BLOCK)
    await_predecessor(PDL)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_tiles, BLOCK):
        mask = start + tiles < num_tiles
        where = row * num_tiles + start + tiles
        score = tl.load(best_ptr + where, mask=mask, other=float("-inf"))
        ids = tl.load(id_ptr + where, mask=mask, other=0x7FFFFFFF)
        bad += (score != score).to(tl.int32)
        # Tiles come in order, so of equal scores the earlier one stays.
        better = (score > top) | ((score == top) & (ids < token))
        top = tl.where(better, score, top)
        token = tl.where(better, ids, token)
    best = tl.max(top, axis=0)
    winner = tl.min(tl.where(top == best, token, 0x7FFFFFFF), axis=0)
    winner = tl.where(winner == 0x7FFFFFFF, 0, winner)
    broken = tl.sum(bad, axis=0) > 0
    tl.store(token_ptr + row, winner)
    if STEP:
        tl.store(token_ptr + tl.num_programs(0) + row, broken.to(tl.int32))
        tl.store(last_token + tl.load(sample_rows + row), winner)
    else:
        tl.store(nan_ptr + row, broken)
        tl.store(score_ptr + row, best)


def score_logits(
    logits: Tensor,
    sample_rows: Tensor,
    positions: Tensor,
    params: SamplingRows,
    *,
    vocab_offset: int = 0,
    block: int = SCORE_BLOCK,
    programs: int = SCORE_PROGRAMS,
) -> tuple[Tensor, Tensor]:
    """``score_head`` where the logits ``[rows, vocab]`` are there already.

    ``block`` logits, a power of two, are scored together; about ``programs`` share the rows.
    """
    rows, vocab = logits.shape
    span = cdiv(cdiv(vocab, max(1, programs // rows)), block) * block
    best, ids = _of_tiles(logits, cdiv(vocab, span))
    _score_kernel[(best.shape[1], rows)](
        logits, logits.stride(0), best, ids, sample_rows, positions, params.temperature,
        params.seed, params.choice, span, vocab_offset,
        SIZE_N=vocab, BLOCK_N=block, FAST=not interpreted(), num_warps=4,
    )  # fmt: skip
    return best, ids


def score_head(
    x: Tensor,
    lm_head: Tensor,
    sample_rows: Tensor,
    positions: Tensor,
    params: SamplingRows,
    *,
    vocab_offset: int = 0,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Score the logits ``x @ lm_head.T`` of each row by tiles of the vocabulary, no truncation.

    Args:
        x: ``[rows, hidden]``, after the final norm.
        sample_rows: i32[rows], each row's place in ``params`` (temperature, seed, choice).
        positions: i32[rows], position of the token to be sampled.

    Returns:
        The best score of every tile, f32[rows, tiles], NaN where a logit is; and its token, i32.
    """
    rows, size_k = x.shape
    rest = (sample_rows, positions, params)
    if suits_hopper_head(x, lm_head):
        return score_tiles(x, lm_head, *rest, vocab_offset=vocab_offset, pdl=pdl)
    if rows > FUSED_ROWS and x.dtype != torch.float32:
        logits = torch.nn.functional.linear(x, lm_head)
        return score_logits(logits, *rest, vocab_offset=vocab_offset)
    config = head_config(rows, x.dtype.itemsize * 8)
    best, ids = _of_tiles(x, cdiv(lm_head.shape[0], config.block_n))
    _head_kernel[(cdiv(rows, config.block_m), best.shape[1])](
        x, x.stride(0), lm_head, best, ids, sample_rows, positions, params.temperature,
        params.seed, params.choice, rows, vocab_offset,
        SIZE_N=lm_head.shape[0], SIZE_K=size_k, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, PRECISION=dot_precision(x.dtype), FAST=not interpreted(),
        PDL=pdl, num_warps=config.num_warps, num_stages=config.num_stages, **launch_options(pdl),
    )  # fmt: skip
    return best, ids


def _of_tiles(x: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """Room for the best score and token of each row's tiles."""
    shape = (x.shape[0], tiles)
    best = torch.empty(shape, dtype=torch.float32, device=x.device)
    return best, torch.empty(shape, dtype=torch.int32, device=x.device)


def best_tiles(scored: tuple[Tensor, Tensor], *, pdl: bool = False) -> Sampled:
    """Sample one token a row: the best of what ``score_head`` returned."""
    best, ids = scored
    rows, tiles = best.shape
    sampled = Sampled(
        tokens=torch.empty(rows, dtype=torch.int32, device=best.device),
        scores=torch.empty(rows, dtype=torch.float32, device=best.device),
        nan=torch.empty(rows, dtype=torch.bool, device=best.device),
    )
    _best_tile_kernel[(rows,)](
        best, ids, sampled.tokens, sampled.nan, sampled.scores, ids, ids, tiles,
        BLOCK=min(1024, next_power_of_2(tiles)), STEP=False, PDL=pdl, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
    return sampled


def finish_step(
    scored: tuple[Tensor, Tensor], sample_rows: Tensor, last_token: Tensor, *, pdl: bool
) -> Tensor:
    """``best_tiles`` as a step's results i32[2, rows]: tokens, and whether a logit was NaN.

    Writes each token to ``last_token[sample_rows]`` too.
    """
    best, ids = scored
    rows, tiles = best.shape
    results = torch.empty((2, rows), dtype=torch.int32, device=best.device)
    _best_tile_kernel[(rows,)](
        best, ids, results, results, best, sample_rows, last_token, tiles,
        BLOCK=min(1024, next_power_of_2(tiles)), STEP=True, PDL=pdl, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
    return results
