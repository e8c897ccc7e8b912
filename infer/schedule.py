"""Which sequences run in the next step, with how many positions and on which blocks.

``schedule`` is pure: it works on copies and returns a plan and the host state after the launch.
Decodes come first, one position each; the rest of the token budget goes to prompts by rank, in
chunks. When blocks run out, the highest rank gives its blocks back and recomputes later.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np

from infer import cohort, sequences, steady
from infer.blocks import Int32, Int64
from infer.config import Limits
from infer.host import (
    Host,
    adopt,
    finish_event,
    free_slots,
    generated,
    register_blocks,
    retire,
)
from infer.persistent import Fifo
from infer.plan import Plan
from infer.prefix import Draft, Entry, digests
from infer.sequences import FREE, PREEMPTED, RESERVED, RUNNING, Need, Sequences, WaitingRequest
from infer.types import FinishEvent, FinishReason

_EMPTY = np.empty(0, np.int32)
MAX_DEFERRED = 64  # requests a step looks past because their prefix is being computed
WATERMARK_SHARE = 100  # admissions leave 1/100 of the pool to sequences that are growing


@dataclass(slots=True)
class _Round:
    """One call's working copies and what it has decided so far."""

    seqs: Sequences
    draft: Draft
    limits: Limits
    budget: int
    # Rows that lack one position; int64, which numpy indexes with several times faster.
    decode: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    rows: list[int] = field(default_factory=list)  # and those that compute a prompt, with
    chunks: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    deltas: list[tuple[Int32, Int32, Int32]] = field(default_factory=list)  # rows, columns, blocks
    starts: list[int] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)  # left the queue
    preempted: list[str] = field(default_factory=list)
    finished: list[FinishEvent] = field(default_factory=list)
    outputs: list[Int32] = field(default_factory=list)
    prefix_queries: int = 0
    prefix_hits: int = 0
    queue_open: bool = True  # false once a request had no row or no blocks: none may overtake it
    stalled: bool = False


def schedule(host: Host, limits: Limits) -> tuple[Plan, Host]:
    """The next step, and the state after its launch: ``index_prompts`` after ``decide``."""
    plan, host = decide(host, limits)
    return plan, index_prompts(plan, host, limits)


def decide(host: Host, limits: Limits) -> tuple[Plan, Host]:
    """Decide the next step. Lengths in the returned state are those after its launch."""
    return steady.next_step(host, limits) or _by_all_rules(host, limits)


def index_prompts(plan: Plan, host: Host, limits: Limits) -> Host:
    """Index the prompt blocks that ``plan`` fills, so that later steps can hit them.

    ``host`` is what ``decide`` returned. The device can begin the step before this is done.
    """
    if not limits.prefix_caching or plan.num_sequences == plan.num_decode:
        return host
    old, size = host.seqs, limits.block_size
    registered, tails = old.num_registered.copy(), old.prefix_tail.copy()
    seqs = sequences.changed(old, num_registered=registered, prefix_tail=tails)
    draft = Draft.of(host.pool, host.prefix)
    computed = (plan.num_cached + plan.num_scheduled).tolist()
    for row, end in list(zip(plan.rows.tolist(), computed, strict=True))[plan.num_decode :]:
        register_blocks(seqs, draft, row, min(end, int(seqs.num_tokens[row])) // size, size)
    pool, index = draft.freeze()
    return replace(host, seqs=seqs, pool=pool, prefix=index)


def _by_all_rules(host: Host, limits: Limits) -> tuple[Plan, Host]:
    r = _Round(
        seqs=sequences.copy(host.seqs),
        draft=Draft.of(host.pool, host.prefix),
        limits=limits,
        budget=limits.max_num_batched_tokens,
    )
    gone = _apply_aborts(r, host)
    waiting = sequences.withdraw(host.waiting, gone)
    r.starts += (row for row in host.dirty if r.seqs.status[row] != FREE)
    _schedule_decodes(r)
    if not r.stalled and (len(waiting) or r.decode.size < np.count_nonzero(r.seqs.status)):
        _schedule_prompts(r, waiting)
        if not r.decode.size and not r.rows:
            _unblock(r, waiting)
    plan = _advance(r, host)
    pool, index = r.draft.freeze()
    return plan, replace(
        host,
        waiting=sequences.withdraw(waiting, r.taken),
        seqs=r.seqs,
        pool=pool,
        prefix=index,
        step=host.step + 1,
        in_flight=host.in_flight + 1,
        aborts=Fifo(),
        dirty=(),
        cohort=plan.cohort,
    )


def _apply_aborts(r: _Round, host: Host) -> list[str]:
    """End the marked requests; returns those that were still waiting."""
    gone = []
    for name in dict.fromkeys(host.aborts):
        rows = r.seqs.rows_of.get(name)
        if rows is not None:
            r.finished += [finish_event(r.seqs, row, FinishReason.ABORT) for row in rows]
            r.outputs += [generated(r.seqs, row) for row in rows]
            retire(r.seqs, r.draft, rows)
        elif (item := host.waiting.live.get(name)) is not None:
            gone.append(name)
            r.finished += [
                FinishEvent(name, i, FinishReason.ABORT, num_prompt_tokens=item.tokens.size)
                for i in range(item.request.params.n)
            ]
            r.outputs += [_EMPTY] * item.request.params.n
    return gone


def _upload_table(r: _Round, row: int, start: int) -> None:
    """Send the device the entries of a row's block table from column ``start`` on."""
    new = sequences.table(r.seqs, row)[start:]
    columns = np.arange(start, start + new.size, dtype=np.int32)
    r.deltas.append((np.full(new.size, row, np.int32), columns, new))


def _schedule_decodes(r: _Round) -> None:
    """Give every sequence that lacks one position its step."""
    s, size = r.seqs, r.limits.block_size
    while True:
        total = s.num_total
        ready = (
            (s.status == RUNNING)
            & (total - s.num_cached_tokens == 1)
            & (total < s.max_total_tokens)
        )
        rows = np.flatnonzero(ready)
        grows = s.num_cached_tokens[rows] == s.num_blocks[rows] * size
        shared = ~grows & (r.draft.pool.ref_count[s.last_block[rows]] > 1)
        if r.draft.reserve(int(np.count_nonzero(grows) + np.count_nonzero(shared))):
            break
        if _must_collect(r):
            return
        _preempt_last(r)
    for row in rows[shared].tolist():
        _own_tail(r, row)
    growing = rows[grows]
    if growing.size:
        columns = s.num_blocks[growing]
        new = r.draft.take(growing.size)
        sequences.append_block_each(s, growing, new)
        r.deltas.append((growing.astype(np.int32), columns, new))
    r.decode = rows
    r.budget -= rows.size


def _must_collect(r: _Round) -> bool:
    """Before a preemption: tokens that were launched may end sequences and free their blocks."""
    r.stalled = bool(r.seqs.num_pending.any())
    return r.stalled


def _own_tail(r: _Round, row: int) -> None:
    """Before a write into a partial block that others hold too: copy it. One was reserved."""
    old = int(r.seqs.last_block[row])
    if r.draft.pool.ref_count[old] == 1:
        return  # the other holders have just taken copies
    new = r.draft.take(1)
    r.draft.release(np.array([old], np.int32))
    sequences.replace_last_block(r.seqs, row, int(new[0]))
    r.copies.append((old, int(new[0])))
    _upload_table(r, row, int(r.seqs.num_blocks[row]) - 1)


def _preempt_last(r: _Round) -> None:
    """The running sequence of the highest rank gives its blocks back and keeps its tokens."""
    s = r.seqs
    holders = np.flatnonzero(s.num_blocks > 0)
    assert holders.size, "the pool holds at least one sequence of max_model_len"
    row = int(holders[np.lexsort((holders, s.rank[holders]))[-1]])
    r.draft.release(sequences.table(s, row))
    sequences.preempt(s, row)
    r.preempted.append(s.request[row].request_id)


def _candidates(
    r: _Round, waiting: sequences.Waiting
) -> Iterator[tuple[int, int, WaitingRequest | None]]:
    """(rank, row or -1, waiting request or None) of everything that needs a prompt computed."""
    s = r.seqs
    total = s.num_total
    partial = (s.status == RUNNING) & (total - s.num_cached_tokens > 1)
    rows = np.flatnonzero(partial | (s.status == PREEMPTED))
    admitted = sorted((int(s.rank[row]), row, None) for row in rows.tolist())
    queued = ((w.rank, -1, w) for w in takewhile(lambda _: r.queue_open, waiting.by_rank()))
    return heapq.merge(admitted, queued, key=lambda c: c[0])


def _schedule_prompts(r: _Round, waiting: sequences.Waiting) -> None:
    """Spend the rest of the budget on prompts, by rank.

    What cannot be admitted is not overtaken by what comes after it, with two exceptions, which
    hold what it waits for: half computed prompts go on, and a request that lacks a row lets
    preempted sequences, which have theirs, come back.
    """
    s, size = r.seqs, r.limits.block_size
    partial = (s.status == RUNNING) & (s.num_total - s.num_cached_tokens > 1)
    promised = sum(_missing_blocks(s, row, size) for row in np.flatnonzero(partial).tolist())
    deferred, fits = 0, True
    for _, row, item in _candidates(r, waiting):
        if r.budget == 0:
            return
        if row >= 0 and s.status[row] == RUNNING:
            promised -= _missing_blocks(s, row, size)
        else:
            if item is not None:
                r.queue_open = r.queue_open and deferred < MAX_DEFERRED and _has_rows(r, item)
            if not fits or (item is not None and not r.queue_open):
                continue
            spare = r.draft.pool.num_available - promised - _watermark(r)
            entries, later = _lookup(r, row, item) if spare > 0 else ([], False)
            if later:
                deferred += 1
                continue
            if _blocks_for(r, row, item, entries) > spare:
                fits = r.queue_open = False
                continue
            row = _admit(r, row, item, entries)
        chunk = _chunk(r, row)
        if chunk == 0:
            return
        r.rows.append(row)
        r.chunks.append(chunk)
        r.budget -= chunk
        promised += _missing_blocks(s, row, size)
        if r.limits.prefix_caching:
            full = (int(s.num_cached_tokens[row]) + chunk) // size
            r.draft.coming.update(s.digests[row][s.num_registered[row] : full])


def _missing_blocks(s: Sequences, row: int, size: int) -> int:
    """Blocks that ``row`` needs beside its own for all of its tokens."""
    return int(-(-(s.num_tokens[row] + s.num_pending[row]) // size) - s.num_blocks[row])


def _has_rows(r: _Round, item: WaitingRequest) -> bool:
    n = item.request.params.n
    if np.count_nonzero(r.seqs.status == FREE) < n:
        return False
    return not item.need & Need.PENALTIES or len(free_slots(r.seqs, r.limits, n)) == n


def _lookup(r: _Round, row: int, item: WaitingRequest | None) -> tuple[list[Entry], bool]:
    """Prefix entries for an admission. At least one position is left to compute."""
    if item is not None:
        tokens, chain, request = item.tokens, item.digests, item.request
    else:
        tokens, request = sequences.tokens(r.seqs, row), r.seqs.request[row]
        chain = r.seqs.digests[row]
    if not r.limits.prefix_caching or request.params.prompt_logprobs is not None:
        return [], False
    size = r.limits.block_size
    limit = (tokens.size - 1) // size
    if item is None and len(chain) < limit:  # generated blocks of a preempted sequence
        r.seqs.digests[row] = chain = digests(tokens, size, request.cache_salt, chain)
    return r.draft.match(chain, tokens, size, request.cache_salt, limit)


def _watermark(r: _Round) -> int:
    """Blocks that admissions leave to the sequences that run."""
    return max(1, r.limits.num_blocks // WATERMARK_SHARE) if r.seqs.num_blocks.any() else 0


def _blocks_for(r: _Round, row: int, item: WaitingRequest | None, entries: list[Entry]) -> int:
    """Blocks that all known tokens of an admission take out of those available."""
    length = item.tokens.size if item is not None else int(r.seqs.num_tokens[row])
    held = np.count_nonzero(r.draft.pool.ref_count[[e.block for e in entries]])
    return int(-(-length // r.limits.block_size) - held)


def _admit(r: _Round, row: int, item: WaitingRequest | None, entries: list[Entry]) -> int:
    """Give a waiting request its rows, or a preempted sequence its blocks again."""
    s, size = r.seqs, r.limits.block_size
    if item is not None:
        row = _place(r, item)
    hit = len(entries) * size
    s.status[row] = RUNNING
    if r.limits.prefix_caching:
        r.prefix_queries += int(s.num_tokens[row])
        r.prefix_hits += hit
    if s.num_hit_tokens[row] < 0:
        s.num_hit_tokens[row] = hit
    s.num_cached_tokens[row] = hit
    s.num_registered[row] = len(entries)
    if entries:
        sequences.append_blocks(s, row, r.draft.use(entries))
        s.prefix_tail[row] = entries[-1]
        _upload_table(r, row, 0)
    return row


def _place(r: _Round, item: WaitingRequest) -> int:
    s, request = r.seqs, item.request
    n = request.params.n
    rows = np.flatnonzero(s.status == FREE)[:n].tolist()
    slots = [-1] * n
    if item.need & Need.PENALTIES:
        slots = free_slots(s, r.limits, n)
    for choice, row in enumerate(rows):
        sequences.place(
            s,
            row,
            request,
            item.tokens,
            choice=choice,
            rank=item.rank,
            max_total_tokens=item.max_total_tokens,
            digests=item.digests,
            need=item.need,
            slot=slots[choice],
            status=RESERVED,
        )
    s.rows_of[request.request_id] = tuple(rows)  # type: ignore[index]  # private copy
    r.taken.append(request.request_id)
    r.admitted.append(request.request_id)
    r.starts += rows
    return int(rows[0])


def _chunk(r: _Round, row: int) -> int:
    """Allocate for as many positions of ``row`` as budget and pool allow; returns how many."""
    s, size = r.seqs, r.limits.block_size
    cached, held = int(s.num_cached_tokens[row]), int(s.num_blocks[row])
    todo = int(s.num_tokens[row] + s.num_pending[row]) - cached
    if cached < held * size and r.draft.pool.ref_count[s.last_block[row]] > 1:
        if not r.draft.reserve(1):
            return 0
        _own_tail(r, row)
    room = (held + r.draft.pool.num_available) * size - cached
    chunk = min(r.budget, todo, room)
    count = -(-(cached + chunk) // size) - held
    if count > 0:
        assert r.draft.reserve(count), "the chunk was cut to what is available"
        sequences.append_blocks(s, row, r.draft.take(count))
        _upload_table(r, row, held)
    return chunk


def _unblock(r: _Round, waiting: sequences.Waiting) -> None:
    """Nothing could run although prompts are half computed: they hold each other's blocks."""
    for _ in range(r.seqs.num_rows):
        if r.rows or np.count_nonzero(r.seqs.num_blocks) < 2 or _must_collect(r):
            return
        _preempt_last(r)
        r.queue_open = True
        _schedule_prompts(r, waiting)


def _advance(r: _Round, host: Host) -> Plan:
    """Move lengths past the launch and write the plan down."""
    s = r.seqs
    rows, chunks = r.decode, np.ones(r.decode.size, np.int32)
    if r.rows:
        rows = np.concatenate([rows, np.array(r.rows, np.int64)])
        chunks = np.concatenate([chunks, np.array(r.chunks, np.int32)])
    known, cached = s.num_total[rows], s.num_cached_tokens[rows]
    reached = cached + chunks
    s.num_cached_tokens[rows] = reached
    samples = np.flatnonzero(reached == known)
    s.num_pending[rows[samples]] += 1
    sample_seqs, sample_rows = _sampling_rows(r, rows, samples)
    table_rows, table_columns, table_blocks = _table_changes(r, host.dirty)
    eos = r.limits.defaults.eos_token_ids
    return Plan(
        step=host.step,
        rows=rows.astype(np.int32),
        num_prompt=s.num_prompt_tokens[rows],
        num_known=known,
        num_cached=cached,
        num_scheduled=chunks,
        samples=samples.astype(np.int32),
        sample_seqs=sample_seqs,
        sample_rows=sample_rows.astype(np.int32),
        sample_epochs=s.epoch[sample_rows],
        prompt_logprobs=_prompt_logprobs(s, rows, cached),
        copies=np.array(r.copies, np.int32).reshape(-1, 2),
        table_rows=table_rows,
        table_columns=table_columns,
        table_blocks=table_blocks,
        starts=np.array(r.starts, np.int32),
        need=int(np.bitwise_or.reduce(s.need[sample_rows], initial=0)),
        num_decode=r.decode.size,
        requests=s.request[rows],
        choices=s.choice[rows],
        tables=s.block_table,
        block_size=r.limits.block_size,
        admitted=tuple(r.admitted),
        preempted=tuple(r.preempted),
        finished=tuple(r.finished),
        outputs=tuple(r.outputs),
        prefix_queries=r.prefix_queries,
        prefix_hits=r.prefix_hits,
        stalled=r.stalled,
        cohort=None if r.rows else cohort.gather(s, rows, known, host.step, eos),
    )


def _prompt_logprobs(s: Sequences, rows: Int64, cached: Int32) -> Int32:
    """Indices of sequences that compute a prompt whose log-probabilities were asked for."""
    asked = np.flatnonzero(s.need[rows] & int(Need.PROMPT_LOGPROBS)).astype(np.int32)
    if not asked.size:
        return _EMPTY
    prompt = s.num_prompt_tokens[rows[asked]]
    # A preempted sequence that has generated already told them.
    telling: Int32 = asked[(cached[asked] < prompt) & (s.num_tokens[rows[asked]] == prompt)]
    return telling


def _table_changes(r: _Round, dirty: tuple[int, ...]) -> tuple[Int32, Int32, Int32]:
    """Block-table entries for the device, no entry twice: (rows, columns, blocks)."""
    deltas = [(_EMPTY, _EMPTY, _EMPTY), *r.deltas]
    rows, columns, new = (np.concatenate(part) for part in zip(*deltas, strict=True))
    if not dirty:
        return rows, columns, new
    kept = ~np.isin(rows, dirty)  # the others send their whole tables
    r.deltas = [(rows[kept], columns[kept], new[kept])]
    for row in dirty:
        if r.seqs.num_blocks[row]:
            _upload_table(r, row, 0)
    return _table_changes(r, ())


def _sampling_rows(r: _Round, rows: Int64, samples: Int64) -> tuple[Int32, Int64]:
    """Rows that receive a token. A prompt's further choices join when it is complete."""
    s = r.seqs
    targets = rows[samples]
    if not (s.status == RESERVED).any():
        return np.arange(samples.size, dtype=np.int32), targets
    seqs_out: list[int] = []
    rows_out: list[int] = []
    for i, row in enumerate(targets.tolist()):
        group = [row]
        for twin in s.rows_of[s.request[row].request_id]:
            if s.status[twin] == RESERVED:
                slot, choice = int(s.slot[twin]), int(s.choice[twin])
                adopt(s, r.draft, row, twin, s.request[row], choice=choice, slot=slot)
                _upload_table(r, twin, 0)
                group.append(twin)
        seqs_out += [i] * len(group)
        rows_out += group
    return np.array(seqs_out, np.int32), np.array(rows_out, np.int64)
