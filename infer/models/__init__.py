"""Models this package runs: which architecture is computed by which functions."""

from __future__ import annotations

from infer.models.decoder import forward, logits

# Values of ModelConfig.architecture. One dense decoder runs them all.
ARCHITECTURES = ("qwen3", "qwen2", "llama", "mistral")

__all__ = ["ARCHITECTURES", "forward", "logits"]
