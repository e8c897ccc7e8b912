"""The noise: its bits against plain integer arithmetic, and its statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from infer.ops.noise import log_exponential, noise_bits, row_keys

WORD = 1 << 32


def signed(value: int) -> int:
    value %= WORD
    return value - WORD if value >= WORD // 2 else value


def mix(value: int) -> int:
    value %= WORD
    value = (value ^ (value >> 16)) * 0x7FEB352D % WORD
    value = (value ^ (value >> 15)) * 0x846CA68B % WORD
    return value ^ (value >> 16)


def bits_of(seed: int, choice: int, position: int, token: int) -> int:
    """The definition, in Python's unbounded integers."""
    key = mix((seed % WORD) ^ 0x9E3779B1)
    for part in (seed // WORD, choice, position):
        key = mix(key + part)
    second = mix(key + 0x9E3779B1)
    bits = (token * 0x9E3779B1 + key) % WORD
    bits = (bits ^ signed(bits) >> 16) * 0x7FEB352D % WORD ^ second
    bits = (bits ^ signed(bits) >> 15) * 0x846CA68B % WORD
    return (bits ^ signed(bits) >> 16) % (WORD // 2)


def words(seeds: list[int]) -> torch.Tensor:
    array = np.array([[seed % WORD, seed // WORD] for seed in seeds], np.uint32)
    return torch.from_numpy(array.view(np.int32))


def noise(seeds: list[int], choices: list[int], positions: list[int], ids: range) -> torch.Tensor:
    keys = row_keys(
        words(seeds),
        torch.tensor(choices, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
    )
    return noise_bits(keys, torch.arange(ids.start, ids.stop, dtype=torch.int32))


VECTORS = [
    ((0, 0, 0, 0), 758279206),
    ((0, 0, 0, 1), 2117877666),
    ((1, 0, 0, 0), 1792488002),
    ((0, 1, 0, 0), 717812268),
    ((0, 0, 1, 0), 1678362500),
    ((1 << 32, 0, 0, 0), 408042748),
    ((2**63 - 1, 63, 2**20, 151_935), 1570318912),
    ((1234567890123456789, 3, 777, 49_151), 651396930),
]


@pytest.mark.parametrize(("inputs", "expected"), VECTORS)
def test_vectors(inputs: tuple[int, int, int, int], expected: int) -> None:
    """For kernels in other languages: (seed, choice, position, id) -> bits."""
    seed, choice, position, token = inputs
    assert bits_of(*inputs) == expected
    assert noise([seed], [choice], [position], range(token, token + 1)).item() == expected


def test_bits_equal_integer_arithmetic() -> None:
    draw = np.random.default_rng(0)
    seeds = [int(s) for s in draw.integers(0, 2**63 - 1, 20)]
    choices = [int(c) for c in draw.integers(0, 64, 20)]
    positions = [int(p) for p in draw.integers(0, 2**31 - 1, 20)]
    got = noise(seeds, choices, positions, range(1000, 1100))
    for row in range(20):
        expected = [bits_of(seeds[row], choices[row], positions[row], i) for i in range(1000, 1100)]
        assert got[row].tolist() == expected


def test_bits_are_uniform() -> None:
    bits = noise([7] * 200, [0] * 200, list(range(200)), range(20_000))
    counts = torch.bincount((bits >> 21).flatten(), minlength=1024).double()
    expected = bits.numel() / 1024
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi - 1023) < 5 * math.sqrt(2 * 1023)


@pytest.mark.parametrize("part", ["seed", "seed_high", "choice", "position", "id"])
def test_one_changed_input_bit_flips_half_of_the_bits(part: str) -> None:
    name, shift = ("seed", 32) if part == "seed_high" else (part, 0)
    draw = np.random.default_rng(1)
    count = 2000
    for bit in range(4 if part == "choice" else 16):
        inputs = {
            "seed": draw.integers(0, 2**62, count),
            "choice": draw.integers(0, 4, count),
            "position": draw.integers(0, 4096, count),
            "id": draw.integers(0, 150_000, count),
        }
        changed = {**inputs, name: inputs[name] ^ (1 << (bit + shift))}
        one, two = (
            noise_bits(
                row_keys(
                    words(x["seed"].tolist()),
                    torch.from_numpy(x["choice"].astype(np.int32)),
                    torch.from_numpy(x["position"].astype(np.int32)),
                ),
                torch.from_numpy(x["id"].astype(np.int32)).unsqueeze(-1),
            )
            for x in (inputs, changed)
        )
        flips = np.array([bits.bit_count() for bits in (one ^ two).flatten().tolist()])
        assert abs(flips.mean() - 15.5) < 0.5
        assert flips.min() > 0
        each = [(((one ^ two) >> i) & 1).double().mean().item() for i in range(31)]
        assert np.abs(np.array(each) - 0.5).max() < 0.06  # five standard deviations


def test_rows_and_neighbours_are_uncorrelated() -> None:
    bits = noise([1, 1, 1, 2], [0, 0, 1, 0], [5, 6, 5, 5], range(100_000)).double().numpy()
    rows = np.corrcoef(bits)
    assert np.abs(rows - np.eye(4)).max() < 5 / math.sqrt(100_000)
    for lag in (1, 2, 16, 256, 4096):
        assert abs(np.corrcoef(bits[0, lag:], bits[0, :-lag])[0, 1]) < 5 / math.sqrt(90_000)


def test_the_variate_is_exponential_and_finite_at_the_ends() -> None:
    ends = torch.tensor([0, 1, 2**30, 2**31 - 2, 2**31 - 1], dtype=torch.int32)
    logs = log_exponential(ends)
    assert torch.isfinite(logs).all()
    exact = [math.log(-math.log1p(-(bits + 0.5) * 2**-31)) for bits in (0, 1, 2**30)]
    assert logs[:3].tolist() == pytest.approx(exact, rel=1e-6)
    # Kolmogorov-Smirnov against 1 - exp(-x).
    bits = noise([3], [0], [9], range(100_000))[0]
    values = np.sort(np.exp(log_exponential(bits).double().numpy()))
    distance = np.abs(1 - np.exp(-values) - (np.arange(100_000) + 0.5) / 100_000).max()
    assert distance < 2 / math.sqrt(100_000)
