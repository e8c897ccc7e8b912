"""Scoring with log-probabilities: how likely does the model find each of several endings?

python examples/scoring.py [MODEL]
"""

from __future__ import annotations

import sys

import infer
from infer.types import PromptLogprobsEvent

BEGINNING = "The cat sat on the"
ENDINGS = (" mat.", " moon.", " parliament.")


def main(model_name: str | None) -> None:
    model = infer.load(model_name)
    assert model.tokenizer is not None
    beginning = model.tokenizer.encode(BEGINNING)
    state = infer.init(model)
    for ending in ENDINGS:
        ids = (*beginning, *model.tokenizer.encode(ending, add_special_tokens=False))
        request = infer.Request(
            request_id=ending,
            prompt_token_ids=ids,
            # Nothing needs to be generated; one token is the least a request can ask for.
            params=infer.SamplingParams(max_tokens=1, prompt_logprobs=0),
        )
        state = infer.submit(state, request)
    scores: dict[str, float] = {}
    while infer.has_work(state):
        state, report = infer.step(model, state)
        for event in report.events:
            if isinstance(event, PromptLogprobsEvent):
                # Entry i is about the token at position i + 1; the beginning is the same for all.
                own = [token.logprob for token, _ in event.logprobs[len(beginning) - 1 :]]
                scores[event.request_id] = sum(own)
    for ending in sorted(scores, key=lambda ending: -scores[ending]):
        print(f"{scores[ending]:9.4f}  {BEGINNING}{ending}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
