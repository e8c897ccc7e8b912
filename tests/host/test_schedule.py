"""Who runs when: decodes first, prompts by rank, nobody starves, nobody is lost."""

from __future__ import annotations

import numpy as np
import pytest

from infer import host as hosts
from infer import sequences
from infer.admission import MAX_DEFERRED
from infer.commit import commit
from infer.errors import RequestError, StateError
from infer.plan import Plan
from infer.schedule import schedule
from infer.sequences import Status
from infer.types import FinishReason, Request, SamplingParams
from tests.host.simulation import EOS, TOKEN_BYTES, VOCAB, Simulation, answer, limits, request


def names(plan: Plan) -> list[str]:
    return [row.request_id for row in plan]


def table(sim: Simulation, name: str, choice: int = 0) -> list[int]:
    row = sim.host.seqs.rows_of[name][choice]
    return sequences.table(sim.host.seqs, row).tolist()


# --- decodes and prompts --------------------------------------------------------------------------


def test_arriving_prompts_do_not_hold_up_a_decode() -> None:
    """Five prompts of 300 tokens under a budget of 32: the running sequence moves every step."""
    sim = Simulation(limits(max_model_len=320, num_blocks=500, max_num_batched_tokens=32))
    sim.submit(request("running", [1, 2, 3], max_tokens=60))
    sim.turn()
    sim.submit(*(request(f"p{i}", [i, *range(90)] * 3, max_tokens=1) for i in range(5)))
    steps = 0
    while ("running", 0) not in sim.finished:
        plan = sim.turn()
        assert names(plan)[0] == "running"
        assert plan.num_tokens == 32 or steps > 40, "the prompts get all the rest"
        steps += 1
    assert steps == 59
    sim.run()


def test_the_budget_is_shared_by_several_chunks() -> None:
    sim = Simulation(limits(max_num_batched_tokens=12))
    sim.submit(*(request(n, [i] * 7) for i, n in enumerate("abc")))
    assert [(r.request_id, r.num_scheduled) for r in sim.turn()] == [("a", 7), ("b", 5)]
    plan = sim.turn()
    assert [(r.request_id, r.num_scheduled) for r in plan] == [("a", 1), ("b", 2), ("c", 7)]
    sim.run()


def test_a_last_prompt_position_goes_with_the_decodes() -> None:
    """It has one position and comes from the prompt, not from the sampler."""
    sim = Simulation(limits(max_num_batched_tokens=8))
    sim.submit(request("a", range(9)))
    sim.turn()
    plan, batch = sim.turn(), sim.batches[-1]
    assert plan.num_decode == 1
    assert (batch.src_rows.tolist(), batch.input_ids.tolist()) == ([-1], [8])
    batch = (sim.turn(), sim.batches[-1])[1]
    assert batch.src_rows.tolist() == [0], "this one was sampled"
    sim.run()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16])
@pytest.mark.parametrize("depth", [0, 1])
def test_block_boundaries(length: int, depth: int) -> None:
    """A sequence holds exactly the blocks that its computed positions fill."""
    sim = Simulation(limits(max_num_batched_tokens=64), depth)
    sim.submit(request("a", [1] * length, max_tokens=13))
    while hosts.has_work(sim.host):
        sim.turn()
        s = sim.host.seqs
        for row in np.flatnonzero(s.status == Status.RUNNING).tolist():
            assert s.num_blocks[row] == -(-s.num_cached_tokens[row] // 4)
    sim.check_end()


def test_no_step_is_spent_on_a_sequence_that_must_end_by_length() -> None:
    sim = Simulation(limits(), depth=1)
    sim.submit(request("a", [1, 2, 3], max_tokens=4))
    sim.run()
    assert [p.num_tokens for p in sim.plans if p.num_sequences] == [3, 1, 1, 1]


# --- order ----------------------------------------------------------------------------------------


def served(sim: Simulation) -> list[str]:
    """Request ids in the order of their admission."""
    return [name for plan in sim.plans for name in plan.admitted]


def test_priority_then_arrival() -> None:
    sim = Simulation(limits(max_num_seqs=1))
    sim.submit(
        request("low", [1], 1, priority=1),
        request("first", [2], 1),
        request("second", [3], 1),
        request("high", [4], 1, priority=-1),
    )
    sim.run()
    assert served(sim) == ["high", "first", "second", "low"]


def test_waiting_ages() -> None:
    """A request of lower priority is passed by at most ``priority_span`` later ones."""
    sim = Simulation(limits(max_num_seqs=1, priority_span=10))
    sim.submit(request("low", [1], 1, priority=1))
    for i in range(40):
        sim.submit(request(f"r{i}", [2], 1))
        sim.turn()
        if ("low", 0) in sim.finished:
            break
    assert served(sim).index("low") == 10
    sim.run()


def test_nothing_overtakes_what_does_not_fit() -> None:
    """A large prompt at the head is not starved by small ones behind it."""
    sim = Simulation(limits(num_blocks=16, max_model_len=60, max_num_batched_tokens=64))
    sim.submit(request("running", [1] * 20, max_tokens=12))
    sim.turn()
    sim.submit(request("large", [2] * 50, max_tokens=2))
    for i in range(20):
        sim.submit(request(f"small{i}", [i] * 3, max_tokens=3))
        sim.turn()
    sim.run()
    assert served(sim)[:2] == ["running", "large"]


def test_a_request_without_rows_lets_what_holds_them_go_on() -> None:
    """A better-ranked n=2 waits for two rows; half computed and preempted ones must not wait."""
    sim = Simulation(limits(max_num_seqs=2, max_num_batched_tokens=4))
    sim.submit(request("long", range(40), max_tokens=3, priority=1))
    sim.turn()
    sim.submit(request("pair", [1, 2], max_tokens=3, n=2))
    assert names(sim.turn()) == ["long"]
    sim.run(max_turns=60)


def test_waiting_duplicates_hide_no_more_than_a_window() -> None:
    sim = Simulation(limits(max_num_seqs=8, max_num_batched_tokens=64))
    same = [1] * 12
    sim.submit(*(request(f"d{i}", same, 1) for i in range(MAX_DEFERRED + 1)))
    sim.submit(request("other", [2] * 3, 1))
    assert names(sim.turn()) == ["d0"]
    sim.run()
    assert sim.finished["other", 0].reason == FinishReason.LENGTH


# --- preemption -----------------------------------------------------------------------------------


def preempted(sim: Simulation) -> list[str]:
    return [name for plan in sim.plans for name in plan.preempted]


def test_preemption_takes_the_lowest_priority_then_the_latest() -> None:
    sim = Simulation(limits(num_blocks=7, max_model_len=16, max_num_batched_tokens=64))
    sim.submit(
        request("low", [1] * 4, max_tokens=12, priority=1),
        request("old", [2] * 4, max_tokens=12),
        request("young", [3] * 4, max_tokens=12),
    )
    sim.run()
    assert preempted(sim)[:2] == ["low", "young"]
    assert "old" not in preempted(sim)


def test_collect_comes_before_preemption() -> None:
    """With a step in flight the pool may be about to get blocks back."""
    sim = Simulation(limits(num_blocks=4, max_model_len=8, max_num_batched_tokens=64), depth=1)
    sim.submit(request("a", [1] * 4, max_tokens=1), request("b", [2] * 4), request("c", [3] * 4))
    sim.launch()  # a's only token is on its way
    plan = sim.launch()  # b and c need a block each, one is free
    assert plan.stalled
    assert not plan.num_sequences and not plan.preempted
    sim.collect()
    assert names(sim.launch()) == ["b", "c"]
    while sim.tickets:
        sim.collect()
    sim.run()
    assert not preempted(sim)


def test_a_stall_does_not_need_an_empty_pipeline() -> None:
    """A loop that collects one step a launch gets on: the stalled step itself blocks nothing."""
    sim = Simulation(limits(num_blocks=6, max_model_len=20, max_num_batched_tokens=64), depth=1)
    sim.submit(request("a", [1] * 8, max_tokens=12), request("b", [2] * 8, max_tokens=12))
    for _ in range(200):
        if len(sim.finished) == 2:
            break
        sim.launch()
        if len(sim.tickets) > 1:
            sim.collect()
    assert len(sim.finished) == 2
    while sim.tickets:
        sim.collect()
    assert any(p.stalled for p in sim.plans)
    assert preempted(sim)
    sim.run()


def test_half_computed_prompts_that_block_each_other() -> None:
    sim = Simulation(limits(num_blocks=10, max_model_len=40, max_num_batched_tokens=8))
    sim.submit(request("a", [1] * 30, 4), request("b", [2] * 30, 4), request("c", [3] * 30, 4))
    sim.run(max_turns=100)


# --- counts of sequences, logits rows and sampling rows -------------------------------------------


@pytest.mark.parametrize(("length", "shared", "copies"), [(6, 1, 2), (8, 2, 0), (3, 0, 2)])
def test_n_samples_of_one_prompt(length: int, shared: int, copies: int) -> None:
    sim = Simulation(limits())
    sim.submit(request("a", [1] * length, max_tokens=5, n=3, temperature=1.0, seed=4))
    plan, batch = sim.launch(), sim.batches[-1]
    assert (batch.num_seqs, batch.logits_rows.size, batch.sample_rows.size) == (1, 1, 3)
    assert plan.sample_seqs.tolist() == [0, 0, 0]
    assert plan.starts.tolist() == [0, 1, 2]
    tables = [table(sim, "a", c) for c in range(3)]
    assert tables[0] == tables[1] == tables[2]
    assert (sim.host.pool.ref_count[tables[0]] == 3).all()
    sim.collect()
    plan, batch = sim.launch(), sim.batches[-1]
    assert (batch.num_seqs, batch.logits_rows.size, batch.sample_rows.size) == (3, 3, 3)
    assert plan.copies.shape == (copies, 2), "the last holder writes to the original"
    tables = [table(sim, "a", c) for c in range(3)]
    assert len({tuple(t[:shared]) for t in tables}) == 1
    assert len({t[-1] for t in tables}) == 3
    sim.collect()
    sim.run()
    assert len({tuple(sim.tokens["a", c]) for c in range(3)}) == 3, "each choice has its own noise"


def test_n_is_admitted_whole_or_not_at_all() -> None:
    sim = Simulation(limits(max_num_seqs=3))
    sim.submit(request("one", [1], max_tokens=6))
    sim.turn()
    sim.submit(request("three", [2], max_tokens=2, n=3))
    while ("one", 0) not in sim.finished:
        assert names(sim.turn()) == ["one"]
    sim.run()


def test_aborting_a_group_ends_each_choice_once() -> None:
    for when in range(4):
        sim = Simulation(limits(max_num_batched_tokens=4), depth=1)
        sim.submit(request("a", range(10), max_tokens=9, n=3))
        for _ in range(when):
            sim.turn()
        sim.abort("a")
        sim.run()
        assert {e.reason for e in sim.finished.values()} == {FinishReason.ABORT}
        assert len(sim.finished) == 3


# --- fork -----------------------------------------------------------------------------------------


def test_fork_shares_all_blocks_and_copies_the_last_partial_one() -> None:
    sim = Simulation(limits())
    sim.submit(request("a", range(6), max_tokens=9))
    sim.turn()
    sim.fork("a", "b")
    assert table(sim, "a") == table(sim, "b")
    assert sim.host.pool.ref_count[table(sim, "a")].tolist() == [2, 2]
    before = table(sim, "a")
    plan = sim.launch()
    assert plan.copies.shape == (1, 2)
    assert plan.copies[0, 0] == before[1]
    assert table(sim, "a")[0] == table(sim, "b")[0] == before[0]
    assert table(sim, "a")[1] != table(sim, "b")[1]
    sim.collect()
    sim.run()
    assert sim.tokens["a", 0][1:] == sim.tokens["b", 0], "greedy twins say the same"


def test_sampled_forks_differ_from_source_and_from_each_other() -> None:
    sim = Simulation(limits())
    sim.submit(request("a", range(6), max_tokens=12, temperature=1.0))
    sim.turn()
    sim.fork("a", "b")
    sim.fork("a", "c")
    sim.fork("b", "d")
    sim.run()
    said = [tuple(sim.tokens["a", 0][1:]), *(tuple(sim.tokens[n, 0]) for n in "bcd")]
    assert len(set(said)) == 4


def test_a_fork_of_a_fork_of_n_is_one_sequence() -> None:
    sim = Simulation(limits(max_num_seqs=4))
    sim.submit(request("a", range(5), max_tokens=6, n=2))
    sim.turn()
    sim.fork("a", "b")
    sim.fork("b", "c")
    sim.run()
    assert set(sim.finished) == {("a", 0), ("a", 1), ("b", 0), ("c", 0)}


def test_fork_and_preempt_in_one_step_tell_the_device_once() -> None:
    """The device checks that no table entry changes twice in a step."""
    sim = Simulation(limits(num_blocks=5, max_model_len=20, max_num_batched_tokens=64))
    sim.submit(request("a", [1] * 9, max_tokens=10))
    sim.turn()
    sim.fork("a", "b")
    sim.fork("a", "c")
    sim.run()
    assert preempted(sim)


def test_fork_refusals() -> None:
    sim = Simulation(limits(max_num_seqs=2))
    sim.submit(request("a", [1, 2]), request("waiting", [3]))
    with pytest.raises(RequestError, match=r"'a'.*not running"):
        sim.fork("a", "b")
    sim.launch()
    with pytest.raises(StateError, match="in flight"):
        sim.fork("a", "b")
    sim.collect()
    with pytest.raises(RequestError, match=r"'waiting'.*in use"):
        sim.fork("a", "waiting")
    with pytest.raises(RequestError, match="2 rows are taken"):
        sim.fork("a", "b")
    sim.run()


def test_fork_without_a_penalty_row_is_refused() -> None:
    bounds = limits(max_num_seqs=80, max_num_batched_tokens=200, num_blocks=400)
    sim = Simulation(bounds)
    sim.submit(
        *(request(f"r{i}", [i], presence_penalty=1.0) for i in range(hosts.MAX_PENALTY_SLOTS))
    )
    sim.turn()
    assert sorted(sim.host.seqs.slot[:64].tolist()) == list(range(64))
    with pytest.raises(RequestError, match="64 penalty rows"):
        sim.fork("r0", "x")
    sim.run()


# --- aborts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_abort_of_a_waiting_a_running_and_an_unknown_request(depth: int) -> None:
    sim = Simulation(limits(max_num_seqs=1), depth)
    sim.submit(request("run", [1, 2], max_tokens=50), request("wait", [3]))
    for _ in range(4):
        sim.turn()
    for name in ("run", "wait", "nobody"):
        sim.abort(name)
    assert len(sim.finished) == 0, "marking ends nothing by itself"
    plan = sim.launch()
    assert {e.request_id for e in plan.finished} == {"run", "wait"}
    assert not sim.host.pool.ref_count.any()
    while sim.tickets:
        sim.collect()
    sim.run()
    assert set(sim.finished) == {("run", 0), ("wait", 0)}


def test_an_abort_does_not_reach_a_later_request_of_the_same_name() -> None:
    sim = Simulation(limits())
    sim.submit(request("a", [1], max_tokens=1))
    sim.launch()
    sim.host = hosts.abort(sim.host, "a")
    sim.collect()  # it ended before the mark was acted on
    assert sim.finished.pop(("a", 0)).reason == FinishReason.LENGTH
    sim.submit(request("a", [2], max_tokens=3))
    sim.run()
    assert sim.finished["a", 0].reason == FinishReason.LENGTH


def test_a_row_is_reused_while_the_step_of_its_last_owner_is_in_flight() -> None:
    """The late token is dropped by its epoch, not given to the new owner."""
    sim = Simulation(limits(max_num_seqs=1), depth=1)
    sim.submit(request("a", [1, 2], max_tokens=20), request("b", [3, 4], max_tokens=3))
    for _ in range(3):
        sim.turn()
    sim.abort("a")
    plan = sim.launch()
    assert names(plan) == ["b"]
    assert len(sim.tickets) == 2
    sim.run()


# --- ends -----------------------------------------------------------------------------------------


def ended(sim: Simulation, name: str) -> tuple[FinishReason, str | int | None, int]:
    event = sim.finished[name, 0]
    return event.reason, event.stop, len(sim.tokens[name, 0])


def spoken(prompt: list[int], count: int) -> list[int]:
    """What the fake model says to a prompt."""
    return answer(prompt, request("", prompt, count, seed=0).params, 0, 64)[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_every_way_to_end(depth: int) -> None:
    prompt = [7, 7, 3]
    said = spoken(prompt, 12)
    text = "".join(TOKEN_BYTES[t].decode() for t in said)
    stop_text = text[3:6]
    at = next(i for i in range(len(text)) if stop_text in text[: i + 1])
    sim = Simulation(limits(), depth)
    sim.submit(
        request("length", prompt, 12),
        request("token", prompt, 12, stop_token_ids=(said[5],)),
        request("text", prompt, 12, stop=("zzz", stop_text)),
        request("late", prompt, 12, stop_token_ids=(said[2], said[5]), min_tokens=5),
    )
    sim.run()
    assert ended(sim, "length") == (FinishReason.LENGTH, None, 12)
    assert ended(sim, "token") == (FinishReason.STOP, said[5], said.index(said[5]) + 1)
    assert ended(sim, "text") == (FinishReason.STOP, stop_text, at + 1)
    assert ended(sim, "late") == (FinishReason.STOP, said[5], 6)


@pytest.mark.parametrize("depth", [0, 1])
def test_eos_ends_unless_it_is_ignored_or_too_early(depth: int) -> None:
    prompt = next([i, j] for i in range(90) for j in range(90) if spoken([i, j], 3)[2] in EOS)
    sim = Simulation(limits(), depth)
    sim.submit(
        request("ends", prompt, 9, ignore_eos=False),
        request("goes on", prompt, 9),
        request("early", prompt, 9, ignore_eos=False, min_tokens=3),
    )
    sim.run()
    assert ended(sim, "ends") == (FinishReason.STOP, None, 3)
    assert sim.tokens["ends", 0][-1] in EOS
    assert ended(sim, "goes on") == (FinishReason.LENGTH, None, 9)
    assert len(sim.tokens["early", 0]) > 3


def test_a_late_stop_emits_and_indexes_nothing_more() -> None:
    """Depth 1 has launched one step too many when the stop is read: one wasted row."""
    sim = Simulation(limits(block_size=2), depth=1)
    said = spoken([1, 2], 5)
    sim.submit(request("a", [1, 2], 9, stop_token_ids=(said[3],)))
    sim.run()
    computed = sum(p.num_tokens for p in sim.plans)
    assert computed == 2 + 3 + 1, "prompt, three inputs, one wasted"
    assert sim.tokens["a", 0] == said[:4]


def test_rows_without_numbers_end_with_an_error_and_leave_no_kv_behind() -> None:
    bounds = limits(max_num_batched_tokens=64)
    host = hosts.submit(
        hosts.make(bounds), [request("bad", range(9)), request("good", range(20, 29))], bounds
    )
    plan, host = schedule(host, bounds)
    failed = np.array([True, False])
    accepted, host = commit(
        host, bounds, plan, np.array([5, 6], np.int32), token_bytes=TOKEN_BYTES, failed=failed
    )
    hosts.check(host)
    (event,) = accepted.finished
    assert (event.request_id, event.reason) == ("bad", FinishReason.ERROR)
    assert event.error is not None
    assert event.num_generated_tokens == 0
    assert (accepted.tokens.tolist(), accepted.sampled.tolist()) == ([6], [1])
    assert len(host.prefix.by_block) == 2, "the two full blocks of the good one"
    assert set(host.seqs.rows_of) == {"good"}


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1] * 64, {}, "the prompt has 64 tokens and max_model_len is 64"),
        (
            [1] * 60,
            {"max_tokens": 5},
            r"\(60\) and max_tokens \(5\) exceed max_model_len \(64\) by 1",
        ),
        ([1] * 60, {"max_tokens": None, "min_tokens": 5}, "min_tokens 5 exceeds the 4"),
        ([1, VOCAB], {}, f"token id {VOCAB} is out of range.*{VOCAB} entries"),
        ([1, -1], {}, "token id -1 is out of range"),
        ([1, 2**70], {}, "whole numbers"),
        ([2**63], {}, "out of range"),
        ([1, 1.5], {}, "whole numbers"),
        (["a"], {}, "whole numbers"),
        ([1], {"n": 5}, "n is 5.*at most 4"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ],
)
def test_what_can_never_run_is_refused(
    prompt: list[int], options: dict[str, object], message: str
) -> None:
    host = hosts.make(limits())
    with pytest.raises(RequestError, match=message):
        hosts.submit(host, request("a", prompt, **options), limits())  # type: ignore[arg-type]
    assert not hosts.has_work(host)


def test_the_longest_request_that_fits_runs() -> None:
    """All blocks of the pool, and not one token more."""
    bounds = limits(num_blocks=5, max_model_len=20)
    sim = Simulation(bounds)
    sim.submit(request("a", [1] * 13, max_tokens=7))
    sim.run()
    with pytest.raises(RequestError, match="by 1"):
        hosts.submit(sim.host, request("b", [1] * 13, max_tokens=8), bounds)


def test_a_request_larger_than_the_pool_is_refused() -> None:
    """Whatever ``max_model_len`` says: it could never end."""
    bounds = limits(num_blocks=4, max_model_len=64)
    with pytest.raises(RequestError, match=r"reach 17 tokens.*holds 16 \(4 blocks of 4\)"):
        hosts.submit(hosts.make(bounds), request("a", [1] * 13, max_tokens=4), bounds)
    with pytest.raises(RequestError, match="reach 64 tokens"):
        hosts.submit(hosts.make(bounds), request("a", [1], max_tokens=None), bounds)  # type: ignore[arg-type]


def test_one_bad_request_refuses_the_whole_batch() -> None:
    host = hosts.make(limits())
    with pytest.raises(RequestError):
        hosts.submit(host, [request("a", [1]), request("b", [VOCAB])], limits())
    with pytest.raises(RequestError, match=r"'a'.*in use"):
        hosts.submit(host, [request("a", [1]), request("a", [2])], limits())
    assert len(host.waiting) == 0


def test_an_id_is_free_again_after_its_end() -> None:
    sim = Simulation(limits())
    sim.submit(request("a", [1], 2))
    with pytest.raises(RequestError, match="in use"):
        sim.submit(request("a", [1], 2))
    sim.turn()
    with pytest.raises(RequestError, match="in use"):
        sim.submit(request("a", [1], 2))
    sim.run()
    sim.submit(request("a", [2], 2))
    sim.finished.clear()
    sim.run()


def test_seeds_are_derived_from_engine_seed_and_arrival() -> None:
    def seeds(seed: int) -> list[int]:
        bounds = limits(seed=seed)
        host = hosts.submit(hosts.make(bounds), [request(str(i), [1]) for i in range(50)], bounds)
        return [w.seed for w in host.waiting.by_rank()]

    assert seeds(3) == seeds(3)
    assert len({*seeds(3), *seeds(4)}) == 100


def test_requests_that_share_one_set_of_parameters_differ_in_seed() -> None:
    for own, distinct in ((None, 3), (7, 1)):
        params = SamplingParams(max_tokens=2, temperature=1.0, seed=own)
        sim = Simulation(limits())
        sim.submit(
            *(Request(request_id=str(i), prompt_token_ids=(1, 2), params=params) for i in range(3))
        )
        sim.run()
        seeds = {seed for seed, _ in sim.device.noise.values()}
        assert len(seeds) == distinct
        assert own is None or seeds == {own}
