"""The sampling noise of ``infer.ops.noise``, bit for bit, inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from infer.ops import noise, sampling

GOLDEN = tl.constexpr(noise.GOLDEN)
MUL_1 = tl.constexpr(noise.MUL_1)
MUL_2 = tl.constexpr(noise.MUL_2)
SCALE = tl.constexpr(noise.SCALE)
HALF = tl.constexpr(noise.HALF)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
GREEDY_BELOW = tl.constexpr(sampling.GREEDY_BELOW)


@triton.jit
def _times(bits, FACTOR: tl.constexpr):
    """A product of 32-bit integers that wraps around."""
    return (bits.to(tl.uint32) * (FACTOR & 0xFFFFFFFF)).to(tl.uint32)


@triton.jit
def _mix(bits):
    bits = bits.to(tl.uint32)
    bits = _times(bits ^ (bits >> 16), MUL_1)
    bits = _times(bits ^ (bits >> 15), MUL_2)
    return bits ^ (bits >> 16)


@triton.jit
def row_keys(seed_low, seed_high, choice, position):
    """See ``infer.ops.noise.row_keys``; words come and go as 32-bit integers of either sign."""
    golden = GOLDEN & 0xFFFFFFFF
    key = _mix(seed_low.to(tl.uint32) ^ golden)
    key = _mix(key + seed_high.to(tl.uint32))
    key = _mix(key + choice.to(tl.uint32))
    key = _mix(key + position.to(tl.uint32))
    return key, _mix(key + golden)


@triton.jit
def noise_bits(first, second, ids):
    """See ``infer.ops.noise.noise_bits``: shifts there are arithmetic, so signed here."""
    bits = (_times(ids, GOLDEN) + first).to(tl.int32, bitcast=True)
    bits = bits ^ (bits >> 16)
    bits = _times(bits, MUL_1) ^ second
    bits = bits.to(tl.int32, bitcast=True)
    bits = _times(bits ^ (bits >> 15), MUL_2).to(tl.int32, bitcast=True)
    return (bits ^ (bits >> 16)) & 0x7FFFFFFF


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """Base-2 logarithm; FAST is the hardware's own, off by up to 2**-22."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def _uniform(bits):
    """The number in (0, 1) that ``log_exponential`` begins with."""
    return bits.to(tl.float32) * SCALE + HALF


@triton.jit
def log_exponential(bits, FAST: tl.constexpr):
    """See ``infer.ops.noise.log_exponential``, to about 1e-6.

    Small variates decide who wins, and there -log(1 - v) is a short series.
    """
    v = _uniform(bits)
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    variate = tl.where(v < 1 / 16, series, _log2(1.0 - v, FAST) * -LN2)
    return _log2(variate, FAST) * LN2


@triton.jit
def sampling_score(logit, temperature, first, second, ids, FAST: tl.constexpr):
    """What the sampled token has most of: the logit itself where greedy, else Gumbel-max."""
    greedy = temperature < GREEDY_BELOW
    inverse = 1.0 / tl.where(greedy, 1.0, temperature)
    noise = tl.where(greedy, 0.0, log_exponential(noise_bits(first, second, ids), FAST))
    return logit * inverse - noise


@triton.jit
def may_beat(best, logit, temperature, first, second, ids):
    """False only where ``sampling_score`` is surely below ``best``; at less than half its price.

    ``best`` is finite. With noise -log(E), E = -log(1 - v) >= v: a score above it takes
    v <= exp(x - best) for the scaled logit x. One per cent more covers what is rounded. A logit
    that is NaN gives True.
    """
    greedy = temperature < GREEDY_BELOW
    x = logit * (1.0 / tl.where(greedy, 1.0, temperature))
    v = tl.where(greedy, 1.0, _uniform(noise_bits(first, second, ids)))
    return ~(v > tl.exp2(tl.minimum(x - best, 1.0) * LOG2E + 1 / 64))
