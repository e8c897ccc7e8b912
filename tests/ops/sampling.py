"""Sampling rows for tests, and the kept set in its plainest form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.ops.sampling import SampleFlags, SamplingRows


def rows_of(count: int, **values: float | Sequence[float] | Tensor) -> SamplingRows:
    """Rows with these parameters; what is not named is off, and seeds are 0."""
    kinds: dict[str, tuple[float, torch.dtype]] = {
        "temperature": (1.0, torch.float32),
        "top_k": (0, torch.int32),
        "top_p": (1.0, torch.float32),
        "min_p": (0.0, torch.float32),
        "choice": (0, torch.int32),
    }
    fields: dict[str, Any] = {
        name: torch.as_tensor(values.get(name, default), dtype=dtype).expand(count).contiguous()
        for name, (default, dtype) in kinds.items()
    }
    seeds = np.asarray(values.get("seed", 0), np.int64) * np.ones(count, np.int64)
    words = np.stack([seeds & 0xFFFFFFFF, seeds >> 32], axis=1).astype(np.uint32)
    return SamplingRows(seed=torch.from_numpy(words.view(np.int32)), **fields)


def random_rows(count: int, seed: int) -> SamplingRows:
    """Rows of every kind: greedy, plain, and truncated in all combinations."""
    draw = np.random.default_rng(seed)

    def sometimes(share: float, on: Any, off: float) -> np.ndarray[Any, Any]:
        return np.where(draw.random(count) < share, on, off)

    return rows_of(
        count,
        temperature=torch.from_numpy(sometimes(0.8, draw.uniform(0.2, 2, count), 0)),
        top_k=torch.from_numpy(sometimes(0.5, draw.integers(1, 400, count), 0)),
        top_p=torch.from_numpy(sometimes(0.5, draw.uniform(0.01, 1, count), 1)),
        min_p=torch.from_numpy(sometimes(0.3, draw.uniform(0.001, 0.5, count), 0)),
        seed=torch.from_numpy(draw.integers(0, 2**62, count)),
    )


def flags_of(rows: SamplingRows) -> SampleFlags:
    """The flags a host would derive."""
    return SampleFlags(
        greedy=bool((rows.temperature == 0).all()),
        top_k=bool((rows.top_k > 0).any()),
        top_p=bool((rows.top_p < 1).any()),
        min_p=bool((rows.min_p > 0).any()),
    )


def kept_tokens(logits: Sequence[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, one token at a time, in float64."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = np.exp(np.asarray(logits, np.float64) - max(logits))
    order = [i for i in order if weights[i] >= min_p]
    if top_k > 0:
        order = order[:top_k]
    total = weights[order].sum()
    kept, mass = set(), 0.0
    for token in order:
        if kept and top_p < 1 and mass >= top_p * total:
            break
        kept.add(token)
        mass += weights[token]
    return kept
