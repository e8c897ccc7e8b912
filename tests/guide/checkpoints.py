"""A tiny checkpoint with weights, tokenizer and chat template, saved by transformers."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from tests.server.tiny import CONFIG, write_tiny


def tiny_checkpoint(folder: Path) -> Path:
    """Write it; ``infer.load`` takes the folder."""
    import torch

    write_tiny(folder)
    config = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config, initializer_range=0.3)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
