"""Several prompts at once: submit them all, step until nothing is left, read what finished.

python examples/batch.py [MODEL]
"""

from __future__ import annotations

import sys

import infer

PROMPTS = ("The capital of France is", "Water boils at", "A state is a value, so")


def main(model_name: str | None) -> None:
    model = infer.load(model_name)
    assert model.tokenizer is not None
    params = infer.SamplingParams(temperature=0, max_tokens=12)
    state = infer.init(model, infer.EngineConfig(max_num_seqs=4))
    state = infer.submit(
        state,
        [
            infer.Request(
                request_id=prompt,
                prompt_token_ids=tuple(model.tokenizer.encode(prompt)),
                params=params,
            )
            for prompt in PROMPTS
        ],
    )
    while infer.has_work(state):
        state, report = infer.step(model, state)
        plan = report.plan
        print(f"step {report.step}: {plan.num_tokens} positions of {plan.num_sequences} sequences")
        # A report pairs every finished sequence with the tokens it generated.
        for finish, tokens in zip(report.accepted.finished, report.accepted.outputs, strict=True):
            text = model.tokenizer.decode(tokens.tolist())
            print(f"{finish.request_id!r} ({finish.reason}): {text!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
