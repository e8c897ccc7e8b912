"""Time travel: keep a state, go on, come back to it, and take the same or another way.

python examples/time_travel.py [MODEL]
"""

from __future__ import annotations

import sys

import infer
from infer.model import Model
from infer.state import EngineState

PROMPT = "In the beginning"


def finish(model: Model, state: EngineState) -> dict[str, list[int]]:
    """Run to the end; each request's tokens."""
    tokens: dict[str, list[int]] = {}
    while infer.has_work(state):
        state, report = infer.step(model, state)
        for end, ids in zip(report.accepted.finished, report.accepted.outputs, strict=True):
            tokens[end.request_id] = ids.tolist()
    return tokens


def main(model_name: str | None) -> None:
    model = infer.load(model_name)
    assert model.tokenizer is not None
    request = infer.Request(
        request_id="story",
        prompt_token_ids=tuple(model.tokenizer.encode(PROMPT)),
        params=infer.SamplingParams(temperature=0.8, seed=7, max_tokens=16, ignore_eos=True),
    )
    state = infer.submit(infer.init(model, infer.EngineConfig(num_blocks=64)), request)
    for _ in range(5):
        state, _ = infer.step(model, state)

    moment = infer.snapshot(state)  # host values and the KV that means something
    first = finish(model, state)
    again = finish(model, infer.restore(model, moment))
    print("the same way again:", again == first)

    # Back once more; this time somebody else joins.
    other = infer.restore(model, moment)
    twin = infer.fork(other, "story", "another story")
    both = finish(model, twin)
    print("the story is the same beside another:", both["story"] == first["story"])
    for name, ids in both.items():
        print(f"{name}: {model.tokenizer.decode(ids)!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
