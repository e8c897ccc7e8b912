"""A scheduler policy of one's own: decide before every step how much of a prompt it may compute.

The limits are part of the state, so a policy is a function from a state to the next step's limits.
This one lets long prompts through in small pieces while somebody is waiting for tokens, and at full
speed when nobody is. It never changes what is generated, only when.

python examples/policy.py [MODEL]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import infer
from infer.config import Limits
from infer.model import Model
from infer.state import EngineState

Policy = Callable[[EngineState], Limits]


def greedy(state: EngineState) -> Limits:
    """The engine's own way: every step takes all it can."""
    return state.limits


def gentle(state: EngineState) -> Limits:
    """At most 16 positions a step while a sequence is generating."""
    seqs = state.host.seqs
    generating = (seqs.num_blocks > 0) & (seqs.num_tokens > seqs.num_prompt_tokens)
    if not generating.any():
        return state.limits
    return replace(state.limits, max_num_batched_tokens=16)


def run(model: Model, policy: Policy) -> tuple[list[int], dict[str, list[int]]]:
    """Positions of every step, and each request's tokens."""
    params = infer.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    state = infer.init(model, infer.EngineConfig(max_num_seqs=4, max_num_batched_tokens=256))
    limits = state.limits
    state = infer.submit(
        state, infer.Request(request_id="early", prompt_token_ids=tuple(range(1, 9)), params=params)
    )
    steps: list[int] = []
    tokens: dict[str, list[int]] = {}
    while infer.has_work(state):
        if len(steps) == 2:
            long = tuple(range(1, 121))
            late = infer.Request(request_id="late", prompt_token_ids=long, params=params)
            state = infer.submit(state, late)
        state = replace(state, limits=policy(replace(state, limits=limits)))
        state, report = infer.step(model, state)
        steps.append(report.plan.num_tokens)
        for finish, ids in zip(report.accepted.finished, report.accepted.outputs, strict=True):
            tokens[finish.request_id] = ids.tolist()
    return steps, tokens


def main(model_name: str | None) -> None:
    model = infer.load(model_name)
    fast, expected = run(model, greedy)
    smooth, tokens = run(model, gentle)
    print("greedy:", *fast)
    print("gentle:", *smooth)
    print("the same tokens:", tokens == expected)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
