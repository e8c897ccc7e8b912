"""What a collected step means: accept its tokens, stop sequences, index and free their blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from infer import sequences
from infer.blocks import Int32, Int64
from infer.cohort import Cohort
from infer.config import Limits
from infer.host import Host, finish_event, generated, register_blocks, retire
from infer.plan import Plan
from infer.prefix import Draft
from infer.sequences import Objects, Sequences
from infer.text import stop_scan
from infer.types import FinishEvent, FinishReason


@dataclass(frozen=True, slots=True)
class Accepted:
    """The tokens a step added, and the sequences it ended. N tokens, in batch order."""

    requests: Objects  # object[N], Request
    choices: Int32  # i32[N]
    tokens: Int32  # i32[N]
    sampled: Int32  # i32[N], indices into the plan's sampling rows
    finished: tuple[FinishEvent, ...]
    outputs: tuple[Int32, ...]  # generated tokens of each of ``finished``


def commit(
    host: Host,
    limits: Limits,
    plan: Plan,
    tokens: Int32,
    *,
    token_bytes: Sequence[bytes] = (),
    failed: npt.NDArray[np.bool_] | None = None,
) -> tuple[Accepted, Host]:
    """Apply the values of a launched step to the current host state.

    Args:
        tokens: i32[M], one for each of ``plan.sample_rows``.
        token_bytes: id to bytes, for stop strings; empty when the model has no tokenizer.
        failed: bool[M], rows whose logits were not numbers; they end with an error.

    Rows whose epoch has changed since the launch were given up: their tokens are dropped.
    """
    if not plan.sample_rows.size and not plan.finished:
        return Accepted(_NO_OBJECTS, _EMPTY, _EMPTY, _EMPTY, (), ()), _settled(host)
    if plan.cohort is not None and _all_go_on(host, plan, plan.cohort, tokens, failed):
        return _go_on(host, limits, plan, plan.cohort, tokens)
    seqs = sequences.copy_for_tokens(host.seqs)
    rows = plan.sample_rows.astype(np.int64)  # numpy indexes with these several times faster
    current = seqs.epoch[rows] == plan.sample_epochs
    ended: dict[int, FinishEvent] = {}
    if failed is not None and failed.any():
        for row in rows[current & failed].tolist():
            ended[row] = finish_event(seqs, row, FinishReason.ERROR, error=_NOT_NUMBERS)
        current &= ~failed
    failures = list(ended)
    sampled = np.flatnonzero(current)
    rows, values = rows[sampled], tokens[sampled].astype(np.int32)
    sequences.append_tokens(seqs, rows, values)
    _end(ended, seqs, rows, values, limits, token_bytes)
    accepted = Accepted(
        requests=seqs.request[rows],
        choices=seqs.choice[rows],
        tokens=values,
        sampled=sampled.astype(np.int32),
        finished=(*plan.finished, *ended.values()),
        outputs=(*plan.outputs, *(generated(seqs, row) for row in ended)),
    )
    draft = Draft.of(host.pool, host.prefix)
    if limits.prefix_caching:
        due, counts = _full_blocks(seqs, rows, ended, limits.block_size)
        _register(seqs, draft, due, counts, limits.block_size)
        for row in failures:  # their KV may not be numbers either
            draft.forget(sequences.table(seqs, row))
    if ended:  # else the rows stay what they were, and so does a cohort of theirs
        seqs = sequences.copy(seqs)
        retire(seqs, draft, list(ended))
    pool, index = draft.freeze()
    return accepted, replace(_settled(host), seqs=seqs, pool=pool, prefix=index)


_NOT_NUMBERS = "the model produced logits that are not numbers"
_EMPTY = np.empty(0, np.int32)
_NO_OBJECTS = np.empty(0, np.object_)


def _all_go_on(
    host: Host,
    plan: Plan,
    cohort: Cohort,
    tokens: Int32,
    failed: npt.NDArray[np.bool_] | None,
) -> bool:
    """Whether it is plain at once that every row accepts its token and none ends with it."""
    return (
        cohort.holds(host.seqs)
        and plan.step < cohort.last_step
        and not cohort.has_stops
        and (failed is None or not np.count_nonzero(failed))
        and cohort.eos.isdisjoint(tokens.tolist())
    )


def _go_on(
    host: Host, limits: Limits, plan: Plan, cohort: Cohort, tokens: Int32
) -> tuple[Accepted, Host]:
    """``commit`` where every row of a cohort accepts its token and none ends."""
    seqs, values = host.seqs, tokens.astype(np.int32)
    pool, index = host.pool, host.prefix
    outgrown = sequences.with_items(seqs.token_ids, seqs.num_tokens, cohort.index, values.tolist())
    seqs = sequences.changed(
        seqs,
        num_tokens=seqs.num_tokens + cohort.marks,
        num_pending=seqs.num_pending - cohort.marks,
        token_ids=sequences.replaced(seqs.token_ids, outgrown),
    )
    if limits.prefix_caching:
        due, counts = _full_blocks(seqs, cohort.index, {}, limits.block_size)
        if due.size:
            registered, tails = seqs.num_registered.copy(), seqs.prefix_tail.copy()
            seqs = sequences.changed(seqs, num_registered=registered, prefix_tail=tails)
            draft = Draft.of(pool, index)
            _register(seqs, draft, due, counts, limits.block_size)
            pool, index = draft.freeze()
    accepted = Accepted(
        requests=cohort.requests,
        choices=cohort.choices,
        tokens=values,
        sampled=cohort.order,
        finished=plan.finished,
        outputs=plan.outputs,
    )
    return accepted, Host(
        waiting=host.waiting,
        seqs=seqs,
        pool=pool,
        prefix=index,
        step=host.step,
        arrivals=host.arrivals,
        in_flight=host.in_flight - 1,
        aborts=host.aborts,
        dirty=host.dirty,
        cohort=host.cohort,
    )


def _settled(host: Host) -> Host:
    return replace(host, in_flight=host.in_flight - 1)


def _end(
    ended: dict[int, FinishEvent],
    seqs: Sequences,
    rows: Int64,
    values: Int32,
    limits: Limits,
    token_bytes: Sequence[bytes],
) -> None:
    """Add to ``ended`` the sequences that end with their newest token, by row."""
    may_stop = seqs.num_tokens[rows] > seqs.min_total_tokens[rows]
    eos = np.array(limits.defaults.eos_token_ids, np.int32)
    is_eos = (values == eos[:, None]).any(axis=0)
    for row in rows[may_stop & is_eos & seqs.stop_on_eos[rows]].tolist():
        ended[row] = finish_event(seqs, row, FinishReason.STOP)
    for i in np.flatnonzero(seqs.check_stops[rows]).tolist():
        row, token = int(rows[i]), int(values[i])
        stop = _own_stop(seqs, row, token, bool(may_stop[i]), token_bytes)
        if stop is not None and row not in ended:
            ended[row] = finish_event(seqs, row, FinishReason.STOP, stop)
    for row in rows[seqs.num_tokens[rows] >= seqs.max_total_tokens[rows]].tolist():
        if row not in ended:
            ended[row] = finish_event(seqs, row, FinishReason.LENGTH)


def _own_stop(
    seqs: Sequences, row: int, token: int, may_stop: bool, token_bytes: Sequence[bytes]
) -> str | int | None:
    """The request's stop token or stop string that ``token`` completes. Moves the row's tail on."""
    params = seqs.request[row].params
    if token in params.stop_token_ids and may_stop:
        return token
    if not params.stop or not token_bytes:
        return None
    stops = tuple(text.encode("utf-8", "surrogatepass") for text in params.stop)
    match, seqs.stop_tail[row] = stop_scan(seqs.stop_tail[row], token_bytes[token], stops)
    if match is None or not may_stop:
        return None
    stop: str = params.stop[match.index]
    return stop


def _full_blocks(
    seqs: Sequences, rows: Int64, ended: Mapping[int, FinishEvent], size: int
) -> tuple[Int64, Int32]:
    """Those of ``rows`` with blocks to index, and how many are full of known, computed tokens."""
    known = seqs.num_tokens[rows]
    if ended:
        # The last token of an ended sequence may have KV from a step launched before its end was
        # known; leaving it out keeps the index the same however far ahead steps are launched.
        known[[i for i, row in enumerate(rows.tolist()) if row in ended]] -= 1
    full = np.minimum(known, seqs.num_cached_tokens[rows]) // size
    (new,) = (full > seqs.num_registered[rows]).nonzero()
    return rows[new], full[new]


def _register(seqs: Sequences, draft: Draft, rows: Int64, counts: Int32, size: int) -> None:
    """Index the first ``counts[i]`` blocks of ``rows[i]``. Sequences donated."""
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        register_blocks(seqs, draft, row, count, size)
