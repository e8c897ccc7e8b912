"""What one call of the scheduler has in hand, and what its parts do with it in common."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from infer import sequences
from infer.blocks import Int32, Int64
from infer.config import Limits
from infer.prefix import Draft
from infer.sequences import Sequences
from infer.types import FinishEvent


@dataclass(slots=True)
class Round:
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


def upload_table(r: Round, row: int, start: int) -> None:
    """Send the device the entries of a row's block table from column ``start`` on."""
    new = sequences.table(r.seqs, row)[start:]
    columns = np.arange(start, start + new.size, dtype=np.int32)
    r.deltas.append((np.full(new.size, row, np.int32), columns, new))


def must_collect(r: Round) -> bool:
    """Before a preemption: tokens that were launched may end sequences and free their blocks."""
    r.stalled = bool(r.seqs.num_pending.any())
    return r.stalled


def own_tail(r: Round, row: int) -> None:
    """Before a write into a partial block that others hold too: copy it. One was reserved."""
    old = int(r.seqs.last_block[row])
    if r.draft.pool.ref_count[old] == 1:
        return  # the other holders have just taken copies
    new = r.draft.take(1)
    r.draft.release(np.array([old], np.int32))
    sequences.replace_last_block(r.seqs, row, int(new[0]))
    r.copies.append((old, int(new[0])))
    upload_table(r, row, int(r.seqs.num_blocks[row]) - 1)


def preempt_last(r: Round) -> None:
    """The running sequence of the highest rank gives its blocks back and keeps its tokens."""
    s = r.seqs
    holders = np.flatnonzero(s.num_blocks > 0)
    assert holders.size, "the pool holds at least one sequence of max_model_len"
    row = int(holders[np.lexsort((holders, s.rank[holders]))[-1]])
    r.draft.release(sequences.table(s, row))
    sequences.preempt(s, row)
    r.preempted.append(s.request[row].request_id)
