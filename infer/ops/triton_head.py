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
from infer.ops.triton_noise import row_keys, sampling_score

FUSED_ROWS = 96  # above, cuBLAS makes the logits: its tiles read x less often
SCORE_TILE = 4096  # logits a program scores


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
def _score_kernel(
    logits_ptr, logits_stride, best_ptr, id_ptr, sample_rows, positions, temperatures, seeds,
    choices, num_rows, first_id,
    SIZE_N: tl.constexpr, BLOCK_N: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Best of a tile of one row of logits that are there already."""
    tile = tl.program_id(0)
    num_tiles = tl.num_programs(0)
    row = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < SIZE_N
    logit = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + n, mask=mask, other=0.0)
    logit = logit.to(tl.float32)
    param = tl.load(sample_rows + row)
    first, second = row_keys(
        tl.load(seeds + 2 * param), tl.load(seeds + 2 * param + 1),
        tl.load(choices + param), tl.load(positions + row),
    )  # fmt: skip
    temperature = tl.load(temperatures + param)
    score = sampling_score(logit, temperature, first, second, n + first_id, FAST)
    score = tl.where(mask & (score == score), score, float("-inf"))
    best, where = tl.max(score, axis=0, return_indices=True)
    bad = tl.sum((mask & (logit != logit)).to(tl.int32), axis=0) > 0
    tl.store(best_ptr + row * num_tiles + tile, tl.where(bad, float("nan"), best))
    tl.store(id_ptr + row * num_tiles + tile, tile * BLOCK_N + where + first_id)


@triton.jit
def _best_tile_kernel(
    best_ptr, id_ptr, token_ptr, score_ptr, nan_ptr, num_tiles, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The best tile of one row."""
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
    tl.store(token_ptr + row, tl.where(winner == 0x7FFFFFFF, 0, winner))
    tl.store(score_ptr + row, best)
    tl.store(nan_ptr + row, tl.sum(bad, axis=0) > 0)


def sample_head(
    x: Tensor,
    lm_head: Tensor,
    sample_rows: Tensor,
    positions: Tensor,
    params: SamplingRows,
    *,
    vocab_offset: int = 0,
    config: HeadConfig | None = None,
    pdl: bool = False,
) -> Sampled:
    """Sample one token from each row's logits ``x @ lm_head.T``, without truncation.

    Args:
        x: ``[rows, hidden]``, after the final norm.
        sample_rows: i32[rows], each row's place in ``params`` (temperature, seed, choice).
        positions: i32[rows], position of the token to be sampled.
    """
    rows, size_k = x.shape
    size_n = lm_head.shape[0]
    fast = not interpreted()
    separate = config is None and rows > FUSED_ROWS and x.dtype != torch.float32
    config = config or head_config(rows, x.dtype.itemsize * 8)
    block_n = SCORE_TILE if separate else config.block_n
    tiles = cdiv(size_n, block_n)
    best = torch.empty((rows, tiles), dtype=torch.float32, device=x.device)
    ids = torch.empty((rows, tiles), dtype=torch.int32, device=x.device)
    rest = (
        best, ids, sample_rows, positions, params.temperature, params.seed, params.choice, rows,
        vocab_offset,
    )  # fmt: skip
    if separate:
        logits = torch.nn.functional.linear(x, lm_head)
        _score_kernel[(tiles, rows)](
            logits, logits.stride(0), *rest,
            SIZE_N=size_n, BLOCK_N=block_n, FAST=fast, num_warps=4,
        )  # fmt: skip
    else:
        _head_kernel[(cdiv(rows, config.block_m), tiles)](
            x, x.stride(0), lm_head, *rest,
            SIZE_N=size_n, SIZE_K=size_k, BLOCK_M=config.block_m, BLOCK_N=block_n,
            BLOCK_K=config.block_k, PRECISION=dot_precision(x.dtype), FAST=fast, PDL=pdl,
            num_warps=config.num_warps, num_stages=config.num_stages, **launch_options(pdl),
        )  # fmt: skip
    sampled = Sampled(
        tokens=torch.empty(rows, dtype=torch.int32, device=x.device),
        scores=torch.empty(rows, dtype=torch.float32, device=x.device),
        nan=torch.empty(rows, dtype=torch.bool, device=x.device),
    )
    _best_tile_kernel[(rows,)](
        best, ids, sampled.tokens, sampled.scores, sampled.nan, tiles,
        BLOCK=min(1024, next_power_of_2(tiles)), PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return sampled
