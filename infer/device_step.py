"""A step's work on the device: forward pass, logits, sampling. Pure apart from what is donated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from infer import models
from infer.batch import Batch, merge_ids
from infer.kv import KVCache
from infer.model import Model
from infer.models import decoder
from infer.ops import Ops, WholeWeights, logit_edits
from infer.ops.logprobs import Logprobs, logprobs, logprobs_in_slices
from infer.ops.sampling import Sampled, SampleFlags
from infer.ops.sharded import Shard, joined, sample_sharded, whole
from infer.rows import RowState, introduce
from infer.weights import local_config, vocab_range


@dataclass(frozen=True, slots=True)
class Extras:
    """What some sampling rows of a step ask for beside a token."""

    flags: SampleFlags
    edit_samples: Tensor | None = None  # i32[E], sampling rows that hold a penalty slot
    edit_slots: Tensor | None = None  # i32[E]
    top_n: int | None = None  # log-probabilities of the sampled tokens, and so many alternatives
    prompt_top_n: int | None = None  # of prompt positions
    most_top_k: int | None = None  # of rows that truncate, if each has a top-k


@dataclass(frozen=True, slots=True)
class DeviceValues:
    """A step's results, on the device."""

    tokens: Tensor  # i32[M]
    nan: Tensor  # bool[M]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


PLAIN = Extras(flags=SampleFlags())  # greedy and random rows, nothing truncated


def forward(
    model: Model, ops: Ops, kv: KVCache, rows: RowState, batch: Batch
) -> tuple[Tensor, KVCache]:
    """Hidden states ``[num_tokens, hidden_size]`` before the final norm. KV donated."""
    return models.forward(model.config, model.tp, model.weights, kv, batch, rows.last_token, ops)


def logits(model: Model, ops: Ops, hidden: Tensor, token_rows: Tensor) -> Tensor:
    """float32 ``[num_rows, vocab_size]`` of the chosen tokens, this rank's ids only."""
    return models.logits(model.config, model.tp, model.weights, hidden, token_rows, ops)


def vocab_shard(model: Model) -> Shard:
    """The part of the vocabulary this rank has."""
    held, local = vocab_range(model.config, model.tp), local_config(model.config, model.tp)
    return Shard(model.tp, held.start, len(held), local.vocab_size, model.config.vocab_size)


def decode(
    model: Model,
    ops: Ops,
    kv: KVCache,
    rows: RowState,
    batch: Batch,
    changed: Mapping[str, Tensor],
    *,
    sampling: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """A padded decode step without extras: its results (see ``results``), or without ``sampling``
    its logits. ``changed`` is for ``rows.introduce``. KV and rows donated.
    """
    fused, weights, tp = ops.fused_decode, model.weights, model.tp
    if fused is None:
        introduce(rows, changed)
        hidden, _ = forward(model, ops, kv, rows, batch)
        scores = logits(model, ops, hidden, batch.logits_rows)
        if not sampling:
            return None, scores
        return results(pick(model, scores, rows, batch, PLAIN)[0]), None
    shape = decoder.layer_shape(model.config, tp)
    if tp.size == 1:
        run = fused.start(weights, kv, rows, batch, changed, shape)
    else:
        introduce(rows, changed)
        hidden = decoder.embed(model.config, tp, weights, merge_ids(batch, rows.last_token))
        run = fused.start_embedded(weights, kv, hidden, batch.attention, shape)
    run = fused.layers(weights, kv, run, tp)
    if not sampling:
        return None, ops.linear(fused.normed(run), weights.lm_head, None).float()
    shard = vocab_shard(model)
    held = range(shard.start, shard.start + shard.size)
    scored = fused.score(weights, run, batch, rows, held)
    if tp.size == 1:
        return fused.finish(scored, batch, rows), None
    picked = joined(fused.sample(scored), shard)
    rows.last_token.index_copy_(0, batch.sample_rows.long(), picked.tokens)
    return results(picked), None


def results(values: DeviceValues | Sampled) -> Tensor:
    """Tokens, and whether a logit was NaN, i32[2, M]."""
    return torch.stack((values.tokens, values.nan.int()))


def pick(
    model: Model, scores: Tensor, rows: RowState, batch: Batch, extras: Extras
) -> tuple[DeviceValues, RowState]:
    """Sample every sampling row of ``scores`` and remember the tokens. Rows donated."""
    shard = vocab_shard(model)
    edited, sources = scores, batch.sample_logits
    if extras.edit_samples is not None and extras.edit_slots is not None:
        edited, sources = logit_edits.edit(
            scores,
            batch.sample_logits,
            batch.sample_positions,
            samples=extras.edit_samples,
            slots=extras.edit_slots,
            edits=rows.edits,
        )
    weights, positions, flags = model.weights, batch.sample_positions, extras.flags
    if isinstance(weights, WholeWeights):
        chosen = batch.sample_rows
        picked = weights.sample(edited, sources, positions, chosen, rows.sampling, flags)
    else:
        params = rows.sampling.select(batch.sample_rows)
        picked = sample_sharded(edited, sources, positions, params, flags, shard, extras.most_top_k)
    rows.last_token.index_copy_(0, batch.sample_rows.long(), picked.tokens)
    if extras.edit_samples is not None and extras.edit_slots is not None:
        tokens = picked.tokens.index_select(0, extras.edit_samples)
        edits = logit_edits.count(rows.edits, extras.edit_slots, tokens, vocab_offset=shard.start)
        rows = replace(rows, edits=edits)
    own = None
    if extras.top_n is not None:
        every = whole(scores, shard)
        own = logprobs(every, batch.sample_logits, picked.tokens, extras.top_n)
    return DeviceValues(picked.tokens, picked.nan, own), rows


def prompt_logprobs(model: Model, ops: Ops, hidden: Tensor, batch: Batch, top_n: int) -> Logprobs:
    """Log-probabilities of the prompt's own tokens at ``batch.prompt_rows``, in bounded memory."""

    shard = vocab_shard(model)

    def logits_of(start: int, end: int) -> Tensor:
        return whole(logits(model, ops, hidden, batch.prompt_rows[start:end]), shard)

    return logprobs_in_slices(logits_of, batch.prompt_targets, top_n)
