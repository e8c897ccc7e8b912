"""Tiny GGUF files, written as llama.cpp's converter would write a transformers model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half next to row i of its second half, as llama.cpp rotates them."""
    dim = weights.shape[0] // heads
    order = [
        head * dim + half * (dim // 2) + i
        for head in range(heads)
        for i in range(dim // 2)
        for half in range(2)
    ]
    return weights[order]


def write(
    path: Path,
    model: transformers.PreTrainedModel,
    *,
    architecture: str | None = None,
    quantize: Callable[[str], Type | None] = lambda name: None,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> dict[str, torch.Tensor]:
    """Write the model; return what its tensors are after quantization, by checkpoint name."""
    hf = model.config
    name = architecture or hf.model_type
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(hf.max_position_embeddings)
    writer.add_embedding_length(hf.hidden_size)
    writer.add_block_count(hf.num_hidden_layers)
    writer.add_feed_forward_length(hf.intermediate_size)
    writer.add_head_count(hf.num_attention_heads)
    writer.add_head_count_kv(hf.num_key_value_heads)
    writer.add_layer_norm_rms_eps(hf.rms_norm_eps)
    writer.add_rope_freq_base(hf.rope_parameters["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if getattr(hf, "head_dim", None):
        writer.add_key_length(hf.head_dim)
        writer.add_value_length(hf.head_dim)
    extra(writer)
    kept: dict[str, torch.Tensor] = {}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and hf.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        kind = quantize(key) or Type.F32
        data = gguf.quants.quantize(values, kind)
        kept[key] = torch.from_numpy(gguf.quants.dequantize(data, kind).copy())
        if name == "llama" and ("q_proj" in key or "k_proj" in key):
            heads = hf.num_attention_heads if "q_proj" in key else hf.num_key_value_heads
            data = interleaved(data, heads)
        writer.add_tensor(gguf_name(key), data, raw_dtype=kind)
    for key, array in (tensors or {}).items():
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def add_vocabulary(writer: gguf.GGUFWriter, kind: str, **values: Any) -> None:
    """Tokenizer metadata: ``kind`` is gpt2 or llama, the others go by their GGUF names."""
    writer.add_tokenizer_model(kind)
    for key, value in values.items():
        getattr(writer, f"add_{key}")(value)
