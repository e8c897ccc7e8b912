"""What a request changes about its logits before they are sampled: bias, bans and penalties.

Requests that ask for it hold a *slot*; the others cost nothing. The tables are device state and
donated: a transition owns them until it returns them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """Per-slot state. The last slot belongs to nobody and changes no logits; see ``allocate``."""

    counts: Tensor  # i32[num_slots + 1, V], tokens the sequence generated
    in_prompt: Tensor  # bool[num_slots + 1, V], tokens its prompt holds
    bias: Tensor  # f32[num_slots + 1, V]
    stops: Tensor  # bool[num_slots + 1, V], tokens banned before min_position
    min_position: Tensor  # i32[num_slots + 1], prompt length + min_tokens
    repetition: Tensor  # f32[num_slots + 1], 1 is off
    presence: Tensor  # f32[num_slots + 1]
    frequency: Tensor  # f32[num_slots + 1]

    @property
    def num_slots(self) -> int:
        """Slots that requests can hold."""
        return self.counts.shape[0] - 1


def allocate(num_slots: int, vocab_size: int, *, device: torch.device) -> LogitEdits:
    """Tables for ``num_slots`` requests, and a spare slot (index ``num_slots``) for padded rows.

    10 bytes a slot and vocabulary id. ``vocab_size`` is the shard's own.
    """
    shape = (num_slots + 1, vocab_size)
    return LogitEdits(
        counts=torch.zeros(shape, dtype=torch.int32, device=device),
        in_prompt=torch.zeros(shape, dtype=torch.bool, device=device),
        bias=torch.zeros(shape, dtype=torch.float32, device=device),
        stops=torch.zeros(shape, dtype=torch.bool, device=device),
        min_position=torch.zeros(num_slots + 1, dtype=torch.int32, device=device),
        repetition=torch.ones(num_slots + 1, dtype=torch.float32, device=device),
        presence=torch.zeros(num_slots + 1, dtype=torch.float32, device=device),
        frequency=torch.zeros(num_slots + 1, dtype=torch.float32, device=device),
    )


def fill(
    edits: LogitEdits,
    slot: int,
    *,
    prompt: Tensor,
    generated: Tensor,
    bias: Mapping[int, float],
    stops: Iterable[int],
    min_position: int,
    repetition: float,
    presence: float,
    frequency: float,
    vocab_offset: int = 0,
) -> LogitEdits:
    """Give ``slot`` to a request; whatever it held before is gone. Donates ``edits``.

    ``prompt`` and ``generated`` are i64 token ids on the host, where they are selected: that would
    make the host wait on the device. ``generated`` is not empty when a sequence was preempted,
    forked or restored.
    """
    vocab = edits.counts.shape[-1]
    device = edits.counts.device

    def local(ids: Tensor) -> Tensor:
        ids = ids - vocab_offset
        return _sent(ids[(ids >= 0) & (ids < vocab)], device)

    for table in (edits.counts, edits.in_prompt, edits.bias, edits.stops):
        table[slot].zero_()
    edits.in_prompt[slot].index_fill_(0, local(prompt), True)
    produced = local(generated)
    edits.counts[slot].index_add_(0, produced, torch.ones_like(produced, dtype=torch.int32))
    edits.stops[slot].index_fill_(0, local(torch.tensor(list(stops), dtype=torch.int64)), True)
    held = {k - vocab_offset: v for k, v in bias.items() if 0 <= k - vocab_offset < vocab}
    biased = _sent(torch.tensor(list(held), dtype=torch.int64), device)
    values = _sent(torch.tensor(list(held.values()), dtype=torch.float32), device)
    edits.bias[slot].index_copy_(0, biased, values)
    for field, number in (
        (edits.min_position, min_position),
        (edits.repetition, repetition),
        (edits.presence, presence),
        (edits.frequency, frequency),
    ):
        field[slot].fill_(number)  # an assignment would wait for the device
    return edits


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """``values`` on ``device``, without waiting for what runs there."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def count(edits: LogitEdits, slots: Tensor, tokens: Tensor, *, vocab_offset: int = 0) -> LogitEdits:
    """Count sampled tokens (i32[E]) of sequences in ``slots`` (i32[E]). Donates ``edits``.

    Tokens outside this vocabulary shard, and those of the spare slot, count nothing.
    """
    vocab = edits.counts.shape[-1]
    local = tokens - vocab_offset
    ours = (local >= 0) & (local < vocab) & (slots < edits.num_slots)
    edits.counts.index_put_(
        (slots.to(torch.int64), local.clamp(0, vocab - 1).to(torch.int64)),
        ours.to(torch.int32),
        accumulate=True,
    )
    return edits


def apply(logits: Tensor, positions: Tensor, slots: Tensor, edits: LogitEdits) -> Tensor:
    """Edited logits f32[E, V] of sampling rows in ``slots`` (i32[E]), at ``positions`` (i32[E]).

    In this order: tokens that would stop before min_position are banned, the bias is added, a
    token the sequence holds (prompt included) has its logit divided (when positive) or multiplied
    by the repetition penalty, and a generated one loses frequency * count + presence.
    """
    logits = logits.float()
    early = (positions < edits.min_position[slots]).unsqueeze(-1)
    logits = torch.where(early & edits.stops[slots], -torch.inf, logits) + edits.bias[slots]
    counts = edits.counts[slots]
    seen = (counts > 0) | edits.in_prompt[slots]
    factor = edits.repetition[slots].unsqueeze(-1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(seen, repeated, logits)
    penalty = edits.frequency[slots].unsqueeze(-1) * counts
    return logits - penalty - edits.presence[slots].unsqueeze(-1) * (counts > 0)


def edit(
    logits: Tensor,
    sample_logits: Tensor,
    positions: Tensor,
    *,
    samples: Tensor,
    slots: Tensor,
    edits: LogitEdits,
) -> tuple[Tensor, Tensor]:
    """Give sampling rows ``samples`` (i32[E]) their own logits, edited by ``slots`` (i32[E]).

    Returns:
        Logits f32[L + E, V] and which of them each sampling row reads, i32[M].
    """
    chosen = sample_logits.index_select(0, samples)
    edited = apply(logits.index_select(0, chosen), positions.index_select(0, samples), slots, edits)
    own = torch.arange(samples.shape[0], dtype=torch.int32, device=logits.device) + logits.shape[0]
    return torch.cat((logits.float(), edited)), sample_logits.index_copy(0, samples.long(), own)


def allow(logits: Tensor, allowed: Tensor) -> Tensor:
    """Logits f32[M, V] with only the ``allowed`` (bool[M, V]) tokens left, for grammars."""
    return torch.where(allowed, logits.float(), -torch.inf)
