"""A model checker for the host half: a device that is only bookkeeping, and the loop around it.

The device keeps (position, token) for every KV slot, follows the plan's block-table deltas and
copies, and "computes" a token by hashing exactly the context it can reach through them. Whatever
the host gets wrong about blocks, slots, lengths or sharing changes a context, and so a token, which
``answer`` (one request at a time, no blocks at all) would not have produced.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from infer import host as hosts
from infer import schedule as scheduling
from infer.commit import Accepted, commit
from infer.config import GenerationDefaults, Limits
from infer.host import Host
from infer.hostbatch import HostBatch, build
from infer.plan import Plan
from infer.sequences import Sequences, Status
from infer.types import FinishEvent, FinishReason, Request, SamplingParams

VOCAB = 97
EOS = (90, 91, 92)
TOKEN_BYTES = tuple(bytes([97 + token % 23]) for token in range(VOCAB))
DEFAULTS = GenerationDefaults(temperature=0.0, eos_token_ids=EOS)


def limits(**changes: Any) -> Limits:
    """Limits of a tiny engine."""
    values: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "num_blocks": 64,
        "prefix_caching": True,
        "vocab_size": VOCAB,
        "defaults": DEFAULTS,
    }
    return Limits(**{**values, **changes})


def request(name: str, prompt: Sequence[int], max_tokens: int = 4, **options: Any) -> Request:
    """A greedy request that ends by length; ``options`` go to the request or its parameters."""
    own = {k: options.pop(k) for k in ("priority", "cache_salt") if k in options}
    params = SamplingParams(
        **{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **options}
    )
    return Request(request_id=name, prompt_token_ids=tuple(prompt), params=params, **own)


def next_token(context: Sequence[int], seed: int, choice: int) -> int:
    """The fake model: any change of the context changes the token, most likely."""
    return zlib.crc32(bytes(context) + b"%d/%d" % (seed, choice)) % VOCAB


def answer(
    prompt: Sequence[int],
    params: SamplingParams,
    choice: int,
    max_model_len: int,
    already: Sequence[int] = (),
) -> tuple[list[int], FinishReason]:
    """What one request alone generates after ``already``: the reference."""
    assert params.seed is not None
    seed, choice = (params.seed, choice) if params.temperature else (0, 0)
    limit = max_model_len - len(prompt) if params.max_tokens is None else params.max_tokens
    generated = list(already)
    while True:
        token = next_token([*prompt, *generated], seed, choice)
        generated.append(token)
        text = b"".join(TOKEN_BYTES[t] for t in generated).decode()
        if len(generated) > params.min_tokens and (
            (token in EOS and not params.ignore_eos)
            or token in params.stop_token_ids
            or any(stop in text for stop in params.stop)
        ):
            return generated[len(already) :], FinishReason.STOP
        if len(generated) == limit:
            return generated[len(already) :], FinishReason.LENGTH


@dataclass
class Device:
    """KV slots, block tables and rows as a device would hold them."""

    block_size: int
    kv: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot -> (position, token)
    tables: dict[tuple[int, int], int] = field(default_factory=dict)  # (row, column) -> block
    last_token: dict[int, int] = field(default_factory=dict)
    noise: dict[int, tuple[int, int]] = field(default_factory=dict)  # row -> (seed, choice)

    def run(self, plan: Plan, batch: HostBatch, seqs: Sequences) -> np.ndarray:
        """Compute one step; returns a token for each sampling row."""
        self._introduce(plan, seqs)
        tokens = [
            self.last_token[row] if row >= 0 else token
            for row, token in zip(batch.src_rows.tolist(), batch.input_ids.tolist(), strict=True)
        ]
        slots = batch.slot_mapping.tolist()
        assert len(set(slots)) == len(slots), "two positions of one step write the same slot"
        segments = np.repeat(np.arange(batch.num_seqs), np.diff(batch.cu_seqlens_q)).tolist()
        writer = dict(zip(slots, segments, strict=True))
        self.kv.update(zip(slots, zip(batch.positions.tolist(), tokens, strict=True), strict=True))
        contexts = [self._context(batch, s, writer) for s in range(batch.num_seqs)]
        sampled = [
            self._sample(batch, int(logits), row, contexts)
            for logits, row in zip(batch.sample_logits, batch.sample_rows.tolist(), strict=True)
        ]
        return np.array(sampled, np.int32)

    def _introduce(self, plan: Plan, seqs: Sequences) -> None:
        for row in plan.starts.tolist():
            params = seqs.request[row].params
            seed, choice = int(seqs.seed[row]), int(seqs.choice[row])
            self.noise[row] = (seed, choice) if params.temperature else (0, 0)
            self.last_token[row] = int(seqs.token_ids[row][seqs.num_tokens[row] - 1])
        changes = list(zip(plan.table_rows.tolist(), plan.table_columns.tolist(), strict=True))
        assert len(set(changes)) == len(changes), "a block-table entry changes twice in one step"
        self.tables.update(zip(changes, plan.table_blocks.tolist(), strict=True))
        size = self.block_size
        copied = {
            target * size + i: self.kv[source * size + i]
            for source, target in plan.copies.tolist()
            for i in range(size)
            if source * size + i in self.kv
        }
        self.kv.update(copied)

    def _context(self, batch: HostBatch, s: int, writer: dict[int, int]) -> list[int]:
        """What sequence ``s`` sees: the tokens behind the KV its block table leads to."""
        row, size = int(batch.seq_rows[s]), self.block_size
        found = []
        for position in range(int(batch.context_lens[s])):
            slot = self.tables[row, position // size] * size + position % size
            at, token = self.kv[slot]
            assert at == position, f"the KV in slot {slot} is of position {at}, not {position}"
            assert writer.get(slot, s) == s, "a sequence reads what another one is writing"
            found.append(token)
        return found

    def _sample(self, batch: HostBatch, logits: int, row: int, contexts: list[list[int]]) -> int:
        at = int(batch.logits_rows[logits])
        s = int(np.searchsorted(batch.cu_seqlens_q, at, side="right")) - 1
        assert at == batch.cu_seqlens_q[s + 1] - 1, "logits are not taken at a sequence's end"
        token = next_token(contexts[s], *self.noise[row])
        self.last_token[row] = token
        return token


def check_batch(plan: Plan, batch: HostBatch) -> None:
    """Compare the vectorised batch with one made position by position from the plan's rows."""
    positions, slots, lens, ends = [], [], [], [0]
    for row in plan:
        span = range(row.num_cached, row.num_cached + row.num_scheduled)
        positions += span
        slots += [
            row.block_table[p // plan.block_size] * plan.block_size + p % plan.block_size
            for p in span
        ]
        lens.append(row.num_cached + row.num_scheduled)
        ends.append(len(positions))
        assert row.samples == (lens[-1] == row.num_known)
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.context_lens.tolist() == lens
    assert batch.cu_seqlens_q.tolist() == ends
    assert batch.seq_rows.tolist() == [row.row for row in plan]


def photograph(host: Host) -> Any:
    """Everything a host state says, as a value that nothing can change."""
    s = host.seqs
    busy = np.flatnonzero(s.status != Status.FREE).tolist()
    entries = sorted(host.prefix.by_block.items(), key=lambda item: item[0])
    return (
        [w.request.request_id for w in host.waiting.by_rank()],
        [
            getattr(s, f.name).tolist()
            for f in fields(s)
            if f.name.startswith("num_") or f.name in ("status", "epoch", "choice", "slot", "rank")
        ],
        [s.token_ids[row][: s.num_tokens[row]].tolist() for row in busy],
        [s.block_table[row][: s.num_blocks[row]].tolist() for row in busy],
        {name: tuple(rows) for name, rows in s.rows_of.items()},
        host.pool.free[: host.pool.num_free].tolist(),
        host.pool.ref_count.tolist(),
        host.pool.cached.tolist(),
        [(block, entry.entry_id, entry.digest) for block, entry in entries],
        (host.step, host.arrivals, host.in_flight, list(host.aborts), host.dirty),
    )


@dataclass
class Expected:
    """One sequence that was started, and what it must say."""

    prompt: tuple[int, ...]
    params: SamplingParams
    choice: int
    already: tuple[int, ...] = ()


class Simulation:
    """The engine loop over a fake device, with every check switched on.

    ``depth`` steps may be in flight besides the one being collected, as in the real loop.
    """

    def __init__(self, limits: Limits, depth: int = 0, *, invariants: bool = True) -> None:
        self.limits, self.depth, self.invariants = limits, depth, invariants
        self.host = hosts.make(limits)
        self.device = Device(limits.block_size)
        self.tickets: deque[tuple[Plan, np.ndarray]] = deque()
        self.plans: list[Plan] = []
        self.batches: list[HostBatch] = []
        self.expected: dict[tuple[str, int], Expected] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], FinishEvent] = {}
        self.aborted: set[str] = set()

    def check(self) -> None:
        """Every invariant function."""
        if self.invariants:
            hosts.check(self.host)

    def submit(self, *requests: Request) -> None:
        """Queue requests and remember what they must say."""
        self.host = hosts.submit(self.host, requests, self.limits)
        for one in requests:
            queued = self.host.waiting.live.get(one.request_id)
            assert queued is not None
            for choice in range(one.params.n):
                key = (one.request_id, choice)
                params = replace(queued.request.params, seed=queued.seed)
                self.expected[key] = Expected(one.prompt_token_ids, params, choice)
                self.tokens[key] = []

    def abort(self, name: str) -> None:
        """Mark a request, live or not."""
        if name in self.live():
            self.aborted.add(name)
        self.host = hosts.abort(self.host, name)

    def fork(self, name: str, new: str) -> None:
        """Fork a running request; the errors of ``fork`` pass through."""
        row = self.host.seqs.rows_of.get(name, (-1,))[0]
        self.host = hosts.fork(self.host, name, new, self.limits)
        seqs = self.host.seqs
        (twin,) = seqs.rows_of[new]
        prompt = seqs.request[row].prompt_token_ids
        known = tuple(seqs.token_ids[row][: seqs.num_tokens[row]].tolist())
        key = (new, int(seqs.choice[twin]))
        params = replace(seqs.request[twin].params, seed=int(seqs.seed[twin]))
        self.expected[key] = Expected(prompt, params, key[1], already=known[len(prompt) :])
        self.tokens[key] = []

    def live(self) -> list[str]:
        """Ids of requests that have not ended, in a fixed order."""
        waiting = {w.request.request_id for w in self.host.waiting.by_rank()}
        return sorted(waiting | set(self.host.seqs.rows_of))

    def launch(self) -> Plan:
        """Schedule, build and run one step."""
        before = self.host
        plan, self.host = scheduling.schedule(self.host, self.limits)
        batch = build(plan, self.host.seqs)
        if self.invariants:
            self._check_plan(before, plan)
            check_batch(plan, batch)
        self.tickets.append((plan, self.device.run(plan, batch, self.host.seqs)))
        self.plans.append(plan)
        self.batches.append(batch)
        self.check()
        return plan

    def _check_plan(self, before: Host, plan: Plan) -> None:
        rows = plan.rows.tolist()
        assert len(set(rows)) == len(rows) <= self.limits.max_num_seqs
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert (plan.num_scheduled > 0).all()
        sampling = plan.sample_rows.tolist()
        assert len(set(sampling)) == len(sampling) <= self.limits.max_num_seqs
        s = before.seqs
        ready = (s.status == Status.RUNNING) & (s.num_total - s.num_cached_tokens == 1)
        ready &= s.num_total < s.max_total_tokens
        ended = {event.request_id for event in plan.finished} | set(plan.preempted)
        for row in np.flatnonzero(ready).tolist():
            due = not plan.stalled and s.request[row].request_id not in ended
            assert not due or row in rows[: plan.num_decode], "a decode was passed over"
        if not plan.num_sequences and not plan.finished and not before.in_flight:
            assert not before.seqs.rows_of and not len(before.waiting), "nothing can move any more"

    def collect(self) -> Accepted:
        """Apply the oldest launched step."""
        plan, tokens = self.tickets.popleft()
        accepted, self.host = commit(self.host, self.limits, plan, tokens, token_bytes=TOKEN_BYTES)
        for one, choice, token in zip(
            accepted.requests, accepted.choices.tolist(), accepted.tokens.tolist(), strict=True
        ):
            key = (one.request_id, choice)
            assert key not in self.finished, "a token came after the end"
            self.tokens[key].append(token)
        for event in accepted.finished:
            key = (event.request_id, event.index)
            assert key not in self.finished, "a sequence ended twice"
            assert (
                event.num_generated_tokens
                == len(self.tokens[key]) + len(self.expected[key].already)
                or key[0] in self.aborted
            )
            self.finished[key] = event
        self.check()
        return accepted

    def turn(self) -> Plan:
        """One turn of the engine loop: launch, then collect all but the newest ``depth``."""
        plan = self.launch()
        keep = self.depth if plan.num_sequences else 0
        while len(self.tickets) > keep:
            self.collect()
        return plan

    def run(self, max_turns: int = 10_000) -> Simulation:
        """Turn until nothing is left, then compare everything with the reference."""
        for _ in range(max_turns):
            if not hosts.has_work(self.host):
                break
            self.turn()
        else:
            raise AssertionError(f"still busy after {max_turns} turns")
        self.check_end()
        return self

    def check_end(self) -> None:
        """Nothing held, nothing lost, and every token as ``answer`` says."""
        pool = self.host.pool
        assert not self.tickets and not self.host.in_flight
        assert not (self.host.seqs.status != Status.FREE).any() and not len(self.host.waiting)
        assert (pool.ref_count == 0).all(), "an ended sequence still holds a block"
        assert pool.num_free + pool.num_reusable == pool.num_blocks, "a block is lost"
        assert self.finished.keys() == self.expected.keys(), "a sequence is lost"
        for key, want in self.expected.items():
            tokens, reason = answer(
                want.prompt, want.params, want.choice, self.limits.max_model_len, want.already
            )
            got, event = self.tokens[key], self.finished[key]
            if event.reason == FinishReason.ABORT:
                assert key[0] in self.aborted
                assert got == tokens[: len(got)], f"{key}: {got} is not how {tokens} begins"
            else:
                assert (got, event.reason) == (tokens, reason), f"{key}: wanted {tokens}"
