"""Prompts of a step: who is admitted, with which blocks of others, and how much is computed."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import takewhile

import numpy as np

from infer import rounds, sequences
from infer.blocks import Bool
from infer.host import free_slots
from infer.prefix import Entry, digests
from infer.rounds import Round
from infer.sequences import (
    FREE,
    PENALTIES,
    PREEMPTED,
    RESERVED,
    RUNNING,
    Sequences,
    WaitingRequest,
)

MAX_DEFERRED = 64  # requests a step looks past because their prefix is being computed
WATERMARK_SHARE = 100  # admissions leave 1/100 of the pool to sequences that are growing


def _candidates(
    r: Round, waiting: sequences.Waiting, partial: Bool
) -> Iterator[tuple[int, int, WaitingRequest | None]]:
    """(rank, row or -1, waiting request or None) of everything that needs a prompt computed."""
    s = r.seqs
    rows = np.flatnonzero(partial | (s.status == PREEMPTED))
    admitted = sorted((int(s.rank[row]), row, None) for row in rows.tolist())
    queued = ((w.rank, -1, w) for w in takewhile(lambda _: r.queue_open, waiting.by_rank()))
    return heapq.merge(admitted, queued, key=lambda c: c[0])


def schedule_prompts(r: Round, waiting: sequences.Waiting) -> None:
    """Spend the rest of the budget on prompts, by rank.

    What cannot be admitted is not overtaken by what comes after it, with two exceptions, which
    hold what it waits for: half computed prompts go on, and a request that lacks a row lets
    preempted sequences, which have theirs, come back.
    """
    s, size = r.seqs, r.limits.block_size
    partial = (s.status == RUNNING) & (s.num_total - s.num_cached_tokens > 1)
    promised = sum(_missing_blocks(s, row, size) for row in np.flatnonzero(partial).tolist())
    deferred, fits = 0, True
    for _, row, item in _candidates(r, waiting, partial):
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


def _has_rows(r: Round, item: WaitingRequest) -> bool:
    n = item.request.params.n
    if np.count_nonzero(r.seqs.status == FREE) < n:
        return False
    return not item.need & PENALTIES or len(free_slots(r.seqs, r.limits, n)) == n


def _lookup(r: Round, row: int, item: WaitingRequest | None) -> tuple[list[Entry], bool]:
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


def _watermark(r: Round) -> int:
    """Blocks that admissions leave to the sequences that run."""
    return max(1, r.limits.num_blocks // WATERMARK_SHARE) if r.seqs.num_blocks.any() else 0


def _blocks_for(r: Round, row: int, item: WaitingRequest | None, entries: list[Entry]) -> int:
    """Blocks that all known tokens of an admission take out of those available."""
    length = item.tokens.size if item is not None else int(r.seqs.num_tokens[row])
    held = np.count_nonzero(r.draft.pool.ref_count[[e.block for e in entries]])
    return int(-(-length // r.limits.block_size) - held)


def _admit(r: Round, row: int, item: WaitingRequest | None, entries: list[Entry]) -> int:
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
        rounds.upload_table(r, row, 0)
    return row


def _place(r: Round, item: WaitingRequest) -> int:
    s, name = r.seqs, item.request.request_id
    n = item.request.params.n
    rows = np.flatnonzero(s.status == FREE)[:n].tolist()
    slots = [-1] * n
    if item.need & PENALTIES:
        slots = free_slots(s, r.limits, n)
    for choice, row in enumerate(rows):
        sequences.place(
            s,
            row,
            item,
            choice=choice,
            slot=slots[choice],
            status=RESERVED,
        )
    s.rows_of[name] = tuple(rows)  # type: ignore[index]  # private copy
    r.taken.append(name)
    r.admitted.append(name)
    r.starts += rows
    return int(rows[0])


def _chunk(r: Round, row: int) -> int:
    """Allocate for as many positions of ``row`` as budget and pool allow; returns how many."""
    s, size = r.seqs, r.limits.block_size
    cached, held = int(s.num_cached_tokens[row]), int(s.num_blocks[row])
    todo = int(s.num_tokens[row] + s.num_pending[row]) - cached
    if cached < held * size and r.draft.pool.ref_count[s.last_block[row]] > 1:
        if not r.draft.reserve(1):
            return 0
        rounds.own_tail(r, row)
    room = (held + r.draft.pool.num_available) * size - cached
    chunk = min(r.budget, todo, room)
    count = -(-(cached + chunk) // size) - held
    if count > 0:
        assert r.draft.reserve(count), "the chunk was cut to what is available"
        sequences.append_blocks(s, row, r.draft.take(count))
        rounds.upload_table(r, row, held)
    return chunk


def unblock(r: Round, waiting: sequences.Waiting) -> None:
    """Nothing could run although prompts are half computed: they hold each other's blocks."""
    for _ in range(r.seqs.num_rows):
        if r.rows or np.count_nonzero(r.seqs.num_blocks) < 2 or rounds.must_collect(r):
            return
        rounds.preempt_last(r)
        r.queue_open = True
        schedule_prompts(r, waiting)
