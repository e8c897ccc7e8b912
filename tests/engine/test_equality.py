"""Token-equal in float32, however the work is cut: chunks, batches, pages, preemption, pipeline."""

from __future__ import annotations

import numpy as np
import pytest

import infer
from infer import Request, SamplingParams, StateError
from infer.host import check
from tests.engine.models import Run, engine, expected, greedy, model, prompts, requests, run

MANY = prompts(7)


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, int], list[int]]:
    """Each prompt alone in an engine, whole, without a prefix cache."""
    out = {}
    for i, prompt in enumerate(MANY):
        alone = run([prompt], greedy(), max_num_batched_tokens=256, prefix_caching=False)
        out[f"r{i}", 0] = alone["r0", 0]
    return out


def test_plain_is_what_transformers_generates(plain: dict[tuple[str, int], list[int]]) -> None:
    for i, prompt in enumerate(MANY):
        assert plain[f"r{i}", 0] == expected(prompt, 12)


@pytest.mark.parametrize(
    ("ahead", "options"),
    [
        (0, {}),
        (1, {}),
        (1, {"max_num_batched_tokens": 8}),
        (0, {"max_num_batched_tokens": 33}),
        (0, {"max_num_batched_tokens": 512}),
        (1, {"max_num_seqs": 3}),
        (0, {"block_size": 256, "num_blocks": 10}),
        (0, {"block_size": 1, "num_blocks": 800}),
        (1, {"prefix_caching": False}),
        (0, {"max_model_len": 128, "num_blocks": 9}),  # preempts
        (1, {"max_model_len": 128, "num_blocks": 9}),
    ],
    ids=str,
)
def test_equal_however_it_is_cut(
    plain: dict[tuple[str, int], list[int]], ahead: int, options: dict[str, int]
) -> None:
    assert run(MANY, greedy(), ahead=ahead, **options) == plain


def test_a_tiny_pool_preempts_and_recomputes(plain: dict[tuple[str, int], list[int]]) -> None:
    state = infer.submit(engine(max_model_len=128, num_blocks=9), requests(MANY, greedy()))
    done = Run(state).finish()
    assert sum(f.num_preemptions for f in done.finishes.values()) > 0
    assert done.tokens == plain
    assert (done.state.host.pool.ref_count == 0).all()
    check(done.state.host)


def test_a_warm_prefix_gives_the_same_tokens(plain: dict[tuple[str, int], list[int]]) -> None:
    first = Run(infer.submit(engine(), requests(MANY, greedy()))).finish()
    again = Run(infer.submit(first.state, requests(MANY, greedy(), "s"))).finish()
    hits = [f.num_cached_tokens for f in again.finishes.values()]
    assert sum(hits) > 0
    assert all(hit % 16 == 0 for hit in hits)
    for i in range(len(MANY)):
        assert again.tokens[f"s{i}", 0] == plain[f"r{i}", 0]


SAMPLED = SamplingParams(
    temperature=0.9,
    top_k=20,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={5: 3.0},
    min_tokens=4,
    seed=11,
    max_tokens=14,
    n=2,
)


@pytest.mark.parametrize(
    ("ahead", "options"),
    [
        (0, {"max_num_batched_tokens": 9, "max_num_seqs": 4}),
        (1, {"max_model_len": 128, "num_blocks": 9}),
    ],
    ids=str,
)
def test_sampling_depends_on_the_request_alone(ahead: int, options: dict[str, int]) -> None:
    alone = {}
    for i, prompt in enumerate(MANY):
        for (_, choice), tokens in run([prompt], SAMPLED, max_num_batched_tokens=256).items():
            alone[f"r{i}", choice] = tokens
    assert run(MANY, SAMPLED, ahead=ahead, **options) == alone
    assert alone["r0", 0] != alone["r0", 1]


@pytest.mark.parametrize("kv", [True, False])
def test_a_restored_snapshot_goes_on_alike(kv: bool) -> None:
    going = Run(infer.submit(engine(), requests(MANY, SAMPLED)))
    for _ in range(6):
        going.step()
    before = {key: list(tokens) for key, tokens in going.tokens.items()}
    snap = infer.snapshot(going.state, kv=kv)
    going.finish()
    for _ in range(2):  # a snapshot can be restored again and again
        back = Run(infer.restore(model(), snap))
        back.tokens = {key: list(tokens) for key, tokens in before.items()}
        back.finish()
        assert back.tokens == going.tokens
        check(back.state.host)


def test_a_restored_snapshot_plans_the_same_step() -> None:
    going = Run(infer.submit(engine(), requests(MANY, greedy())))
    for _ in range(5):
        going.step()
    snap = infer.snapshot(going.state)
    _, here = infer.launch(model(), going.state)
    _, there = infer.launch(model(), infer.restore(model(), snap))
    assert list(here.plan) == list(there.plan)


def test_a_fork_goes_on_from_its_source() -> None:
    going = Run(infer.submit(engine(), requests(MANY[:1], greedy(max_tokens=20))))
    while len(going.tokens.get(("r0", 0), [])) < 5:
        going.step()
    going.state = infer.fork(going.state, "r0", "twin")
    going.finish()
    assert going.tokens["twin", 0] == going.tokens["r0", 0][5:]


def test_a_fork_inside_a_prompt_is_told_all_of_its_logprobs() -> None:
    prompt = tuple(range(1, 41))  # three chunks
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    state = infer.submit(engine(max_num_batched_tokens=16), requests([prompt], params))
    state, ticket = infer.launch(model(), state)
    with pytest.raises(StateError, match="collect it first"):  # a chunk's are on their way
        infer.fork(state, "r0", "twin")
    state, _ = infer.collect(model(), state, ticket)
    state = infer.fork(state, "r0", "twin")
    told = {}
    while infer.has_work(state):
        state, report = infer.step(model(), state)
        told |= {event.request_id: event.logprobs for event in report.prompt_logprobs}
    assert len(told["twin"]) == len(prompt) - 1
    assert told["twin"] == told["r0"]


def test_n_choices_share_the_prompts_blocks() -> None:
    prompt = tuple(range(1, 41))  # two full blocks and a partial one
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=6, ignore_eos=True)
    going = Run(infer.submit(engine(), requests([prompt], params)))
    going.step()
    pool = going.state.host.pool
    assert np.count_nonzero(pool.ref_count) == 3
    assert pool.ref_count.max() == 4
    going.step()  # each choice now has a last block of its own
    assert np.count_nonzero(going.state.host.pool.ref_count) == 2 + 4
    going.finish()
    assert len({tuple(tokens) for tokens in going.tokens.values()}) > 1


def test_aborts_leave_nothing_behind_and_harm_nobody(
    plain: dict[tuple[str, int], list[int]],
) -> None:
    for ahead in (0, 1):
        state = infer.submit(engine(max_num_seqs=4), requests(MANY, greedy()))
        going = Run(state)
        going.step()
        for name in ("r1", "r6", "nobody"):
            going.state = infer.abort(going.state, name)
        going.finish(ahead=ahead)
        assert {f.reason for f in going.finishes.values()} == {"abort", "length"}
        for i in (0, 2, 3, 4, 5):
            assert going.tokens[f"r{i}", 0] == plain[f"r{i}", 0]
        assert (going.state.host.pool.ref_count == 0).all()
        check(going.state.host)


def test_requests_may_arrive_at_any_step(plain: dict[tuple[str, int], list[int]]) -> None:
    going = Run(engine())
    for request in requests(MANY, greedy()):
        going.state = infer.submit(going.state, request)
        going.step()
    assert going.finish().tokens == plain


def test_priorities_run_first() -> None:
    state = engine(max_num_seqs=1)
    for name, priority in (("slow", 5), ("fast", -5)):
        state = infer.submit(
            state,
            Request(
                request_id=name, prompt_token_ids=(1, 2, 3), params=greedy(2), priority=priority
            ),
        )
    assert list(Run(state).finish().finishes) == [("fast", 0), ("slow", 0)]
