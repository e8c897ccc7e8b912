"""Random numbers as a pure function of (seed, choice, position, vocabulary id).

Nothing else enters: no batch, no row, no generator state. All arithmetic is on 32-bit integers
that wrap around, so that any kernel language can reproduce the bits. ``>>`` is the arithmetic
shift of signed integers, except where ``_mix`` masks it to a logical one.

Test vectors (seed, choice, position, id) -> bits are in ``tests/ops/test_noise.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Odd constants with good avalanche: the golden ratio, and those of the "lowbias32" mixer.
GOLDEN = 0x9E3779B1 - (1 << 32)
MUL_1 = 0x7FEB352D
MUL_2 = 0x846CA68B - (1 << 32)
# 31-bit integers to floats in (0, 1): a shade under 2**-31, so that the largest stays below 1.
SCALE = (1 - 2**-23) * 2**-31
HALF = 2**-32


def row_keys(seed: Tensor, choice: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit keys of each sampling row.

    Args:
        seed: i32[M, 2], low and high word.
        choice: i32[M], which of a request's continuations.
        position: i32[M], position of the token to be sampled in its sequence.

    Returns:
        i32[M] and i32[M].
    """
    key = _mix(seed[:, 0] ^ GOLDEN)
    key = _mix(key + seed[:, 1])
    key = _mix(key + choice)
    key = _mix(key + position)
    return key, _mix(key + GOLDEN)


def noise_bits(keys: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
    """31 random bits for each vocabulary id: i32, from 0 to 2**31 - 1.

    ``keys`` are i32[M]; ``ids`` are i32[V] (the same for all rows) or i32[M, C].
    """
    first, second = (key.unsqueeze(-1) for key in keys)
    bits = ids * GOLDEN + first
    bits = (bits ^ (bits >> 16)) * MUL_1 ^ second
    bits = (bits ^ (bits >> 15)) * MUL_2
    return (bits ^ (bits >> 16)) & 0x7FFFFFFF


def log_exponential(bits: Tensor) -> Tensor:
    """Logarithm of a standard exponential variate, f32; Gumbel noise is its negative.

    The variate is -log(1 - v) with v uniform. Small v decide who wins, and there floats are dense:
    tokens of probability down to about 2**-32 can be drawn.
    """
    return torch.log(-torch.log1p(bits.float() * -SCALE - HALF))


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * MUL_1
    bits = (bits ^ (bits >> 15 & 0x1FFFF)) * MUL_2
    return bits ^ (bits >> 16 & 0xFFFF)
