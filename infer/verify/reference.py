"""transformers' own model of the same tensors, and what it says along the paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from infer.config import ModelConfig
from infer.errors import CheckpointError
from infer.model import Model
from infer.verify.paths import GENERATED, Path
from infer.weights import abstract


def transformers_model(model: Model, dtype: torch.dtype, *, from_folder: bool) -> Any:
    """The model in transformers, on the same device.

    Args:
        from_folder: let transformers read the checkpoint itself; else give it ``model``'s tensors,
            under the names that ``infer.weights.abstract`` has for them.

    Raises:
        CheckpointError: transformers cannot read the folder.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
    if from_folder:
        try:
            with _quiet():
                made = AutoModelForCausalLM.from_pretrained(
                    model.path, local_files_only=True, trust_remote_code=False, **options
                )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"transformers cannot load {model.path}: {error}") from error
    else:
        made = AutoModelForCausalLM.from_config(hf_config(model.config), **options)
        missing, unexpected = made.load_state_dict(state_dict(model), strict=False)
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        assert not unexpected and set(missing) <= tied, (missing, unexpected)
    return made.to(model.device, dtype).eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def state_dict(model: Model) -> dict[str, Tensor]:
    """Checkpoint tensors by name, cut out of the fused tree of a model on one rank."""
    assert model.tp.size == 1, "a shard is not the model"
    out: dict[str, Tensor] = {}
    for path, param in abstract(model.config, dtype=model.dtype).items():
        head, _, name = path.rpartition(".")
        holder = model.weights.layers[int(head.split(".")[1])] if head else model.weights
        tensor: Tensor = getattr(holder, name)
        out |= {piece.hf_name: tensor[slice(*piece.rows)] for piece in param.pieces}
    return out


def hf_config(cfg: ModelConfig) -> Any:
    """``cfg`` as transformers' configuration of that architecture."""
    from transformers import AutoConfig

    rope = {"rope_type": cfg.rope.kind, "rope_theta": cfg.rope.theta, **_stretch(cfg)}
    fields: dict[str, Any] = {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "rms_norm_eps": cfg.rms_norm_eps,
        "max_position_embeddings": cfg.max_position_embeddings,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "rope_parameters": rope,
    }
    if cfg.architecture in ("llama", "qwen3"):
        fields["attention_bias"] = cfg.o_bias
    if cfg.architecture == "llama":
        fields["mlp_bias"] = cfg.mlp_bias
    if cfg.architecture == "mistral":
        fields["sliding_window"] = cfg.sliding_window
    elif cfg.sliding_window is not None:
        fields |= {"use_sliding_window": True, "max_window_layers": 0}
        fields["sliding_window"] = cfg.sliding_window
    return AutoConfig.for_model(cfg.architecture, **fields)


def _stretch(cfg: ModelConfig) -> dict[str, Any]:
    rope = cfg.rope
    if rope.kind == "default":
        return {}
    if rope.kind == "linear":
        return {"factor": rope.factor}
    both = {
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
    if rope.kind == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        return {**both, "low_freq_factor": low, "high_freq_factor": high}
    names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
    chosen = {name: getattr(rope, name) for name in names}
    return {**both, **{name: value for name, value in chosen.items() if value is not None}}


@torch.inference_mode()
def greedy_paths(hf: Any, prompts: Sequence[Sequence[int]]) -> list[Path]:
    """Each prompt with the tokens that transformers' ``generate`` puts behind it."""
    paths = []
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([list(prompt)], device=hf.device)
        out = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=GENERATED,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            temperature=None,
            top_p=None,
            top_k=None,
        )
        paths.append(Path(f"path{i}", tuple(out[0].tolist()), len(prompt)))
    return paths


@torch.inference_mode()
def path_logits(hf: Any, path: Path) -> Tensor:
    """f32 ``[num_positions, vocab_size]`` on the CPU, in one pass without a cache."""
    ids = torch.tensor([list(path.tokens[:-1])], device=hf.device)
    logits: Tensor = hf(input_ids=ids, use_cache=False).logits[0]
    return logits.float().cpu()
