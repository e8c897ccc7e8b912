"""Tiny random models of transformers: how their heads fall on two and four ranks differs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from tests.model.reference import CLASSES

# name: (architecture, query heads, KV heads, more)
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "qwen3": ("qwen3", 4, 2, {"head_dim": 32, "tie_word_embeddings": False}),
    "smollm2": ("llama", 9, 3, {}),
    "llama": ("llama", 16, 8, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", 6, 2, {}),
}


def tiny(case: str) -> PreTrainedModel:
    """The model of a case, the same at every call."""
    architecture, heads, kv_heads, more = CASES[case]
    config_class, model_class = CLASSES[architecture]
    options: dict[str, Any] = {
        "vocab_size": 131,  # does not divide
        "hidden_size": 16 * heads,
        "intermediate_size": 150,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }
    torch.manual_seed(len(case))
    model = model_class(config_class(**options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(float("norm" in name), 0.3)
    return model
