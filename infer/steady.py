"""The next step of sequences that all decode: what the scheduler's rules come to in that case.

Most steps are of this kind. Every row of a cohort gets one position and one token, blocks are the
only thing to decide, and all else is known from the step before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from infer import sequences
from infer.blocks import BlockPool, Int32, Int64
from infer.cohort import Cohort
from infer.config import Limits
from infer.host import Host
from infer.plan import Plan
from infer.prefix import Draft, PrefixIndex
from infer.sequences import Sequences

_EMPTY = np.empty(0, np.int32)
_NO_COPIES = np.empty((0, 2), np.int32)


def next_step(host: Host, limits: Limits) -> tuple[Plan, Host] | None:
    """The plan of ``host.cohort`` and the host state after its launch.

    None where there is more to decide: rows or marks have changed, a request could be admitted, a
    sequence has reached its limit, or blocks run out.
    """
    cohort, seqs = host.cohort, host.seqs
    if cohort is None or not cohort.holds(seqs) or host.step > cohort.last_step:
        return None
    if host.dirty or len(host.aborts) or (cohort.has_free_rows and len(host.waiting)):
        return None
    known = seqs.num_total[cohort.index]
    cached = known - 1
    changes, pool, index = (_EMPTY, _EMPTY, _EMPTY), host.pool, host.prefix
    lengths = {
        "num_cached_tokens": seqs.num_cached_tokens + cohort.marks,
        "num_pending": seqs.num_pending + cohort.marks,
    }
    (full,) = (cached % limits.block_size == 0).nonzero()
    if full.size:
        grown = _grow(host, cohort.index[full])
        if grown is None:
            return None
        changes, blocks, pool, index = grown
        lengths |= blocks
    seqs = sequences.changed(seqs, **lengths)
    plan = _plan(cohort, seqs, host.step, known, cached, changes, limits.block_size)
    return plan, Host(
        waiting=host.waiting,
        seqs=seqs,
        pool=pool,
        prefix=index,
        step=host.step + 1,
        arrivals=host.arrivals,
        in_flight=host.in_flight + 1,
        cohort=cohort,
    )


_Changes = tuple[Int32, Int32, Int32]  # rows, columns, blocks


def _grow(
    host: Host, rows: Int64
) -> tuple[_Changes, dict[str, npt.NDArray[Any]], BlockPool, PrefixIndex] | None:
    """A further block for each of ``rows``: what changes; None when there are not so many."""
    draft = Draft.of(host.pool, host.prefix)
    if not draft.reserve(rows.size):
        return None
    new = draft.take(rows.size)
    seqs = host.seqs
    outgrown = sequences.with_items(seqs.block_table, seqs.num_blocks, rows, new.tolist())
    num_blocks, last_block = seqs.num_blocks.copy(), seqs.last_block.copy()
    num_blocks[rows] += 1
    last_block[rows] = new
    own = {
        "num_blocks": num_blocks,
        "last_block": last_block,
        "block_table": sequences.replaced(seqs.block_table, outgrown),
    }
    return (rows.astype(np.int32), seqs.num_blocks[rows], new), own, *draft.freeze()


def _plan(
    cohort: Cohort,
    seqs: Sequences,
    step: int,
    known: Int32,
    cached: Int32,
    changes: _Changes,
    block_size: int,
) -> Plan:
    return Plan(
        step=step,
        rows=cohort.rows,
        num_prompt=cohort.num_prompt,
        num_known=known,
        num_cached=cached,
        num_scheduled=cohort.ones,
        samples=cohort.order,
        sample_seqs=cohort.order,
        sample_rows=cohort.rows,
        sample_epochs=cohort.epochs,
        prompt_logprobs=_EMPTY,
        copies=_NO_COPIES,
        table_rows=changes[0],
        table_columns=changes[1],
        table_blocks=changes[2],
        starts=_EMPTY,
        need=cohort.need,
        num_decode=cohort.rows.size,
        requests=cohort.requests,
        choices=cohort.choices,
        tables=seqs.block_table,
        block_size=block_size,
        cohort=cohort,
    )
