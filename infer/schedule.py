"""Which sequences run in the next step, with how many positions and on which blocks.

``schedule`` is pure: it works on copies and returns a plan and the host state after the launch.
Decodes come first, one position each; the rest of the token budget goes to prompts by rank, in
chunks. When blocks run out, the highest rank gives its blocks back and recomputes later.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from infer import admission, cohort, rounds, sequences, steady
from infer.blocks import Int32, Int64
from infer.config import Limits
from infer.host import Host, adopt, finish_event, generated, register_blocks, retire
from infer.persistent import Fifo
from infer.plan import Plan
from infer.prefix import Draft
from infer.rounds import Round
from infer.sequences import FREE, PROMPT_LOGPROBS, RESERVED, RUNNING, Sequences
from infer.types import FinishEvent, FinishReason

_EMPTY = np.empty(0, np.int32)


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
    r = Round(
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
        admission.schedule_prompts(r, waiting)
        if not r.decode.size and not r.rows:
            admission.unblock(r, waiting)
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


def _apply_aborts(r: Round, host: Host) -> list[str]:
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


def _schedule_decodes(r: Round) -> None:
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
        if rounds.must_collect(r):
            return
        rounds.preempt_last(r)
    for row in rows[shared].tolist():
        rounds.own_tail(r, row)
    growing = rows[grows]
    if growing.size:
        columns = s.num_blocks[growing]
        new = r.draft.take(growing.size)
        sequences.append_block_each(s, growing, new)
        r.deltas.append((growing.astype(np.int32), columns, new))
    r.decode = rows
    r.budget -= rows.size


def _advance(r: Round, host: Host) -> Plan:
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
    asked = np.flatnonzero(s.need[rows] & PROMPT_LOGPROBS).astype(np.int32)
    if not asked.size:
        return _EMPTY
    prompt = s.num_prompt_tokens[rows[asked]]
    # A preempted sequence that has generated already told them.
    telling: Int32 = asked[(cached[asked] < prompt) & (s.num_tokens[rows[asked]] == prompt)]
    return telling


def _table_changes(r: Round, dirty: tuple[int, ...]) -> tuple[Int32, Int32, Int32]:
    """Block-table entries for the device, no entry twice: (rows, columns, blocks)."""
    deltas = [(_EMPTY, _EMPTY, _EMPTY), *r.deltas]
    rows, columns, new = (np.concatenate(part) for part in zip(*deltas, strict=True))
    if not dirty:
        return rows, columns, new
    kept = ~np.isin(rows, dirty)  # the others send their whole tables
    r.deltas = [(rows[kept], columns[kept], new[kept])]
    for row in dirty:
        if r.seqs.num_blocks[row]:
            rounds.upload_table(r, row, 0)
    return _table_changes(r, ())


def _sampling_rows(r: Round, rows: Int64, samples: Int64) -> tuple[Int32, Int64]:
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
                rounds.upload_table(r, twin, 0)
                group.append(twin)
        seqs_out += [i] * len(group)
        rows_out += group
    return np.array(seqs_out, np.int32), np.array(rows_out, np.int64)
