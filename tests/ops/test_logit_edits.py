"""Penalties, bias and bans against transformers and against loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from infer.ops import logit_edits
from infer.ops.logit_edits import LogitEdits

VOCAB = 50
I32 = torch.int32


def request(**changes: Any) -> dict[str, Any]:
    return {
        "prompt": torch.tensor([1, 2, 2, 3]),
        "generated": torch.tensor([3, 7, 7, 7]),
        "bias": {},
        "stops": (),
        "min_position": 0,
        "repetition": 1.0,
        "presence": 0.0,
        "frequency": 0.0,
        **changes,
    }


def edits_of(*requests: dict[str, Any], vocab: int = VOCAB, offset: int = 0) -> LogitEdits:
    edits = logit_edits.allocate(len(requests), vocab, device=torch.device("cpu"))
    for slot, values in enumerate(requests):
        edits = logit_edits.fill(edits, slot, **values, vocab_offset=offset)
    return edits


def edited(edits: LogitEdits, logits: Tensor, position: int = 100) -> Tensor:
    rows = logits.shape[0]
    slots = torch.zeros(rows, dtype=I32)
    return logit_edits.apply(logits, torch.full((rows,), position, dtype=I32), slots, edits)


LOGITS = torch.randn(1, VOCAB, generator=torch.manual_seed(0)) * 3
KNOWN = torch.tensor([[1, 2, 2, 3, 3, 7, 7, 7]])


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 10.0])
def test_repetition_equals_transformers(penalty: float) -> None:
    expected = RepetitionPenaltyLogitsProcessor(penalty)(KNOWN, LOGITS.clone())
    assert torch.equal(edited(edits_of(request(repetition=penalty)), LOGITS), expected)


def test_bias_equals_transformers() -> None:
    bias = {4: 5.0, 7: -100.0, 49: 0.25}
    processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    expected = processor(KNOWN, LOGITS.clone())
    torch.testing.assert_close(edited(edits_of(request(bias=bias)), LOGITS), expected)


@pytest.mark.parametrize("num_generated", [0, 1, 2, 3, 4])
def test_min_tokens_equals_transformers(num_generated: int) -> None:
    known = torch.zeros(1, 4 + num_generated, dtype=torch.long)
    processor = MinNewTokensLengthLogitsProcessor(4, 3, [5, 6], device="cpu")
    expected = processor(known, LOGITS.clone())
    edits = edits_of(request(stops=[5, 6], min_position=4 + 3))
    # The sampled token's position is the number of tokens before it.
    assert torch.equal(edited(edits, LOGITS, position=4 + num_generated), expected)


def test_presence_and_frequency_look_at_generated_tokens_alone() -> None:
    got = edited(edits_of(request(presence=0.5, frequency=0.25)), LOGITS)
    expected = LOGITS.clone()
    expected[0, 3] -= 0.5 + 0.25
    expected[0, 7] -= 0.5 + 3 * 0.25
    torch.testing.assert_close(got, expected)


def test_all_edits_in_their_order() -> None:
    values = request(
        bias={2: 3.0, 7: -2.0},
        stops=[9, 7],
        min_position=200,
        repetition=1.5,
        presence=0.3,
        frequency=-0.1,
    )
    got = edited(edits_of(values), LOGITS)[0].tolist()
    for token in range(VOCAB):
        logit = LOGITS[0, token].item()
        if token in (9, 7):
            logit = -math.inf
        logit += values["bias"].get(token, 0.0)
        if token in (1, 2, 3, 7):
            logit = logit / 1.5 if logit > 0 else logit * 1.5
        count = {3: 1, 7: 3}.get(token, 0)
        logit -= -0.1 * count + 0.3 * (count > 0)
        assert got[token] == pytest.approx(logit, rel=1e-5), token


def test_counting_equals_a_new_start() -> None:
    """State that was updated token by token is the state of a recomputed sequence."""
    one = edits_of(request(generated=torch.tensor([], dtype=torch.long)), request())
    for token, other in ((3, 1), (7, 1), (7, 2), (7, 0)):
        one = logit_edits.count(
            one, torch.tensor([0, 1], dtype=I32), torch.tensor([token, other], dtype=I32)
        )
    again = edits_of(request(), request(generated=torch.tensor([3, 7, 7, 7, 1, 1, 2, 0])))
    assert torch.equal(one.counts, again.counts)


def test_a_slot_forgets_its_last_owner() -> None:
    edits = edits_of(
        request(
            bias={1: 5.0}, stops=[2], min_position=999, repetition=3.0, presence=1.0, frequency=1.0
        )
    )
    empty = torch.tensor([], dtype=torch.long)
    edits = logit_edits.fill(edits, 0, **request(prompt=empty, generated=empty))
    assert torch.equal(edited(edits, LOGITS), LOGITS)


def test_the_spare_slot_changes_nothing() -> None:
    edits = edits_of(request(repetition=2.0))
    spare = torch.full((3,), edits.num_slots, dtype=I32)
    edits = logit_edits.count(edits, spare, torch.tensor([1, 1, 5], dtype=I32))
    got = logit_edits.apply(LOGITS.expand(3, -1), torch.zeros(3, dtype=I32), spare, edits)
    assert torch.equal(got, LOGITS.expand(3, -1))


def test_shards_edit_their_part() -> None:
    values = request(bias={4: 5.0, 30: 1.0}, stops=[9, 40], min_position=999, repetition=1.5)
    whole = edits_of(values)
    slots, tokens = torch.zeros(2, dtype=I32), torch.tensor([3, 41], dtype=I32)
    whole = logit_edits.count(whole, slots, tokens)
    for start, stop in ((0, 20), (20, 50)):
        part = edits_of(values, vocab=stop - start, offset=start)
        part = logit_edits.count(part, slots, tokens, vocab_offset=start)
        got = edited(part, LOGITS[:, start:stop])
        assert torch.equal(got, edited(whole, LOGITS)[:, start:stop])


def test_only_rows_that_ask_get_logits_of_their_own() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.manual_seed(1))
    edits = edits_of(request(bias={0: 1.0}), request(bias={0: 2.0}))
    sources = torch.tensor([0, 1, 1, 2], dtype=I32)
    got, now = logit_edits.edit(
        logits,
        sources,
        torch.zeros(4, dtype=I32),
        samples=torch.tensor([1, 3], dtype=I32),
        slots=torch.tensor([1, 0], dtype=I32),
        edits=edits,
    )
    expected = logits[sources.long()].clone()
    expected[1, 0] += 2.0
    expected[3, 0] += 1.0
    assert torch.equal(got[now.long()], expected)
    assert torch.equal(got[:3], logits)
    assert sources.tolist() == [0, 1, 1, 2]


def test_allowed_tokens() -> None:
    allowed = torch.zeros(1, VOCAB, dtype=torch.bool)
    allowed[0, 11] = True
    assert logit_edits.allow(LOGITS, allowed).argmax().item() == 11
