"""The text of an offline answer, against transformers' decoding of the generated ids."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from infer.outputs import OutputBuilder
from infer.types import FinishEvent, FinishReason, Request, SamplingParams, TokenEvent
from tests.text.conftest import Pair

TEXT = "The quick brown fox.  It jumps\n over the (lazy)   dog's world "


def answer(pair: Pair, prompt: Sequence[int], ids: Sequence[int], *, whole: bool) -> str | None:
    params = SamplingParams(max_tokens=len(ids))
    request = Request(request_id="r", prompt_token_ids=tuple(prompt), params=params)
    builder = OutputBuilder(request, pair.ours, arrival=0.0)
    finish = FinishEvent(request_id="r", index=0, reason=FinishReason.LENGTH)
    if whole:
        builder.complete(finish, ids, when=1.0)
    else:
        for token_id in ids:
            builder.push(TokenEvent(request_id="r", index=0, token_id=token_id))
        builder.push(finish)
    return builder.result().text


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "by token"])
def test_text_is_what_transformers_decodes(pair: Pair, whole: bool) -> None:
    """Wherever the prompt ends: a sentencepiece decoder takes a first blank away, a byte-level one
    does not."""
    ids = pair.ours.encode(TEXT)
    starts = range(1, len(ids))
    assert any(pair.ours.token_bytes[ids[at]].startswith(b" ") for at in starts)
    for at in starts:
        expected = pair.theirs.decode(ids[at:], skip_special_tokens=True)
        assert answer(pair, ids[:at], ids[at:], whole=whole) == expected
