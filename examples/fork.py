"""Parallel sampling by forks: branches share the KV blocks of what they have in common.

python examples/fork.py [MODEL]
"""

from __future__ import annotations

import sys

import infer

PROMPT = "Once upon a time there was a small engine that wanted to know"
BRANCHES = 3


def main(model_name: str | None) -> None:
    model = infer.load(model_name)
    assert model.tokenizer is not None
    state = infer.init(model, infer.EngineConfig(max_num_seqs=BRANCHES + 1, block_size=8))
    request = infer.Request(
        request_id="trunk",
        prompt_token_ids=tuple(model.tokenizer.encode(PROMPT)),
        params=infer.SamplingParams(temperature=0.9, seed=3, max_tokens=16, ignore_eos=True),
    )
    state = infer.submit(state, request)
    for _ in range(4):  # the prompt, then three tokens more
        state, _ = infer.step(model, state)

    # A fork goes on from here with random numbers of its own.
    for i in range(BRANCHES):
        state = infer.fork(state, "trunk", f"branch {i}")
    held = int((state.host.pool.ref_count == BRANCHES + 1).sum())
    print(f"{held} blocks are held by all {BRANCHES + 1} sequences")

    while infer.has_work(state):
        state, report = infer.step(model, state)
        for finish, tokens in zip(report.accepted.finished, report.accepted.outputs, strict=True):
            print(f"{finish.request_id}: {model.tokenizer.decode(tokens.tolist())!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
