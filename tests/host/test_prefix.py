"""The prefix cache: what may be shared, what must not, and what goes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from infer import host as hosts
from infer import prefix, sequences
from infer.host import Host
from infer.types import Request
from tests.host.simulation import Simulation, limits, request

SIZE = 4


def prompt(blocks: int, first: int = 0, extra: int = 0) -> list[int]:
    """``blocks`` full blocks of tokens that differ from block to block, and ``extra`` more."""
    return [(first + i // SIZE + i) % 80 for i in range(blocks * SIZE + extra)]


def indexed(host: Host) -> set[int]:
    """Blocks that can be found."""
    return {block for block, _ in host.prefix.by_block.items()}


def cached_tokens(sim: Simulation, name: str) -> int:
    """Prompt tokens that a finished request took from the cache."""
    return sim.finished[name, 0].num_cached_tokens


def table(host: Host, name: str) -> list[int]:
    return sequences.table(host.seqs, host.seqs.rows_of[name][0]).tolist()


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_a_known_prompt_of_whole_blocks_computes_its_last_block(blocks: int) -> None:
    """There would be no position to take the next token's logits from otherwise."""
    sim = Simulation(limits(block_size=SIZE, max_num_batched_tokens=64))
    for name in ("first", "second"):
        sim.submit(request(name, prompt(blocks)))
        plan = sim.launch()
        (row,) = plan
        expected = 0 if name == "first" else (blocks - 1) * SIZE
        assert (row.num_cached, row.num_scheduled) == (expected, blocks * SIZE - expected)
        sim.collect()
        sim.run()
    assert cached_tokens(sim, "second") == (blocks - 1) * SIZE


def test_generated_blocks_are_found_too() -> None:
    """The next turn of a chat takes the last answer from the cache."""
    sim = Simulation(limits(block_size=SIZE))
    sim.submit(request("turn1", prompt(1), max_tokens=9))
    sim.run()
    said = sim.tokens["turn1", 0]
    sim.submit(request("turn2", [*prompt(1), *said, 1, 2, 3]))
    sim.run()
    # 13 tokens are known, 12 have KV: the last was never an input.
    assert cached_tokens(sim, "turn2") == 12


@pytest.mark.parametrize("depth", [0, 1])
def test_the_index_does_not_depend_on_the_depth(depth: int) -> None:
    """Launching ahead computes KV for a last token that depth 0 never computes."""
    sim = Simulation(limits(block_size=SIZE), depth)
    tokens = [5, 6, 7]
    sim.submit(request("a", tokens, max_tokens=9))
    sim.run()
    first = sim.tokens["a", 0]
    sim.submit(request("b", tokens, max_tokens=9, stop_token_ids=(first[4],)))
    sim.run()
    assert len(sim.tokens["b", 0]) == 5
    assert len(indexed(sim.host)) == 2, "11 tokens had KV, two blocks are full"


def test_duplicates_in_one_step_wait_for_the_first() -> None:
    """Three identical prompts: one computes, the others take its blocks a step later."""
    sim = Simulation(limits(block_size=SIZE, max_num_batched_tokens=64))
    sim.submit(*(request(name, prompt(3, extra=1)) for name in "abc"))
    plan = sim.launch()
    assert [r.request_id for r in plan] == ["a"]
    assert len(sim.host.waiting) == 2
    sim.collect()
    plan = sim.launch()
    assert [(r.request_id, r.num_cached, r.num_scheduled) for r in plan] == [
        ("a", 13, 1),
        ("b", 12, 1),
        ("c", 12, 1),
    ]
    assert table(sim.host, "a")[:3] == table(sim.host, "b")[:3] == table(sim.host, "c")[:3]
    assert len({table(sim.host, n)[3] for n in "abc"}) == 3
    sim.collect()
    sim.run()
    assert len(indexed(sim.host)) == len(set(indexed(sim.host)))


def test_duplicates_wait_for_every_chunk_of_a_long_prompt() -> None:
    sim = Simulation(limits(block_size=SIZE, max_num_batched_tokens=8))
    sim.submit(request("a", prompt(5, extra=1)), request("b", prompt(5, extra=1)))
    computed = 0
    while ("b", 0) not in sim.finished:
        computed += sum(r.num_scheduled for r in sim.turn() if r.num_cached < 21)
    assert computed == 21 + 1, "b computes its last position only"
    sim.run()


def test_a_different_second_block_does_not_wait() -> None:
    sim = Simulation(limits(block_size=SIZE, max_num_batched_tokens=64))
    sim.submit(request("a", [*prompt(1), *prompt(2, 9)]), request("b", [*prompt(1, 30), 1]))
    assert [r.request_id for r in sim.launch()] == ["a", "b"]
    sim.collect()
    sim.run()


def test_waiting_for_a_duplicate_lets_others_pass() -> None:
    sim = Simulation(limits(block_size=SIZE, max_num_batched_tokens=64))
    sim.submit(request("a", prompt(2)), request("b", prompt(2)), request("c", prompt(2, 40)))
    assert [r.request_id for r in sim.launch()] == ["a", "c"]
    sim.collect()
    sim.run()


def test_a_preempted_sequence_finds_its_blocks_again() -> None:
    """Its generated blocks too, and the count for the caller stays that of the first admission."""
    bounds = limits(block_size=2, num_blocks=10, max_model_len=20, max_num_batched_tokens=20)
    sim = Simulation(bounds)
    sim.submit(request("a", [1, 2, 3, 4], max_tokens=12), request("b", [5, 6, 7], max_tokens=12))
    resumed = []
    while hosts.has_work(sim.host):
        plan = sim.turn()
        preempted = {i for p in sim.plans for i in p.preempted}
        resumed += [
            (r.num_cached, r.num_scheduled)
            for r in plan
            if r.request_id in preempted and r.num_known - r.num_cached > 1
        ]
    sim.check_end()
    assert sim.finished["b", 0].num_preemptions >= 1
    assert any(cached > 3 for cached, _ in resumed), "more than its prompt was found"
    assert cached_tokens(sim, "b") == 0


def test_without_caching_nothing_is_indexed_or_found() -> None:
    sim = Simulation(limits(block_size=SIZE, prefix_caching=False))
    for name in "ab":
        sim.submit(request(name, prompt(3)))
        sim.run()
        assert not indexed(sim.host)
        assert cached_tokens(sim, name) == 0
    assert sum(p.prefix_queries for p in sim.plans) == 0


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    sim = Simulation(limits(block_size=SIZE, max_num_batched_tokens=8))
    sim.submit(request("a", prompt(3)))
    sim.run()
    sim.submit(request("b", prompt(3), prompt_logprobs=0))
    targets = []
    while len(targets) < 12:
        plan, batch = sim.launch(), sim.batches[-1]
        assert plan.prompt_logprobs.tolist() == [0]
        assert batch.prompt_rows.tolist() == list(range(plan.num_tokens))
        targets += batch.prompt_targets.tolist()
        sim.collect()
    assert targets == [*prompt(3)[1:], 0], "each position predicts the next; the last one samples"
    sim.run()
    assert not sim.plans[-1].prompt_logprobs.size
    assert cached_tokens(sim, "b") == 0


def _salted(name: str, salt: str | None) -> Request:
    return request(name, prompt(3, extra=1), cache_salt=salt)


def test_salts_keep_callers_apart() -> None:
    """Nobody learns from timing what another caller asked."""
    sim = Simulation(limits(block_size=SIZE))
    for name, salt, expected in (
        ("a", "alice", 0),
        ("b", "bob", 0),
        ("n", None, 0),
        ("a2", "alice", 12),
        ("b2", "bob", 12),
        ("n2", None, 12),
    ):
        sim.submit(_salted(name, salt))
        sim.run()
        assert cached_tokens(sim, name) == expected


def test_salts_do_not_wait_for_each_other() -> None:
    sim = Simulation(limits(block_size=SIZE, max_num_batched_tokens=64))
    sim.submit(_salted("a", "alice"), _salted("b", "bob"))
    assert sim.launch().num_sequences == 2
    sim.collect()
    sim.run()


class _Constant:
    """A hash function that knows one value."""

    @staticmethod
    def xxh3_128_digest(data: bytes) -> bytes:
        return b"same"


class _Weak:
    """A hash function with three values."""

    @staticmethod
    def xxh3_128_digest(data: bytes) -> bytes:
        return bytes([sum(data) % 3])


@pytest.mark.parametrize("hashing", [_Constant, _Weak])
@pytest.mark.parametrize("depth", [0, 1])
def test_hash_collisions_never_share_kv(
    monkeypatch: pytest.MonkeyPatch, hashing: type, depth: int
) -> None:
    """Every prompt collides with every other; tokens, parents and salts decide."""
    monkeypatch.setattr(prefix, "xxhash", hashing)
    rng = np.random.default_rng(0)
    sim = Simulation(limits(block_size=2, num_blocks=20, max_model_len=16), depth)
    for i in range(60):
        length = int(rng.integers(1, 12))
        sim.submit(
            request(
                f"r{i}",
                rng.integers(0, 2, length).tolist(),
                max_tokens=int(rng.integers(1, 16 - length + 1)),
                cache_salt=[None, "x"][i % 2],
            )
        )
        sim.turn()
    sim.run()


def test_the_same_block_after_another_parent_is_another_block() -> None:
    """The parent's tokens are not part of the comparison; its identity is."""
    sim = Simulation(limits(block_size=SIZE, max_num_batched_tokens=64))
    tail = prompt(1, 50)
    sim.submit(request("a", [*prompt(1), *tail, 1]))
    sim.run()
    sim.submit(request("b", [*prompt(1, 9), *tail, 1]))
    sim.run()
    assert cached_tokens(sim, "b") == 0


# --- eviction ---------------------------------------------------------------------------------


def _fill(sim: Simulation, *prompts: Sequence[int]) -> list[list[int]]:
    """Run prompts one after the other; the blocks that each left in the index, in order."""
    left = []
    for tokens in prompts:
        before = indexed(sim.host)
        name = f"p{len(sim.finished)}"
        sim.submit(request(name, tokens, max_tokens=1))
        sim.launch()
        blocks = table(sim.host, name)
        sim.collect()
        left.append([b for b in blocks if b in indexed(sim.host) - before])
    return left


def _evicted(sim: Simulation, count: int) -> list[int]:
    """The order in which the next ``count`` blocks leave the index, one by one."""
    order = []
    draft = prefix.Draft.of(sim.host.pool, sim.host.prefix)
    for _ in range(count):
        before = {b for b in indexed(sim.host) if draft.by_block.get(b) is not None}
        draft.take(draft.pool.num_free)
        assert draft.reserve(1)
        order += [b for b in before if draft.by_block.get(b) is None]
    return order


def test_eviction_takes_the_oldest_chain_leaf_first() -> None:
    sim = Simulation(limits(block_size=SIZE, num_blocks=16, max_num_batched_tokens=64))
    old, new = _fill(sim, prompt(3), prompt(3, 40))
    assert len(old) == len(new) == 3
    assert _evicted(sim, 6) == [*reversed(old), *reversed(new)]


def test_a_hit_makes_a_chain_young_again() -> None:
    sim = Simulation(limits(block_size=SIZE, num_blocks=16, max_num_batched_tokens=64))
    old, new = _fill(sim, prompt(3), prompt(3, 40))
    _fill(sim, [*prompt(2), 1])  # uses the first two blocks of ``old``
    assert _evicted(sim, 6) == [old[2], *reversed(new), old[1], old[0]]


def test_eviction_takes_no_more_than_is_needed() -> None:
    sim = Simulation(limits(block_size=SIZE, num_blocks=16, max_num_batched_tokens=64))
    _fill(sim, prompt(3), prompt(3, 20), prompt(3, 40), prompt(3, 60))
    assert len(indexed(sim.host)) == 12
    _fill(sim, [*prompt(4, 75), 1])  # five blocks; four are free
    assert len(indexed(sim.host)) == 12 - 1 + 4


def test_held_blocks_are_never_evicted() -> None:
    sim = Simulation(limits(block_size=SIZE, num_blocks=8, max_model_len=32))
    sim.submit(request("a", prompt(3), max_tokens=16))
    sim.turn()
    held = table(sim.host, "a")[:3]
    sim.submit(*(request(f"b{i}", prompt(2, 20 + 9 * i), max_tokens=1) for i in range(6)))
    while ("a", 0) not in sim.finished:
        sim.turn()
        assert ("a", 0) in sim.finished or table(sim.host, "a")[:3] == held
        assert set(held) <= indexed(sim.host)
    sim.run()


def test_an_evicted_prefix_is_computed_again() -> None:
    """An old hash that outlives its block would hand out somebody else's KV."""
    sim = Simulation(limits(block_size=SIZE, num_blocks=8, max_model_len=32))
    for i in range(30):
        sim.submit(request(f"r{i}", prompt(4, [0, 40, 60][i % 3]), max_tokens=2))
        sim.run()


def test_clear_forgets_and_frees_everything() -> None:
    sim = Simulation(limits(block_size=SIZE))
    sim.submit(request("a", prompt(3)))
    sim.run()
    pool, index = prefix.clear(sim.host.pool, sim.host.prefix)
    assert pool.num_free == pool.num_blocks
    assert len(index.by_block) == len(index.by_digest) == 0
    assert len(sim.host.prefix.by_block) == 3, "the old value stays as it was"


def test_clear_while_a_sequence_runs() -> None:
    """It goes on; what it computes afterwards cannot be found, and nothing breaks."""
    sim = Simulation(limits(block_size=SIZE))
    sim.submit(request("a", prompt(2), max_tokens=20))
    sim.turn()
    pool, index = prefix.clear(sim.host.pool, sim.host.prefix)
    sim.host = replace(sim.host, pool=pool, prefix=index)
    sim.run()
    assert not indexed(sim.host)


def test_the_queue_of_reusable_blocks_stays_short() -> None:
    """Blocks that are found again and again leave outdated items behind."""
    sim = Simulation(limits(block_size=1, num_blocks=40, max_model_len=38, prefix_caching=True))
    for i in range(120):
        sim.submit(request(f"r{i}", [*range(30)], max_tokens=1))
        sim.run()
    assert len(sim.host.prefix.idle) <= 2 * 40 + 1024 + 30
