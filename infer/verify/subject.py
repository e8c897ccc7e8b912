"""The model under test, as something that can be loaded again: in another dtype, on more ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from infer.config import ModelConfig
from infer.loading import load
from infer.model import Model
from infer.verify.reference import transformers_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What ``infer.load`` takes, less dtype and ranks."""

    model: str | None = None
    config: ModelConfig | None = None  # for random weights of a shape of one's own
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def random(self) -> bool:
        """Whether its weights are made up."""
        return self.options.get("load_format") == "random"

    def load(self, dtype: torch.dtype, *, tp: int | None = None) -> Model:
        """Load it.

        Raises:
            InferError: what ``infer.load`` raises.
        """
        return load(
            self.model, config=self.config, dtype=dtype, tp=tp, progress=False, **self.options
        )

    def reference(self, model: Model, dtype: torch.dtype) -> Any:
        """transformers' model of the same weights, which it reads itself where it can."""
        return transformers_model(model, dtype, from_folder=not self.random)
