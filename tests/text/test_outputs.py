"""The text of an offline answer, against transformers' decoding of the generated ids."""

from __future__ import annotations

import pytest

from infer.outputs import OutputBuilder
from infer.types import FinishEvent, FinishReason, Request, SamplingParams, TokenEvent
from tests.text.conftest import Pair

PROMPT = "The tokens of"
ANSWERS = [" the world", "  the world", "the world", " fox.", "\nworld of  tokens", ""]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "by token"])
def test_text_is_what_transformers_decodes(pair: Pair, answer: str, whole: bool) -> None:
    """Blanks before it too: a sentencepiece decoder takes one away, and a byte-level one none."""
    prompt = pair.ours.encode(PROMPT)
    ids = pair.ours.encode(PROMPT + answer)[len(prompt) :]
    assert pair.ours.encode(PROMPT + answer) == [*prompt, *ids]
    params = SamplingParams(max_tokens=max(len(ids), 1))
    request = Request(request_id="r", prompt_token_ids=tuple(prompt), params=params)
    builder = OutputBuilder(request, pair.ours, arrival=0.0)
    finish = FinishEvent(request_id="r", index=0, reason=FinishReason.LENGTH)
    if whole:
        builder.complete(finish, ids, when=1.0)
    else:
        for token_id in ids:
            builder.push(TokenEvent(request_id="r", index=0, token_id=token_id))
        builder.push(finish)
    assert builder.result().text == pair.theirs.decode(ids, skip_special_tokens=True)
