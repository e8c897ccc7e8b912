"""A checkpoint folder without weights: a tiny model's shape and a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tests.server.fakes import EOS, TEMPLATE, fake_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": EOS,
}


def write_tiny(folder: Path) -> Path:
    """Write the folder; load it with ``load_format="random"``."""
    folder.mkdir(parents=True, exist_ok=True)
    fake_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    )
    return folder
