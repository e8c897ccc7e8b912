"""The worked examples of the nano-vLLM guide (chapters 7 to 11 and 18), with its numbers.

Where this engine decides otherwise than the guide's, a test says so: prompts and decodes share a
step, and a chunk of a prompt takes only the blocks it fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from infer import host as hosts
from infer import sequences
from infer.commit import Accepted, commit
from infer.config import Limits
from infer.host import Host
from infer.hostbatch import HostBatch, build
from infer.plan import Plan
from infer.schedule import schedule
from infer.sequences import Status
from infer.types import Request, SamplingParams


def engine(**changes: int) -> Limits:
    """The guide's block size of 256 and prefill budget of 512."""
    values = {
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "block_size": 256,
        "num_blocks": 32,
    }
    return Limits(**{**values, **changes}, prefix_caching=True, vocab_size=2000)


def request(name: str, prompt: Sequence[int], max_tokens: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
    )


def start(limits: Limits, *requests: Request, first_blocks: Sequence[int] = ()) -> Host:
    """A new engine with ``requests`` queued, whose pool hands out ``first_blocks`` first."""
    host = hosts.make(limits)
    others = [b for b in host.pool.free.tolist() if b not in first_blocks]
    free = np.array([*others, *reversed(first_blocks)], np.int32)
    return hosts.submit(replace(host, pool=replace(host.pool, free=free)), requests, limits)


def launch(host: Host, limits: Limits) -> tuple[Plan, HostBatch, Host]:
    plan, host = schedule(host, limits)
    return plan, build(plan, host.seqs), host


def collect(host: Host, limits: Limits, plan: Plan, token: int = 1999) -> tuple[Accepted, Host]:
    accepted, host = commit(host, limits, plan, np.full(plan.sample_rows.size, token, np.int32))
    hosts.check(host)
    return accepted, host


def step(host: Host, limits: Limits) -> tuple[Plan, HostBatch, Accepted, Host]:
    plan, batch, host = launch(host, limits)
    accepted, host = collect(host, limits, plan)
    return plan, batch, accepted, host


def lengths(plan: Plan) -> list[tuple[int, int, int]]:
    """(known, cached, scheduled) of each sequence."""
    return [(r.num_known, r.num_cached, r.num_scheduled) for r in plan]


def of(host: Host, name: str) -> tuple[int, int]:
    """(known, cached) tokens of a running request."""
    (row,) = host.seqs.rows_of[name]
    return int(host.seqs.num_tokens[row]), int(host.seqs.num_cached_tokens[row])


def table(host: Host, name: str) -> list[int]:
    (row,) = host.seqs.rows_of[name]
    return sequences.table(host.seqs, row).tolist()


class TestTwoPromptsUnderABudget:
    """Sections 7.3, 8.2, 9.2, 11.2 to 11.4 and 18.8: A of 700 and B of 32 tokens, budget 512."""

    limits = engine()
    a, b = request("A", range(700), 8), request("B", range(1000, 1032), 8)

    def begin(self) -> Host:
        return start(self.limits, self.a, self.b, first_blocks=(17, 5, 23, 11))

    def test_the_first_step_computes_512_positions_and_accepts_nothing(self) -> None:
        plan, batch, accepted, host = step(self.begin(), self.limits)
        assert [r.request_id for r in plan] == ["A"]
        assert lengths(plan) == [(700, 0, 512)]
        assert plan.num_tokens == 512
        assert batch.positions.tolist() == list(range(512))
        assert batch.logits_rows.size == accepted.tokens.size == 0
        assert of(host, "A") == (700, 512)

    def test_the_second_step_computes_188_and_32(self) -> None:
        *_, host = step(self.begin(), self.limits)
        plan, batch, accepted, host = step(host, self.limits)
        assert [r.request_id for r in plan] == ["A", "B"]
        assert lengths(plan) == [(700, 512, 188), (32, 0, 32)]
        assert batch.num_tokens == 220
        assert batch.cu_seqlens_q.tolist() == [0, 188, 220]
        assert batch.context_lens.tolist() == [700, 32]
        assert (batch.max_seqlen_q, batch.max_seqlen_k) == (188, 700)
        assert batch.positions.tolist() == [*range(512, 700), *range(32)]
        assert batch.input_ids.tolist() == [*range(512, 700), *range(1000, 1032)]
        assert [r.block_table for r in plan] == [(17, 5, 23), (11,)]
        assert batch.slot_mapping.tolist() == [*range(5888, 6076), *range(2816, 2848)]
        assert batch.logits_rows.tolist() == [187, 219]
        assert accepted.tokens.size == 2
        assert (of(host, "A"), of(host, "B")) == ((701, 700), (33, 32))

    def test_the_third_step_decodes_one_position_each(self) -> None:
        *_, host = step(self.begin(), self.limits)
        *_, host = step(host, self.limits)
        plan, batch, _, host = step(host, self.limits)
        assert lengths(plan) == [(701, 700, 1), (33, 32, 1)]
        assert batch.positions.tolist() == [700, 32]
        assert batch.context_lens.tolist() == [701, 33]
        assert batch.slot_mapping.tolist() == [6076, 2848]
        assert (of(host, "A"), of(host, "B")) == ((702, 701), (34, 33))

    def test_a_candidate_is_not_yet_an_accepted_token(self) -> None:
        """Section 7.4: between launch and collect the token has a place, and no value."""
        *_, host = step(self.begin(), self.limits)
        plan, _, host = launch(host, self.limits)
        (row,) = host.seqs.rows_of["A"]
        assert (host.seqs.num_tokens[row], host.seqs.num_pending[row]) == (700, 1)
        _, host = collect(host, self.limits, plan)
        assert (host.seqs.num_tokens[row], host.seqs.num_pending[row]) == (701, 0)


class TestSlots:
    """Sections 9.2, 9.5 and 18.9: slot = table[position // size] * size + position % size."""

    @pytest.mark.parametrize(
        ("block_size", "length", "slots"),
        [
            (4, 10, {0: 68, 6: 22, 8: 92}),
            (256, 620, {300: 1324, 619: 5995}),
        ],
    )
    def test_a_table_of_17_5_23(self, block_size: int, length: int, slots: dict[int, int]) -> None:
        limits = engine(
            block_size=block_size, max_num_batched_tokens=1024, max_model_len=block_size * 4
        )
        host = start(limits, request("A", range(length), 1), first_blocks=(17, 5, 23))
        _, batch, _ = launch(host, limits)
        assert {position: int(batch.slot_mapping[position]) for position in slots} == slots

    @pytest.mark.parametrize(
        ("length", "blocks"), [(255, 1), (256, 1), (257, 2), (512, 2), (513, 3)]
    )
    def test_blocks_of_a_length(self, length: int, blocks: int) -> None:
        limits = engine(max_num_batched_tokens=1024)
        host = start(limits, request("A", range(length), 2))
        plan, _, host = launch(host, limits)
        assert len(table(host, "A")) == blocks
        _, host = collect(host, limits, plan)
        assert len(table(host, "A")) == blocks, "a token that was just sampled needs no slot yet"


def test_walk_a_one_prefill_and_two_decodes() -> None:
    """Sections 6.4, 18.0.3 and 18.3: three prompt tokens, three outputs."""
    limits = engine()
    host = start(limits, request("A", (11, 12, 13), 3))
    seen, inputs, contexts = [], [], []
    while hosts.has_work(host):
        plan, batch, accepted, host = step(host, limits)
        seen += lengths(plan)
        inputs.append(batch.positions.tolist())
        contexts += batch.context_lens.tolist()
        if not accepted.finished:
            known, cached = of(host, "A")
            assert known == cached + 1, "the newest token has no KV"
    assert seen == [(3, 0, 3), (4, 3, 1), (5, 4, 1)]
    assert inputs == [[0, 1, 2], [3], [4]]
    assert contexts == [3, 4, 5]
    (event,) = accepted.finished
    assert (event.reason, event.num_prompt_tokens, event.num_generated_tokens) == ("length", 3, 3)
    assert host.pool.num_free == limits.num_blocks
    assert not host.pool.ref_count.any()


class TestWalkB:
    """Section 18.0.4: prompts of 3 and 4 tokens, answers of 2 and 5."""

    r1, r2 = request("R1", range(3), 2), request("R2", range(10, 14), 5)

    def test_five_steps_for_seven_tokens(self) -> None:
        limits = engine()
        host = start(limits, self.r1, self.r2)
        batches, free = [], []
        while hosts.has_work(host):
            plan, batch, _, host = step(host, limits)
            batches.append(([r.request_id for r in plan], batch.num_tokens))
            free.append(host.pool.num_free)
        assert batches == [(["R1", "R2"], 7), (["R1", "R2"], 2), *[(["R2"], 1)] * 3]
        assert free == [30, 31, 31, 31, 32], "each end gives one block back at once"

    def test_with_one_row_they_run_one_after_the_other(self) -> None:
        """The guide's engine would prefill R2 before R1 ends; a row is a sequence's for life."""
        limits = engine(max_num_seqs=1)
        host = start(limits, self.r1, self.r2)
        names = []
        while hosts.has_work(host):
            plan, _, _, host = step(host, limits)
            names += [r.request_id for r in plan]
        assert names == ["R1"] * 2 + ["R2"] * 5


def test_walk_c_the_257th_token_opens_a_block() -> None:
    """Section 18.0.5: a prompt of exactly one block, three outputs."""
    limits = engine()
    host = start(limits, request("C", range(100, 356), 3))
    _, batch, _, host = step(host, limits)
    (p0,) = table(host, "C")
    assert batch.positions.tolist() == list(range(256))
    assert batch.slot_mapping.tolist() == list(range(p0 * 256, p0 * 256 + 256))
    assert of(host, "C") == (257, 256)

    _, batch, _, host = step(host, limits)
    first, p1 = table(host, "C")
    assert first == p0
    assert batch.positions.tolist() == [256]
    assert batch.context_lens.tolist() == [257]
    assert batch.slot_mapping.tolist() == [p1 * 256]
    assert of(host, "C") == (258, 257)

    _, batch, accepted, host = step(host, limits)
    assert batch.context_lens.tolist() == [258]
    assert batch.slot_mapping.tolist() == [p1 * 256 + 1]
    assert [e.request_id for e in accepted.finished] == ["C"]
    assert not host.pool.ref_count.any()


def test_two_lives_in_one_log() -> None:
    """Sections 18.7 and 18.11: prompts of 64 and 96 tokens, answers of 2 and 3."""
    limits = engine()
    host = start(limits, request("S", range(64), 2), request("L", range(500, 596), 3))
    _, batch, _, host = step(host, limits)
    assert batch.num_tokens == 160
    assert batch.cu_seqlens_q.tolist() == [0, 64, 160]
    assert batch.logits_rows.tolist() == [63, 159]
    assert (of(host, "S"), of(host, "L")) == ((65, 64), (97, 96))
    _, batch, accepted, host = step(host, limits)
    assert batch.positions.tolist() == [64, 96]
    assert batch.context_lens.tolist() == [65, 97]
    assert [e.request_id for e in accepted.finished] == ["S"]
    _, _, accepted, host = step(host, limits)
    assert [(e.request_id, e.num_generated_tokens) for e in accepted.finished] == [("L", 3)]


def test_batches_change_from_step_to_step() -> None:
    """Section 8.1: A has one step left, B three; C arrives and joins at once, beside B."""
    limits = engine()
    host = start(limits, request("A", range(5), 2), request("B", range(10, 15), 4))
    *_, host = step(host, limits)
    _, _, accepted, host = step(host, limits)
    assert [e.request_id for e in accepted.finished] == ["A"]
    host = hosts.submit(host, request("C", range(20, 27), 4), limits)
    plan, batch, _, host = step(host, limits)
    assert [(r.request_id, r.num_scheduled) for r in plan] == [("B", 1), ("C", 7)]
    assert (plan.num_decode, batch.num_tokens) == (1, 8), "the guide's engine would hold B back"
    plan, *_ = step(host, limits)
    assert [r.num_scheduled for r in plan] == [1, 1]


def test_preemption_takes_the_last_sequence() -> None:
    """Section 18.8: block size 4, four blocks, three prompts of four tokens."""
    limits = engine(block_size=4, num_blocks=4, max_model_len=8)
    host = start(limits, *(request(n, range(i, i + 4), 4) for i, n in enumerate("ABC")))
    _, _, _, host = step(host, limits)
    assert host.pool.num_free == 1
    plan, _, _, host = step(host, limits)
    assert [r.request_id for r in plan] == ["A", "B"]
    assert plan.preempted == ("C",)
    (row,) = host.seqs.rows_of["C"]
    assert host.seqs.status[row] == Status.PREEMPTED
    assert of(host, "C") == (5, 0), "it keeps its tokens"
    assert table(host, "C") == []

    resumed = None
    while hosts.has_work(host):
        plan, _, accepted, host = step(host, limits)
        if resumed is None and "C" in [r.request_id for r in plan]:
            resumed = lengths(plan)
        ends = {e.request_id: e for e in accepted.finished}
    assert resumed == [(5, 0, 5)], "its prompt and its first token are computed together again"
    assert (ends["C"].num_preemptions, ends["C"].num_generated_tokens) == (1, 4)


class TestSharedPrefix:
    """Sections 10.2, 10.3 and 18.10: prompts of 620 tokens that share the first 512."""

    limits = engine(max_num_batched_tokens=1024)
    p = request("P", range(620), 1)
    shared = tuple(range(512))

    def q(self, name: str, first: int, max_tokens: int = 1) -> Request:
        return request(name, (*self.shared, *range(first, first + 108)), max_tokens)

    def after_p(self) -> Host:
        *_, host = step(start(self.limits, self.p, first_blocks=(17, 5, 23)), self.limits)
        assert not hosts.has_work(host)
        return host

    def test_512_positions_are_taken_and_108_computed(self) -> None:
        host = hosts.submit(self.after_p(), self.q("Q", 1000), self.limits)
        plan, batch, accepted, host = step(host, self.limits)
        assert lengths(plan) == [(620, 512, 108)]
        assert batch.cu_seqlens_q.tolist() == [0, 108]
        assert batch.context_lens.tolist() == [620]
        assert batch.positions.tolist() == list(range(512, 620))
        (row,) = plan
        assert row.block_table[:2] == (17, 5)
        assert row.block_table[2] not in (17, 5), "the last block is its own"
        assert accepted.finished[0].num_cached_tokens == 512
        assert (plan.prefix_queries, plan.prefix_hits) == (620, 512)

    def test_four_blocks_instead_of_six_while_both_run(self) -> None:
        host = start(self.limits, self.q("P", 700, max_tokens=9))
        *_, host = step(host, self.limits)
        host = hosts.submit(host, self.q("Q", 1000, max_tokens=9), self.limits)
        *_, host = step(host, self.limits)
        assert np.count_nonzero(host.pool.ref_count) == 4
        assert table(host, "P")[:2] == table(host, "Q")[:2]

    def test_a_prompt_of_exactly_512_takes_256(self) -> None:
        host = hosts.submit(self.after_p(), request("Q", self.shared, 1), self.limits)
        plan, *_ = step(host, self.limits)
        assert lengths(plan) == [(512, 256, 256)]

    def test_reference_counts_go_0_1_2_1_0(self) -> None:
        host = self.after_p()
        seen = [host.pool.ref_count[[17, 5]].tolist()]
        host = hosts.submit(host, self.q("Q1", 1000, max_tokens=2), self.limits)
        plan, _, host = launch(host, self.limits)
        seen.append(host.pool.ref_count[[17, 5]].tolist())
        _, host = collect(host, self.limits, plan)
        host = hosts.submit(host, self.q("Q2", 1200, max_tokens=2), self.limits)
        plan, _, host = launch(host, self.limits)
        seen.append(host.pool.ref_count[[17, 5]].tolist())
        _, host = collect(host, self.limits, plan)  # Q1 ends
        seen.append(host.pool.ref_count[[17, 5]].tolist())
        *_, host = step(host, self.limits)  # Q2 ends
        seen.append(host.pool.ref_count[[17, 5]].tolist())
        assert seen == [[0, 0], [1, 1], [2, 2], [1, 1], [0, 0]]
        assert host.pool.cached[[17, 5]].all(), "nobody holds them, and they can still be found"
