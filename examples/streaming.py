"""Tokens as they come: every step's report has one event for each new token.

python examples/streaming.py [MODEL]
"""

from __future__ import annotations

import sys

import infer
from infer.text import IncrementalDetokenizer
from infer.types import TokenEvent

MESSAGES = [{"role": "user", "content": "Write one sentence about the sea."}]


def main(model_name: str | None) -> None:
    model = infer.load(model_name)
    assert model.tokenizer is not None
    request = infer.Request(
        request_id="chat",
        prompt_token_ids=tuple(model.tokenizer.encode_chat(MESSAGES)),
        params=infer.SamplingParams(temperature=0.7, seed=1, max_tokens=40),
    )
    state = infer.submit(infer.init(model), request)
    # A character may be spread over several tokens: it is printed when it is whole.
    text = IncrementalDetokenizer(model.tokenizer)
    while infer.has_work(state):
        state, report = infer.step(model, state)
        ids = [event.token_id for event in report.events if isinstance(event, TokenEvent)]
        print(text.push(ids), end="", flush=True)
    print(text.flush())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
