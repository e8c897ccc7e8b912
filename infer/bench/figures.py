"""What a benchmark says: figures, and the floors that the hardware sets under them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from infer.llm import LLM

# Memory bandwidth in bytes/s and dense bf16 rate in FLOP/s that set the floors, by device name.
PEAKS = {"NVIDIA H200": (4.8e12, 989e12), "NVIDIA H100": (3.35e12, 989e12)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number."""

    workload: str
    name: str
    value: float
    unit: str
    floor: float | None = None  # the best the hardware allows, in the same unit
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def percent_of_floor(self) -> float | None:
        """How much of the floor's speed was reached, 100 being all of it."""
        if self.floor is None:
            return None
        rate = self.unit.endswith("/s")
        return 100 * (self.value / self.floor if rate else self.floor / self.value)


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes and operations of a model, against the device's peaks."""

    weight_bytes: int  # read once a decode step
    kv_bytes: int  # a context position
    flops: int  # a token, without attention
    bandwidth: float
    rate: float

    def decode_s(self, batch: int, context: float) -> float:
        """Seconds of a decode step that reads weights once and every context once."""
        return (self.weight_bytes + batch * context * self.kv_bytes) / self.bandwidth

    def prefill_s(self, tokens: int) -> float:
        """Seconds to multiply ``tokens`` positions."""
        return tokens * self.flops / self.rate


def floor_of(llm: LLM) -> Floor | None:
    """The floor on a known GPU; None elsewhere."""
    model = llm.model
    if model.device.type != "cuda":
        return None
    peaks = PEAKS.get(torch.cuda.get_device_name(model.device))
    if peaks is None:
        return None
    cfg, size = model.config, model.dtype.itemsize
    layer = cfg.hidden_size * (2 * cfg.q_size + 2 * cfg.kv_size + 3 * cfg.intermediate_size)
    body = cfg.num_layers * layer
    head = cfg.vocab_size * cfg.hidden_size
    kv = cfg.num_layers * 2 * cfg.kv_size * size
    return Floor((body + head) * size, kv, 2 * body, *peaks)


def random_prompts(rng: random.Random, count: int, length: int, vocab: int) -> list[list[int]]:
    """Prompts without a common prefix."""
    return [[rng.randrange(min(vocab, 10_000)) for _ in range(length)] for _ in range(count)]
