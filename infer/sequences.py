"""Admitted sequences as a struct of arrays, and the queue of requests that wait for a row.

A sequence keeps its row from admission to its end, also while preempted. Its lengths are:

- ``num_tokens``: tokens whose values the host knows (prompt and accepted output);
- ``num_pending``: tokens sampled by launched steps and not read yet;
- ``num_cached_tokens``: positions whose KV exists or is being written by a launched step.

The next position to compute is ``num_cached_tokens``; a token that was just sampled has no KV until
a later step computes it. ``epoch`` changes whenever a row is given up, so that results of a
launched step that arrive late are recognised and dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum, IntFlag
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from infer import prefix
from infer.blocks import Int32, Int64
from infer.persistent import Fifo, ShardedMap
from infer.types import Request, SamplingParams

Int8 = npt.NDArray[np.int8]
Objects = npt.NDArray[np.object_]


class Status(IntEnum):
    """What a row holds."""

    FREE = 0
    RUNNING = 1
    PREEMPTED = 2  # gave its blocks back, keeps its tokens, waits to recompute
    RESERVED = 3  # a further choice of a request (n > 1) whose prompt is still being computed


# What vectors are compared with: an enum member costs numpy ten microseconds, an int two.
FREE, RUNNING, PREEMPTED, RESERVED = (int(status) for status in Status)


class Need(IntFlag):
    """What a row asks of the sampler beyond argmax."""

    RANDOM = 1  # temperature above 0
    TRUNCATION = 2  # top-k, top-p or min-p
    PENALTIES = 4  # penalties, bias or min_tokens: device state beside the logits
    LOGPROBS = 8
    PROMPT_LOGPROBS = 16


# Plain ints here too: an operation on flags costs a microsecond.
RANDOM, TRUNCATION, PENALTIES, LOGPROBS, PROMPT_LOGPROBS = (int(need) for need in Need)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Rows of admitted sequences. Vectors are ``[max_num_seqs]``; per-row arrays grow by copy.

    The per-row arrays have slack at their end that only the newest state writes: what an older
    state calls valid is never overwritten.
    """

    status: Int8
    epoch: Int32
    choice: Int32  # index among the n choices of its request
    num_prompt_tokens: Int32
    num_tokens: Int32
    num_cached_tokens: Int32
    num_pending: Int32
    max_total_tokens: Int32  # prompt + max_tokens: the length that ends it
    min_total_tokens: Int32  # prompt + min_tokens: nothing else ends it up to here
    num_hit_tokens: Int32  # prompt tokens taken from the prefix cache at first admission
    num_preemptions: Int32
    num_blocks: Int32
    last_block: Int32  # block id at num_blocks - 1
    need: Int32  # Need flags
    slot: Int32  # row of the penalty state on the device, -1 without
    rank: Int64  # smaller runs first
    seed: Int64  # of its samples: the request's own, or one that its arrival gave it
    stop_on_eos: npt.NDArray[np.bool_]
    check_stops: npt.NDArray[np.bool_]  # has stop token ids or stop strings of its own
    request: Objects  # Request
    token_ids: Objects  # i32[>= num_tokens]
    block_table: Objects  # i32[>= num_blocks]
    digests: Objects  # tuple[bytes, ...], of the first full blocks: the prompt's, or more
    prefix_tail: Objects  # Entry | None, the index entry of the last registered block
    num_registered: Int32  # full blocks handed to the prefix index, or found there
    stop_tail: Objects  # bytes that may begin a stop string
    rows_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # live request id -> rows

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        return int(self.status.size)

    @property
    def num_total(self) -> Int32:
        """Known and pending tokens."""
        return self.num_tokens + self.num_pending


_DTYPES: dict[str, Any] = {
    "status": np.int8,
    "rank": np.int64,
    "seed": np.int64,
    "stop_on_eos": np.bool_,
    "check_stops": np.bool_,
}
_ARRAYS = tuple(f.name for f in fields(Sequences))[:-1]  # all but rows_of, which comes last
_OF_TOKENS = (
    *("num_tokens", "num_pending", "token_ids", "stop_tail"),
    *("num_registered", "prefix_tail"),  # as blocks fill up with them
)
_PLACES = {f.name: i for i, f in enumerate(fields(Sequences))}
_values = attrgetter(*_PLACES)
_OBJECTS = ("request", "token_ids", "block_table", "digests", "prefix_tail", "stop_tail")


def make(num_rows: int) -> Sequences:
    """All rows free."""
    arrays: dict[str, Any] = {}
    for f in fields(Sequences):
        if f.name in _OBJECTS:
            arrays[f.name] = np.full(num_rows, None, np.object_)
        elif f.name != "rows_of":
            arrays[f.name] = np.zeros(num_rows, _DTYPES.get(f.name, np.int32))
    arrays["slot"] -= 1
    return Sequences(**arrays)


def copy(seqs: Sequences) -> Sequences:
    """Rows with vectors of their own; the per-row arrays stay shared."""
    arrays: dict[str, Any] = {name: getattr(seqs, name).copy() for name in _ARRAYS}
    return Sequences(**arrays, rows_of=dict(seqs.rows_of))


def copy_for_tokens(seqs: Sequences) -> Sequences:
    """Rows whose vectors that change with accepted tokens are their own; the others are shared."""
    return changed(seqs, **{name: getattr(seqs, name).copy() for name in _OF_TOKENS})


def changed(seqs: Sequences, **columns: Any) -> Sequences:
    """``seqs`` with other vectors in place of some; half the cost of ``dataclasses.replace``."""
    values = [*_values(seqs)]
    for name, column in columns.items():
        values[_PLACES[name]] = column
    return Sequences(*values)


def sampling_needs(params: SamplingParams) -> int:
    """Which sampler work (``Need``) a request with resolved ``params`` asks for."""
    need = 0
    if params.temperature:
        need |= RANDOM
        if (params.top_k or 0) > 0 or params.top_p != 1.0 or params.min_p:
            need |= TRUNCATION
    if (
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.min_tokens
    ):
        need |= PENALTIES
    if params.logprobs is not None:
        need |= LOGPROBS
    if params.prompt_logprobs is not None:
        need |= PROMPT_LOGPROBS
    return need


def place(
    seqs: Sequences,
    row: int,
    item: WaitingRequest,
    *,
    choice: int,
    slot: int,
    status: int,
) -> None:
    """Put a choice of ``item``, without KV, into free ``row``. Sequences donated."""
    tokens, params = item.tokens, item.request.params
    seqs.status[row] = status
    seqs.choice[row] = choice
    seqs.num_prompt_tokens[row] = seqs.num_tokens[row] = tokens.size
    seqs.num_cached_tokens[row] = seqs.num_pending[row] = 0
    seqs.max_total_tokens[row] = item.max_total_tokens
    seqs.min_total_tokens[row] = tokens.size + params.min_tokens
    seqs.num_hit_tokens[row] = -1
    seqs.num_preemptions[row] = seqs.num_blocks[row] = seqs.num_registered[row] = 0
    seqs.last_block[row] = 0
    seqs.need[row] = item.need
    seqs.slot[row] = slot
    seqs.rank[row] = item.rank
    seqs.seed[row] = item.seed
    seqs.stop_on_eos[row] = not params.ignore_eos
    seqs.check_stops[row] = bool(params.stop or params.stop_token_ids)
    seqs.request[row] = item.request
    seqs.token_ids[row] = grown(tokens, tokens.size, min(tokens.size + 64, item.max_total_tokens))
    seqs.block_table[row] = np.empty(0, np.int32)
    seqs.digests[row] = item.digests
    seqs.prefix_tail[row] = None
    seqs.stop_tail[row] = b""


def preempt(seqs: Sequences, row: int) -> None:
    """Let ``row`` keep its tokens without KV; its blocks were released before. Donated."""
    seqs.status[row] = PREEMPTED
    seqs.num_cached_tokens[row] = seqs.num_blocks[row] = seqs.num_registered[row] = 0
    seqs.num_preemptions[row] += 1
    seqs.prefix_tail[row] = None
    seqs.block_table[row] = np.empty(0, np.int32)


def vacate(seqs: Sequences, row: int) -> None:
    """Free ``row`` and change its epoch; its blocks were released before. Sequences donated."""
    seqs.status[row] = FREE
    seqs.epoch[row] += 1
    seqs.num_blocks[row] = 0
    seqs.num_pending[row] = 0
    seqs.slot[row] = -1
    for name in _OBJECTS:
        getattr(seqs, name)[row] = None


def grown(array: Int32, used: int, capacity: int) -> Int32:
    """A copy of ``array[:used]`` with room for ``capacity`` items, at least doubling."""
    out = np.empty(max(capacity, 2 * used, 8), np.int32)
    out[:used] = array[:used]
    return out


def append_blocks(seqs: Sequences, row: int, new: Int32) -> None:
    """Add ``new`` to the end of a row's block table. Sequences donated."""
    used = int(seqs.num_blocks[row])
    table = seqs.block_table[row]
    if used + new.size > table.size:
        table = seqs.block_table[row] = grown(table, used, used + new.size)
    table[used : used + new.size] = new
    seqs.num_blocks[row] = used + new.size
    seqs.last_block[row] = table[used + new.size - 1]


def append_block_each(seqs: Sequences, rows: Int64, new: Int32) -> None:
    """Add block ``new[i]`` to the table of ``rows[i]`` (distinct). Sequences donated."""
    for row, array in with_items(seqs.block_table, seqs.num_blocks, rows, new.tolist()).items():
        seqs.block_table[row] = array
    seqs.num_blocks[rows] += 1
    seqs.last_block[rows] = new


def replace_last_block(seqs: Sequences, row: int, block: int) -> None:
    """Point the last entry of a row's table at ``block``, in an array of its own. Donated."""
    used = int(seqs.num_blocks[row])
    table = grown(seqs.block_table[row], used, used)
    table[used - 1] = block
    seqs.block_table[row] = table
    seqs.last_block[row] = block


def append_tokens(seqs: Sequences, rows: Int64, tokens: Int32) -> None:
    """Accept one sampled token for each of ``rows`` (distinct). Sequences donated."""
    for row, array in with_items(seqs.token_ids, seqs.num_tokens, rows, tokens.tolist()).items():
        seqs.token_ids[row] = array
    seqs.num_tokens[rows] += 1
    seqs.num_pending[rows] -= 1


def with_items(arrays: Objects, used: Int32, rows: Int64, items: list[int]) -> dict[int, Int32]:
    """Write an item behind the used part of each row's array; those that had to grow, by row.

    For whoever knows the row by its old length it stays what it was.
    """
    outgrown = {}
    for i, (array, at, item) in enumerate(
        zip(arrays[rows].tolist(), used[rows].tolist(), items, strict=True)
    ):
        try:
            array[at] = item
        except IndexError:
            larger = grown(array, at, at + 1)
            larger[at] = item
            outgrown[int(rows[i])] = larger
    return outgrown


def replaced(arrays: Objects, by_row: Mapping[int, Int32]) -> Objects:
    """``arrays`` with others for some rows."""
    if by_row:
        arrays = arrays.copy()
        for row, array in by_row.items():
            arrays[row] = array
    return arrays


def table(seqs: Sequences, row: int) -> Int32:
    """The block ids of ``row``."""
    blocks: Int32 = seqs.block_table[row][: seqs.num_blocks[row]]
    return blocks


def tokens(seqs: Sequences, row: int) -> Int32:
    """The known tokens of ``row``."""
    ids: Int32 = seqs.token_ids[row][: seqs.num_tokens[row]]
    return ids


@dataclass(frozen=True)
class WaitingRequest:
    """A submitted request with what its scheduling needs, made once."""

    request: Request
    tokens: Int32  # i32[num_prompt_tokens]
    block_size: int | None  # of the prefix cache, if there is one
    max_total_tokens: int
    rank: int
    seed: int
    need: int  # Need flags

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """Of the full blocks; made when the scheduler first asks, not while others wait."""
        if self.block_size is None:
            return ()
        return prefix.digests(self.tokens, self.block_size, self.request.cache_salt)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests without a row, served by rank. Submitting and aborting cost O(1)."""

    queues: Mapping[int, Fifo[WaitingRequest]] = field(default_factory=dict)  # by priority
    live: ShardedMap[str, WaitingRequest] = field(default_factory=ShardedMap)

    def __len__(self) -> int:
        return len(self.live)

    def by_rank(self) -> Iterator[WaitingRequest]:
        """Live requests, smallest rank first. Ranks rise along each priority's queue."""
        heads = [iter(q) for _, q in sorted(self.queues.items()) if len(q)]
        if len(heads) == 1:
            merged: Iterator[WaitingRequest] = heads[0]
        else:
            merged = heapq.merge(*heads, key=lambda w: w.rank)
        return (w for w in merged if self.live.get(w.request.request_id) is w)


def enqueue(waiting: Waiting, items: Iterable[WaitingRequest]) -> Waiting:
    """``waiting`` with each of ``items`` behind those of its priority."""
    live, queues = waiting.live.edit(), dict(waiting.queues)
    for item in items:
        live.set(item.request.request_id, item)
        queue = queues.get(item.request.priority, Fifo())
        queues[item.request.priority] = queue.append(item)
    return Waiting(queues=queues, live=live.freeze())


def withdraw(waiting: Waiting, request_ids: list[str]) -> Waiting:
    """``waiting`` without ``request_ids``, each of which is in it."""
    if not request_ids:
        return waiting
    live = waiting.live.edit()
    for request_id in request_ids:
        live.remove(request_id)
    frozen = live.freeze()
    queues = {}
    for priority, queue in waiting.queues.items():
        gone = 0
        for item in queue:
            if frozen.get(item.request.request_id) is item:
                break
            gone += 1
        trimmed = queue.drop(gone)
        if len(trimmed):
            queues[priority] = trimmed
    return Waiting(queues=queues, live=frozen)


def check(seqs: Sequences) -> None:
    """Assert the invariants of every row."""
    busy = seqs.status != FREE
    assert (seqs.num_pending >= 0).all()
    for row in np.flatnonzero(busy).tolist():
        total = seqs.num_tokens[row] + seqs.num_pending[row]
        assert 0 < seqs.num_prompt_tokens[row] <= seqs.num_tokens[row]
        assert total <= seqs.max_total_tokens[row], "a sequence outgrew its limit"
        assert seqs.num_cached_tokens[row] < total, "a position past the known tokens was computed"
        assert row in seqs.rows_of[seqs.request[row].request_id]
        if seqs.status[row] == RUNNING:
            assert seqs.last_block[row] == table(seqs, row)[-1] if seqs.num_blocks[row] else True
        else:
            assert seqs.num_blocks[row] == 0, "only a running sequence holds blocks"
    rows = sorted(row for group in seqs.rows_of.values() for row in group)
    assert rows == np.flatnonzero(busy).tolist(), "rows and live requests differ"
