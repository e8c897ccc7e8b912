"""Tiny random checkpoints, made and saved by transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-biased": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 8}),
}


def tiny_model(case: str, **changes: Any) -> transformers.PreTrainedModel:
    """A model whose every tensor, norms and biases too, is random."""
    family, special = CASES[case]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **special, **changes})
    torch.manual_seed(sum(map(ord, case)))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.5)
    return model.eval()


def save(model: transformers.PreTrainedModel, folder: Path, shard_size: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder
