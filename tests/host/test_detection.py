"""The model checker can fail: faults are planted in the host half, and each is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from infer import admission, blocks, host, prefix, rounds, schedule, sequences
from infer.hostbatch import HostBatch
from infer.persistent import MapEdit
from infer.plan import Plan
from infer.prefix import Draft
from tests.host import simulation
from tests.host.histories import play
from tests.host.test_machine import FAST, Machine, run

Patch = pytest.MonkeyPatch


def stale_hash(patch: Patch) -> None:
    """An evicted block can still be found under its old digest."""
    remove = MapEdit.remove

    def keep_digests(self: MapEdit[Any, Any], key: Any) -> None:
        if not isinstance(key, bytes):
            remove(self, key)

    patch.setattr(MapEdit, "remove", keep_digests)


def missing_copy(patch: Patch) -> None:
    """A shared partial block is replaced in the table, and its KV is not copied."""
    advance = schedule._advance

    def without_copies(*args: Any) -> Plan:
        plan = advance(*args)
        return replace(plan, copies=plan.copies[:0])

    patch.setattr(schedule, "_advance", without_copies)


def no_copy_on_write(patch: Patch) -> None:
    """Two sequences go on writing to the block they share."""
    patch.setattr(rounds, "own_tail", lambda r, row: None)


def block_leak(patch: Patch) -> None:
    """An ended sequence keeps its first block."""
    release = Draft.release
    patch.setattr(Draft, "release", lambda self, table: release(self, table[1:]))


def double_free(patch: Patch) -> None:
    """Blocks are given back twice."""
    release = Draft.release

    def twice(self: Draft, table: blocks.Int32) -> None:
        release(self, table)
        release(self, table)

    patch.setattr(Draft, "release", twice)


def freed_while_shared(patch: Patch) -> None:
    """A block goes to the free stack although another sequence holds it."""
    release = blocks.release

    def release_all(pool: blocks.BlockPool, table: blocks.Int32) -> Any:
        pool.ref_count[table] = 1
        return release(pool, table)

    patch.setattr(blocks, "release", release_all)


def wrong_slot(patch: Patch) -> None:
    """Positions are written one slot too far."""
    build = simulation.build

    def shifted(plan: Plan, seqs: sequences.Sequences) -> HostBatch:
        batch = build(plan, seqs)
        return replace(batch, slot_mapping=batch.slot_mapping + 1)

    patch.setattr(simulation, "build", shifted)


def wrong_position(patch: Patch) -> None:
    """Decode positions count from one."""
    build = simulation.build

    def shifted(plan: Plan, seqs: sequences.Sequences) -> HostBatch:
        batch = build(plan, seqs)
        positions = batch.positions.copy()
        positions[: batch.num_decode] += 1
        return replace(batch, positions=positions)

    patch.setattr(simulation, "build", shifted)


def lost_request(patch: Patch) -> None:
    """Whoever is behind an admitted request leaves the queue with it."""
    withdraw = sequences.withdraw

    def greedy(waiting: sequences.Waiting, names: list[str]) -> sequences.Waiting:
        waiting = withdraw(waiting, names)
        behind = [w.request.request_id for w in waiting.by_rank()][:1]
        return withdraw(waiting, behind) if names else waiting

    patch.setattr(sequences, "withdraw", greedy)


def lost_preempted(patch: Patch) -> None:
    """A preempted sequence is never taken back."""
    candidates = admission._candidates

    def forgetful(r: Any, waiting: sequences.Waiting) -> Any:
        preempted = sequences.Status.PREEMPTED
        return (c for c in candidates(r, waiting) if c[1] < 0 or r.seqs.status[c[1]] != preempted)

    patch.setattr(admission, "_candidates", forgetful)


def same_step_hit(patch: Patch) -> None:
    """A prompt reads blocks that another one writes in the same step."""
    chunk = admission._chunk

    def eager(r: Any, row: int) -> int:
        count, s, size = chunk(r, row), r.seqs, r.limits.block_size
        computed = int(s.num_cached_tokens[row]) + count
        host.register_blocks(s, r.draft, row, min(computed, int(s.num_tokens[row])) // size, size)
        return count

    patch.setattr(admission, "_chunk", eager)


def full_hit(patch: Patch) -> None:
    """A prompt that is wholly cached computes no position, so there are no logits."""
    match = Draft.match

    def generous(self: Draft, chain: Any, tokens: Any, size: int, salt: Any, limit: int) -> Any:
        return match(self, chain, tokens, size, salt, tokens.size // size)

    patch.setattr(Draft, "match", generous)


def one_block_short(patch: Patch) -> None:
    """A hit is believed to be one block longer than it is."""
    use = Draft.use

    def longer(self: Draft, entries: Any) -> Any:
        return use(self, [*entries[:-1], entries[0]] if len(entries) > 1 else entries)

    patch.setattr(Draft, "use", longer)


def unverified_collision(patch: Patch) -> None:
    """Digests collide, and nobody compares tokens and parents."""

    class Weak:
        @staticmethod
        def xxh3_128_digest(data: bytes) -> bytes:
            return bytes([sum(data) % 5])

    def believe(self: Draft, chain: Any, tokens: Any, size: int, salt: Any, limit: int) -> Any:
        found: list[prefix.Entry] = []
        for digest in chain[:limit]:
            entry = self.by_digest.get(digest)
            if entry is None or digest in self.coming or entry in found:
                break
            found.append(entry)
        return found, False

    patch.setattr(prefix, "xxhash", Weak)
    patch.setattr(Draft, "match", believe)


def late_tokens(patch: Patch) -> None:
    """The epoch does not change, so tokens of a row's last owner go to the next."""
    vacate = sequences.vacate

    def same_epoch(seqs: sequences.Sequences, row: int) -> None:
        vacate(seqs, row)
        seqs.epoch[row] -= 1

    patch.setattr(sequences, "vacate", same_epoch)


def stale_table(patch: Patch) -> None:
    """The device is not told about blocks that a sequence grows by."""
    changes = schedule._table_changes

    def first_columns(*args: Any) -> Any:
        rows, columns, new = changes(*args)
        keep = columns == 0
        return rows[keep], columns[keep], new[keep]

    patch.setattr(schedule, "_table_changes", first_columns)


def same_noise(patch: Patch) -> None:
    """All choices of a request sample with the same noise."""
    adopt = host.adopt

    def as_first(*args: Any, choice: int, **options: Any) -> None:
        adopt(*args, choice=0, **options)

    patch.setattr(schedule, "adopt", as_first)


def overwritten_history(patch: Patch) -> None:
    """Old states share their vectors with new ones."""
    patch.setattr(sequences, "copy", lambda seqs: seqs)


def blocked_admissions(patch: Patch) -> None:
    """A request that finds no row ends the step's prompts, half computed ones too."""
    has_rows = admission._has_rows

    def spend(r: Any, item: Any) -> bool:
        if not has_rows(r, item):
            r.budget = 0
        return has_rows(r, item)

    patch.setattr(admission, "_has_rows", spend)


def starved_decode(patch: Patch) -> None:
    """Decodes sit out while the queue is not empty."""
    decodes = schedule._schedule_decodes

    def sometimes(r: Any) -> None:
        if (r.seqs.status == sequences.Status.FREE).any():
            decodes(r)

    patch.setattr(schedule, "_schedule_decodes", sometimes)


SEEN_BY_TOKENS: tuple[Callable[[Patch], None], ...] = (
    stale_hash,
    missing_copy,
    no_copy_on_write,
    freed_while_shared,
    double_free,
    wrong_slot,
    wrong_position,
    lost_request,
    lost_preempted,
    same_step_hit,
    full_hit,
    one_block_short,
    unverified_collision,
    late_tokens,
    stale_table,
    same_noise,
    overwritten_history,
)
SEEN_BY_INVARIANTS: tuple[Callable[[Patch], None], ...] = (
    stale_hash,
    block_leak,
    double_free,
    blocked_admissions,
    starved_decode,
)


def found_by(invariants: bool) -> Exception | None:
    """What the first of many histories that goes wrong says."""
    for seed in range(300):
        try:
            play(seed, invariants=invariants)
        except Exception as error:
            return error
    return None


@pytest.mark.parametrize("fault", SEEN_BY_TOKENS, ids=lambda f: f.__name__)
def test_the_reference_finds(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """Wrong tokens, lost requests and the device's own checks; no invariant function looks on."""
    fault(monkeypatch)
    assert found_by(invariants=False) is not None


@pytest.mark.parametrize("fault", SEEN_BY_INVARIANTS, ids=lambda f: f.__name__)
def test_the_invariants_find(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert isinstance(found_by(invariants=True), AssertionError)


def test_without_a_fault_nothing_is_found() -> None:
    for seed in range(30):
        play(seed)


def test_the_state_machine_finds_faults_too(monkeypatch: Patch) -> None:
    no_copy_on_write(monkeypatch)
    with pytest.raises(AssertionError):
        run(Machine, FAST)


def test_a_leak_in_the_pool_is_found() -> None:
    pool = blocks.make(4)
    with pytest.raises(AssertionError, match="leaked"):
        blocks.check(replace(pool, num_free=3))
    with pytest.raises(AssertionError, match="twice"):
        blocks.check(replace(pool, free=np.zeros(4, np.int32)))
