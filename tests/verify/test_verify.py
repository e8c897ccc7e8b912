"""``infer verify`` passes where nothing is wrong, and measures what it says it measures."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from infer.config import EngineConfig
from infer.initialize import init
from infer.model import Model
from infer.runtime import Runtime
from infer.state import EngineState
from infer.verify.compare import compare, joined
from infer.verify.context import Context, make_context
from infer.verify.paths import LENGTHS, Path, common_prefix
from infer.verify.reference import path_logits
from infer.verify.result import judged
from infer.verify.run import verify
from infer.verify.runs import observe
from tests.verify.subjects import CONFIGS, subject

QUICK = (
    *("transformers", "kv-cache", "chunked", "prefix", "batched"),
    *("preempted", "pipelined", "restored", "native", "torch", "bf16-native", "bf16-torch"),
)
ELSEWHERE = ("graphs", "triton", "bf16-triton", "bf16-flash_attn", "bf16-graphs")


@pytest.fixture(scope="module")
def context() -> Context:
    return make_context(subject(), tp=1, half=False)


def test_a_sound_engine_passes() -> None:
    outcome = verify(subject(), only=QUICK)
    assert [row.name for row in outcome.rows] == list(QUICK)
    assert outcome.passed, [(row.name, row.reasons) for row in outcome.failed]
    rows = {row.name: row for row in outcome.rows}
    assert rows["kv-cache"].counts == {"positions with": 71, "positions without": 540}
    shared = rows["prefix"].counts["cached of a shared beginning"]
    assert shared == 64, "of 70 shared tokens, four blocks of 16"
    assert rows["prefix"].counts["cached of itself"] == 96
    assert rows["preempted"].counts["preemptions"] >= 1
    assert rows["chunked"].counts["prefill steps"] > len(LENGTHS)
    for row in outcome.rows:
        assert row.errors is not None and row.tolerance is not None
        assert row.tokens is not None and row.tokens[1] > 0
        if row.name not in ("bf16-native", "bf16-torch"):
            assert row.errors.rel_l2 < row.tolerance / 20, "float32 is far inside its tolerance"


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "qwen3"])
def test_every_architecture(name: str) -> None:
    outcome = verify(subject(name), only=("transformers", "prefix", "preempted"))
    assert outcome.passed, [(row.name, row.reasons) for row in outcome.failed]


def test_what_cannot_run_says_why() -> None:
    outcome = verify(subject(), only=ELSEWHERE)
    assert {row.status for row in outcome.rows} == {"not run"}
    assert all(row.reasons for row in outcome.rows)
    assert not outcome.passed, "nothing ran, so nothing was shown"


@pytest.mark.slow
def test_two_ranks_and_the_compiled_layer() -> None:
    outcome = verify(subject(), only=("tp", "compiled"), tp=2)
    assert outcome.passed, [(row.name, row.reasons) for row in outcome.failed]
    assert {row.status for row in outcome.rows} == {"pass"}


def test_a_run_leaves_no_engine_behind(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines hold packed weights and KV: a dozen of them would not fit."""
    made: list[weakref.ref[Runtime]] = []

    def remembered(model: Model, config: EngineConfig) -> EngineState:
        state = init(model, config)
        made.append(weakref.ref(state.runtime))
        return state

    monkeypatch.setattr("infer.verify.runs.init", remembered)
    gc.disable()
    try:
        observe(context.model, context.config(), [context.paths])
        assert [ref() for ref in made] == [None]
    finally:
        gc.enable()


def test_a_path_is_followed_whatever_is_sampled(context: Context) -> None:
    """Random tokens after the prompt, which no model would choose, are fed all the same."""
    tokens = tuple(
        torch.randint(0, 211, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    )
    path = Path("odd", tokens, 40)
    run = observe(context.model, context.config(), [[path]])
    logits, at = run.of(path)
    assert at == list(range(59))
    hf = context.subject.reference(context.model, torch.float32)
    assert compare(logits, path_logits(hf, path)).rel_l2 < 1e-5
    assert [run.sampled["odd", p] for p in range(40, 60)] == logits[39:].argmax(dim=-1).tolist()
    assert [run.sampled["odd", p] for p in range(40, 60)] != list(tokens[40:])


def test_paths_are_those_of_transformers_and_share_a_beginning(context: Context) -> None:
    third, fourth = context.paths[2:]
    assert common_prefix(third.tokens, fourth.tokens) == 70
    assert [path.num_prompt for path in context.paths] == list(LENGTHS)
    for path in context.paths:
        best = context.reference[path.name].argmax(dim=-1).tolist()
        assert best[path.num_prompt - 1 :] == list(path.tokens[path.num_prompt :])


def test_short_models_get_shorter_paths() -> None:
    outcome = verify(subject(max_position_embeddings=64), only=("transformers", "prefix"))
    assert outcome.passed, [(row.name, row.reasons) for row in outcome.failed]


def test_errors_by_hand() -> None:
    want = torch.tensor([[3.0, 4.0, 0.0], [0.0, 1.0, 0.0]])
    got = torch.tensor([[3.0, 4.0, 0.5], [0.0, 1.0, 2.0]])
    errors = compare(got, want)
    assert errors.by_position == pytest.approx((0.1, 2.0))
    assert (errors.max_abs, errors.rel_l2) == (2.0, 2.0)
    assert errors.rms == pytest.approx(math.sqrt((0.01 + 4.0) / 2))
    assert (errors.agreed, errors.total) == (1, 2)
    twice = joined([errors, errors])
    assert (twice.agreed, twice.total) == (2, 4)
    assert twice.rms == pytest.approx(errors.rms)


def test_a_tie_is_no_larger_than_its_error() -> None:
    want = torch.tensor([[1.0, 1.0 - 1e-6]])
    assert compare(torch.tensor([[1.0 - 2e-6, 1.0 - 1e-6]]), want).ties == 1
    plain = torch.tensor([[1.0, 0.0]])
    assert compare(torch.tensor([[0.9, 0.95]]), plain).ties == 1, "0.95 apart allows a lead of 1"
    assert compare(torch.tensor([[0.6, 0.61]]), torch.tensor([[2.0, 0.6]])).ties == 1
    assert compare(torch.tensor([[float("nan"), 1.0]]), plain).rel_l2 == math.inf


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tolerance": 0.01}, "exceeds"),
        ({"tokens": (3, 4)}, "sampled tokens differ"),
        ({"expected": {"positions": 5}}, "it should be 5"),
        ({"at_least": {"preemptions": 1}}, "did not come into play"),
    ],
)
def test_verdicts(changes: dict[str, object], reason: str) -> None:
    errors = compare(torch.tensor([[3.0, 4.0, 0.5]]), torch.tensor([[3.0, 4.0, 0.0]]))
    options = {"tolerance": 0.2, "counts": {"positions": 4}, "tokens": (4, 4)}
    assert judged("n", "t", errors, **options).status == "pass"  # type: ignore[arg-type]
    row = judged("n", "t", errors, **{**options, **changes})  # type: ignore[arg-type]
    assert row.status == "fail"
    assert reason in row.reasons[0]


def test_numbers_that_are_not_numbers_fail() -> None:
    bad = compare(torch.full((1, 3), float("nan")), torch.ones(1, 3))
    assert judged("n", "t", bad, tolerance=1e9).status == "fail"
