"""A loaded model: configuration, weights and tokenizer, immutable and ready to run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from infer.config import GenerationDefaults, ModelConfig
from infer.parallel import TP
from infer.tokenizer import Tokenizer
from infer.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What ``infer.load`` returns. Weights never change; many engine states may share one model."""

    name: str  # as the user wrote it
    path: str | None  # where it was read from; None for a state_dict or random weights
    config: ModelConfig
    weights: Weights = field(repr=False)  # to print them would copy them from the device
    tokenizer: Tokenizer | None = field(repr=False)  # None: token ids in, token ids out
    device: torch.device
    dtype: torch.dtype
    tp: TP = field(default_factory=TP)
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
