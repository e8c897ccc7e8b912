"""Decode steps divided among ranks: kernels and sums together against the plain decoder, float32.

The ranks are threads that take turns: a collective stops one until the others have said theirs.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from infer import device_step, kv, models
from infer import rows as row_state
from infer.batch import AttentionMeta, Batch
from infer.config import Limits, ModelConfig, RopeConfig
from infer.kv import KVCache
from infer.loading import load
from infer.model import Model
from infer.ops import sharded, triton_ranks
from infer.ops.backends import torch_ops, triton_ops
from infer.parallel import TP
from infer.weights import abstract, local_config

SIZE = 16  # of a block
VOCAB = 101
CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=VOCAB,
    hidden_size=96,
    intermediate_size=144,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    max_position_embeddings=128,
    tie_word_embeddings=True,
    o_bias=True,
    qk_norm=True,
)


def state_dict() -> dict[str, Tensor]:
    pieces = [piece for param in abstract(CONFIG).values() for piece in param.pieces]
    state = {}
    for i, piece in enumerate(pieces):
        x = torch.randn(piece.hf_shape, generator=torch.Generator().manual_seed(i))
        state[piece.hf_name] = x * x.shape[-1] ** -0.5 if x.dim() > 1 else 1 + 0.2 * x
    return state


def rank_model(device: torch.device, tp: TP) -> Model:
    return load(
        state_dict=state_dict(),
        config=CONFIG,
        tp=tp,
        device=device,
        dtype="float32",
        progress=False,
    )


def batch_of(lens: list[int], device: torch.device) -> Batch:
    """One new token for each sequence; sequence s has block s."""
    count = len(lens)

    def ints(values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    meta = AttentionMeta(
        positions=ints(n - 1 for n in lens),
        slot_mapping=ints(s * SIZE + n - 1 for s, n in enumerate(lens)),
        seq_rows=ints(range(count)),
        cu_seqlens_q=ints(range(count + 1)),
        context_lens=ints(lens),
        block_tables=ints(range(count)).view(count, 1),
        max_seqlen_q=1,
        max_seqlen_k=max(lens),
        decode=True,
    )
    return Batch(
        input_ids=ints((7 * s + 3) % VOCAB for s in range(count)),
        src_rows=ints([-1] * count),
        attention=meta,
        logits_rows=ints(range(count)),
        sample_logits=ints(range(count)),
        sample_rows=ints(range(count)),
        sample_positions=ints(lens),
        prompt_rows=ints(()),
        prompt_targets=ints(()),
    )


def cache(model: Model, count: int, device: torch.device) -> KVCache:
    """Random KV, of this rank's heads."""
    whole = kv.allocate(2, count, SIZE, 3, 32, dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(5)
    for page in (*whole.k, *whole.v):
        page.copy_(torch.randn(page.shape, generator=generator))
    local = local_config(CONFIG, model.tp).num_kv_heads
    first = model.tp.rank * local
    own = kv.allocate(2, count, SIZE, local, 32, dtype=torch.float32, device=device)
    for target, source in zip((*own.k, *own.v), (*whole.k, *whole.v), strict=True):
        held = source[:, :, first : first + local]
        target[:, :, : held.shape[2]] = held
    return own


def make_rows(model: Model, count: int, device: torch.device) -> row_state.RowState:
    limits = Limits(
        max_model_len=SIZE,
        max_num_seqs=count,
        max_num_batched_tokens=64,
        block_size=SIZE,
        num_blocks=count,
        prefix_caching=False,
        vocab_size=VOCAB,
    )
    rows = row_state.make(limits, local_config(CONFIG, model.tp).vocab_size, device)
    rows.sampling.temperature[1::2] = 1.0
    rows.sampling.seed[:, 0] = torch.arange(count + 1, dtype=torch.int32)
    return rows


class Turns:
    """Collectives of ranks in threads. One runs at a time: Triton's interpreter is one for all."""

    def __init__(self, size: int) -> None:
        self.baton = threading.Lock()
        self._all = threading.Barrier(size)
        self._said: list[list[Tensor]] = [[] for _ in range(size)]

    def gather(self, x: Tensor, tp: TP) -> Tensor:
        own = self._said[tp.rank]
        own.append(x.clone())
        self.baton.release()
        self._all.wait(100)
        self.baton.acquire()
        return torch.stack([said[len(own) - 1] for said in self._said])

    def sum(self, x: Tensor, tp: TP) -> Tensor:
        return self.gather(x, tp).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_decode_of_ranks(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, count: int, size: int
) -> None:
    lens = [1 + 5 * s % 15 for s in range(count)]
    batch = batch_of(lens, device)
    alone = rank_model(device, TP())
    with torch.inference_mode():
        ops, rows = torch_ops(CONFIG, device), make_rows(alone, count, device)
        hidden, _ = device_step.forward(alone, ops, cache(alone, count, device), rows, batch)
        scores = device_step.logits(alone, ops, hidden, batch.logits_rows)
        expected, _ = device_step.pick(alone, scores, rows, batch, device_step.PLAIN)

    turns = Turns(size)
    monkeypatch.setattr(triton_ranks, "all_reduce", turns.sum)
    monkeypatch.setattr(models.decoder, "all_reduce", turns.sum)
    monkeypatch.setattr(sharded, "all_gather", turns.gather)
    ranks = [rank_model(device, TP(rank, size)) for rank in range(size)]
    ours = triton_ops(CONFIG, device)

    def through(model: Model) -> tuple[Any, Any]:
        with turns.baton, torch.inference_mode():
            rows = make_rows(model, count, device)
            place = torch.full((count,), rows.last_token.shape[0] - 1, dtype=torch.int32)
            changed = {"places": place.to(device), "words": torch.zeros_like(place).to(device)}
            results, _ = device_step.decode(
                model, ours, cache(model, count, device), rows, batch, changed, sampling=True
            )
            _, own = device_step.decode(
                model, ours, cache(model, count, device), rows, batch, changed, sampling=False
            )
        assert results is not None
        assert torch.equal(rows.last_token[batch.sample_rows.long()], results[0])
        return results, own

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(through, ranks))
    for (tokens, broken), _ in found:
        assert torch.equal(tokens, expected.tokens)
        assert not broken.any()
    logits = torch.cat([own for _, own in found], dim=-1)[:, :VOCAB]
    assert torch.allclose(logits, scores, atol=2e-4)
