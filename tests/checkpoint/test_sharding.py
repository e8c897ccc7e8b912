"""Tensor-parallel shards: what the ranks compute together is what one device computes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from infer.config import ModelConfig, RopeConfig
from infer.errors import ConfigError
from infer.loading import load
from infer.model import Model
from infer.parallel import TP
from infer.weights import LayerWeights, abstract, local_config, vocab_range, weight_bytes
from tests.checkpoint.tiny import save, tiny_model

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "progress": False}
# (query heads, KV heads, ranks): split, replicated, padded with whole groups, a group padded
HEADS = [(4, 2, 2), (4, 2, 4), (9, 3, 2), (9, 3, 4), (9, 3, 6), (6, 2, 3), (8, 1, 4), (6, 2, 4)]


def config(heads: int, kv_heads: int, **changes: Any) -> ModelConfig:
    numbers: dict[str, Any] = {
        "architecture": "qwen3",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 50,
        "num_layers": 1,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(),
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "qk_norm": True,
    }
    return ModelConfig(**numbers | changes)


def shards(cfg: ModelConfig, size: int) -> list[Model]:
    state = {
        name: torch.randn(piece.hf_shape, generator=torch.Generator().manual_seed(i))
        for i, (name, piece) in enumerate(
            (piece.hf_name, piece) for param in abstract(cfg).values() for piece in param.pieces
        )
    }
    return [
        load(state_dict=state, config=cfg, tp=TP(rank=rank, size=size), **CPU)
        for rank in range(size)
    ]


def attention(w: LayerWeights, cfg: ModelConfig, x: Tensor) -> Tensor:
    """Plain causal attention with q/k norms and without RoPE: [tokens, hidden]."""
    q, k, v = F.linear(x, w.qkv, w.qkv_bias).split([cfg.q_size, cfg.kv_size, cfg.kv_size], dim=-1)
    assert w.q_norm is not None
    assert w.k_norm is not None
    q = F.rms_norm(q.unflatten(-1, (-1, cfg.head_dim)), (cfg.head_dim,), w.q_norm)
    k = F.rms_norm(k.unflatten(-1, (-1, cfg.head_dim)), (cfg.head_dim,), w.k_norm)
    v = v.unflatten(-1, (-1, cfg.head_dim))
    group = cfg.num_heads // cfg.num_kv_heads
    heads = [
        F.scaled_dot_product_attention(q[:, h], k[:, h // group], v[:, h // group], is_causal=True)
        for h in range(cfg.num_heads)
    ]
    return F.linear(torch.cat(heads, dim=-1), w.o, w.o_bias)


def mlp(w: LayerWeights, cfg: ModelConfig, x: Tensor) -> Tensor:
    gate, up = F.linear(x, w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w.down, w.down_bias)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
def test_ranks_together_compute_what_one_device_does(heads: int, kv_heads: int, size: int) -> None:
    cfg = config(heads, kv_heads)
    (whole,) = shards(cfg, 1)
    parts = shards(cfg, size)
    x = torch.randn(5, cfg.hidden_size, generator=torch.Generator().manual_seed(9))
    for layer in (attention, mlp):
        expected = layer(whole.weights.layers[0], cfg, x)
        total = sum(layer(part.weights.layers[0], local_config(cfg, part.tp), x) for part in parts)
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_vocabulary_shards_cover_it_once(size: int) -> None:
    cfg = config(4, 2, vocab_size=97)
    parts = shards(cfg, size)
    (whole,) = shards(cfg, 1)
    ids = [i for part in parts for i in vocab_range(cfg, part.tp)]
    assert ids == list(range(97))
    for part in parts:
        held = vocab_range(cfg, part.tp)
        rows = part.weights.embed
        assert rows.shape[0] == local_config(cfg, part.tp).vocab_size == -(-97 // size)
        assert torch.equal(rows[: len(held)], whole.weights.embed[list(held)])
        assert not rows[len(held) :].any()


def test_more_ranks_than_vocabulary_shares_leaves_an_empty_one() -> None:
    cfg = config(4, 2, vocab_size=5)
    assert [len(vocab_range(cfg, TP(rank=r, size=4))) for r in range(4)] == [2, 2, 1, 0]
    assert not shards(cfg, 4)[3].weights.embed.any()


def test_one_rank_is_the_identity() -> None:
    for heads, kv_heads, _ in HEADS:
        cfg = config(heads, kv_heads)
        assert local_config(cfg, TP()) == cfg
        assert vocab_range(cfg, TP()) == range(97)


def test_qwen3_at_two_ranks_has_the_known_shapes() -> None:
    """8 query and 4 KV heads, QKV width 2,048, 75,968 vocabulary rows, 56 KiB of KV a token."""
    cfg = config(
        16,
        8,
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        head_dim=128,
        num_layers=28,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
    )
    tp = TP(rank=1, size=2)
    local = local_config(cfg, tp)
    assert (local.num_heads, local.num_kv_heads) == (8, 4)
    assert local.kv_bytes_per_token("bfloat16") == 56 * 1024
    params = abstract(cfg, tp)
    assert params["layers.0.qkv"].shape == (2048, 1024)
    assert params["embed"].shape == (75968, 1024)
    assert params["layers.0.gate_up"].shape == (3072, 1024)
    assert params["layers.0.down"].shape == (1024, 1536)
    norms = 2 * (28 * (2 * 1024 + 2 * 128) + 1024)  # replicated; all else is halved
    assert weight_bytes(cfg, torch.bfloat16, tp) == (
        (weight_bytes(cfg, torch.bfloat16) - norms) // 2 + norms
    )


def test_smollm2_groups_are_padded() -> None:
    cfg = config(9, 3, head_dim=64, hidden_size=576, intermediate_size=1536, vocab_size=49152)
    for size, expected in ((2, (6, 2)), (3, (3, 1)), (4, (3, 1))):
        local = local_config(cfg, TP(size=size))
        assert (local.num_heads, local.num_kv_heads) == expected
    last = shards(config(9, 3), 4)[3].weights.layers[0]
    assert not last.qkv.any()
    assert not last.o.any()


def test_every_rank_has_the_same_numbers() -> None:
    for heads, kv_heads, size in HEADS:
        cfg = config(heads, kv_heads)
        assert len({local_config(cfg, TP(rank=r, size=size)) for r in range(size)}) == 1


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp is 5.*attention heads \(4\)"):
        local_config(config(4, 2), TP(size=5))


def test_a_rank_asks_only_for_its_slices() -> None:
    """Over all ranks each row of a sharded tensor is read once, and replicas read it once each."""
    cfg = config(4, 2)
    for path, times in (("layers.0.down", 1), ("embed", 1), ("layers.0.input_norm", 4)):
        pieces = [abstract(cfg, TP(rank=r, size=4))[path].pieces[0] for r in range(4)]
        asked = sorted(
            index for p in pieces for s in p.spans for index in range(s.src, s.src + s.length)
        )
        assert asked == sorted(list(range(pieces[0].hf_shape[pieces[0].dim])) * times)


def test_shards_of_a_folder_are_slices_of_its_tensors(tmp_path: Path) -> None:
    hf = tiny_model("llama")
    save(hf, tmp_path, "20KB")
    state = hf.state_dict()
    for rank in range(2):
        w = load(tmp_path, tp=TP(rank=rank, size=2), **CPU).weights.layers[1]
        half = slice(16 * rank, 16 * rank + 16)  # two of four heads of eight columns
        at = "model.layers.1.self_attn"
        assert torch.equal(w.qkv[:16], state[f"{at}.q_proj.weight"][half])
        assert torch.equal(w.qkv[16:24], state[f"{at}.k_proj.weight"][8 * rank : 8 * rank + 8])
        assert torch.equal(w.o, state[f"{at}.o_proj.weight"][:, half])


def test_random_shards_belong_to_one_model() -> None:
    cfg = config(4, 2)
    (whole,) = (load(config=cfg, load_format="random", **CPU),)
    for rank in range(2):
        tp = TP(rank=rank, size=2)
        part = load(config=cfg, load_format="random", tp=tp, **CPU)
        down = whole.weights.layers[0].down
        assert local_config(cfg, tp).intermediate_size == 25
        assert torch.equal(part.weights.layers[0].down, down[:, 25 * rank : 25 * rank + 25])
