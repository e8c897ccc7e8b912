"""An independent way from a transformers model to ours, and a driver that plays the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from infer.batch import AttentionMeta, Batch
from infer.config import ModelConfig, RopeConfig
from infer.kv import KVCache, allocate
from infer.models import forward, logits
from infer.models.decoder import layer_shape
from infer.ops import Ops, WholeWeights
from infer.ops.backends import make_ops
from infer.parallel import TP
from infer.weights import LayerWeights, Weights

CLASSES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}


def tiny_model(
    architecture: str,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    rope: dict[str, Any] | None = None,
    sliding_window: int | None = None,
    tied: bool = False,
    biases: bool = False,
    seed: int = 0,
) -> PreTrainedModel:
    """A two-layer random model of transformers, float32, every norm weight and bias random."""
    config_class, model_class = CLASSES[architecture]
    options: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": 10_000.0},
        "attn_implementation": "eager",
    }
    if architecture in ("qwen2", "qwen3") and sliding_window is not None:
        options |= {"use_sliding_window": True, "max_window_layers": 0}
    if architecture == "llama":
        options |= {"attention_bias": biases, "mlp_bias": biases}
    else:
        options["sliding_window"] = sliding_window
    torch.manual_seed(seed)
    model = model_class(config_class(**options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


def config_of(model: PreTrainedModel) -> ModelConfig:
    """Read what the decoder needs off a transformers model, without our own config reader."""
    hf, state = model.config, model.state_dict()
    rope = dict(hf.rope_parameters)
    rope["kind"], rope["theta"] = rope.pop("rope_type"), rope.pop("rope_theta")
    return ModelConfig(
        architecture=hf.model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=state["model.layers.0.self_attn.k_proj.weight"].shape[0] // hf.num_key_value_heads,
        rms_norm_eps=hf.rms_norm_eps,
        rope=RopeConfig(**rope),
        max_position_embeddings=hf.max_position_embeddings,
        tie_word_embeddings=hf.tie_word_embeddings,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in state,
        o_bias="model.layers.0.self_attn.o_proj.bias" in state,
        mlp_bias="model.layers.0.mlp.up_proj.bias" in state,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in state,
        sliding_window=getattr(hf, "sliding_window", None),
    )


def weights_of(model: PreTrainedModel) -> Weights:
    """Fuse a transformers state dict by hand; the reference for the loader as well."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def fuse(prefix: str, names: tuple[str, ...], kind: str) -> Tensor | None:
        found = [state.get(f"{prefix}.{name}.{kind}") for name in names]
        parts = [tensor for tensor in found if tensor is not None]
        return torch.cat(parts) if parts else None

    def one_layer(at: str) -> LayerWeights:
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
        tensors = {
            "input_norm": state[f"{at}.input_layernorm.weight"],
            "qkv": fuse(attn, qkv, "weight"),
            "qkv_bias": fuse(attn, qkv, "bias"),
            "q_norm": state.get(f"{attn}.q_norm.weight"),
            "k_norm": state.get(f"{attn}.k_norm.weight"),
            "o": state[f"{attn}.o_proj.weight"],
            "o_bias": state.get(f"{attn}.o_proj.bias"),
            "post_norm": state[f"{at}.post_attention_layernorm.weight"],
            "gate_up": fuse(mlp, gate_up, "weight"),
            "gate_up_bias": fuse(mlp, gate_up, "bias"),
            "down": state[f"{mlp}.down_proj.weight"],
            "down_bias": state.get(f"{mlp}.down_proj.bias"),
        }
        return LayerWeights(**tensors)  # type: ignore[arg-type]

    return Weights(
        embed=state["model.embed_tokens.weight"],
        layers=tuple(one_layer(f"model.layers.{i}") for i in range(model.config.num_hidden_layers)),
        norm=state["model.norm.weight"],
        lm_head=state["lm_head.weight"],
    )


@dataclass(kw_only=True)
class Driver:
    """The smallest engine: rows with known tokens, permuted blocks, batches asked for by hand."""

    cfg: ModelConfig
    weights: Weights
    block_size: int = 16
    num_rows: int = 8
    max_blocks: int = 32
    ops: Ops | None = None
    device: str = "cpu"
    seed: int = 0
    kv_dtype: torch.dtype | None = None
    kv: KVCache = field(init=False)
    tables: Tensor = field(init=False)
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        total = self.num_rows * self.max_blocks
        self.ops = self.ops or make_ops("torch", self.cfg, self.device)
        self.kv = allocate(
            self.cfg.num_layers,
            total,
            self.block_size,
            self.cfg.num_kv_heads,
            self.cfg.head_dim,
            dtype=self.kv_dtype or self.weights.norm.dtype,
            device=torch.device(self.device),
        )
        order = np.random.default_rng(self.seed).permutation(total).astype(np.int32)
        tables = np.full((self.num_rows + 1, self.max_blocks), total, dtype=np.int32)
        tables[: self.num_rows] = order.reshape(self.num_rows, self.max_blocks)
        self.tables = torch.from_numpy(tables).to(self.device)
        self.lengths = [0] * self.num_rows

    def batch(self, chunks: list[tuple[int, list[int]]], pad: int = 0) -> Batch:
        """The next tokens of some rows as the engine would lay them out, and padded ones."""
        counts = [len(tokens) for _, tokens in chunks]
        rows = np.repeat([row for row, _ in chunks], counts)
        positions = np.concatenate(
            [
                np.arange(self.lengths[row], self.lengths[row] + n)
                for (row, _), n in zip(chunks, counts, strict=True)
            ]
        )
        blocks = self.tables.cpu().numpy()[rows, positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        for row, tokens in chunks:
            self.lengths[row] += len(tokens)
        contexts = [self.lengths[row] for row, _ in chunks]
        spare = self.kv.num_blocks * self.block_size

        def i32(values: object, padding: int | None = None) -> Tensor:
            array = np.asarray(values, dtype=np.int32)
            if padding is not None:
                array = np.pad(array, (0, pad), constant_values=padding)
            return torch.from_numpy(array).to(self.device)

        meta = AttentionMeta(
            positions=i32(positions, 0),
            slot_mapping=i32(slots, spare),
            seq_rows=i32([row for row, _ in chunks]),
            cu_seqlens_q=i32(np.cumsum([0, *counts])),
            context_lens=i32(contexts),
            block_tables=self.tables,
            max_seqlen_q=max(counts),
            max_seqlen_k=max(contexts),
            decode=max(counts) == 1,
        )
        every = i32(np.arange(len(positions)))
        return Batch(
            input_ids=i32([token for _, tokens in chunks for token in tokens], 0),
            src_rows=i32(np.full(len(positions), -1), -1),
            attention=meta,
            logits_rows=every,
            sample_logits=every,
            sample_rows=every,
            sample_positions=every,
            prompt_rows=every[:0],
            prompt_targets=every[:0],
        )

    @torch.inference_mode()
    def run(
        self, chunks: list[tuple[int, list[int]]], pad: int = 0, *, from_device: bool = False
    ) -> list[Tensor]:
        """Logits at every position of each chunk: ``[len(tokens), vocab_size]`` each.

        ``from_device`` hides the (single) token of each row from the host and puts it where the
        sampler would have left it.
        """
        assert self.ops is not None
        batch = self.batch(chunks, pad)
        last_token = torch.zeros(self.num_rows + 1, dtype=torch.int32, device=self.device)
        if from_device:
            rows = batch.attention.seq_rows
            last_token[rows.long()] = batch.input_ids
            batch = replace(batch, input_ids=torch.zeros_like(batch.input_ids), src_rows=rows)
        hidden, self.kv = forward(
            self.cfg, TP(), self.weights, self.kv, batch, last_token, self.ops
        )
        out = logits(self.cfg, TP(), self.weights, hidden, batch.logits_rows, self.ops)
        return list(out.split([len(tokens) for _, tokens in chunks]))


def driver_of(model: Any, form: str, **options: Any) -> Driver:
    """A driver over weights as they are loaded, or as a backend lays them out."""
    cfg, weights = config_of(model), weights_of(model)
    if form == "dense":
        return Driver(cfg=cfg, weights=weights, **options)
    ops = make_ops(form, cfg, "cpu")
    assert ops.lay_out is not None
    weights = ops.lay_out(weights, layer_shape(cfg, TP()))
    assert isinstance(weights, WholeWeights)
    return Driver(cfg=cfg, weights=weights, ops=ops, **options)


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """transformers' logits at every position, float32 ``[len(tokens), vocab_size]``."""
    ids = torch.tensor([tokens], device=model.device)
    return model(input_ids=ids).logits[0].float()


def prompt(length: int, seed: int = 0, vocab_size: int = 131) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest relative L2 error over positions."""
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
