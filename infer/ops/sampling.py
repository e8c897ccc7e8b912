"""What sampling takes and gives, for every backend."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

GREEDY_BELOW = 1e-5  # temperatures under this are greedy: logits would overflow


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


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens and how they won. Over vocabulary shards the largest score wins (``best_shard``)."""

    tokens: Tensor  # i32[M]
    scores: Tensor  # f32[M]
    nan: Tensor  # bool[M], the row's logits held a NaN: its token means nothing
