"""Steps and block pools as values that can be drawn and sent: what the inspector shows.

They hold no prompt and no token ids, unless ``step_view`` is asked for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from infer.blocks import BlockPool
    from infer.plan import Plan, PlanRow
    from infer.sequences import Sequences
    from infer.types import StepStats

MAX_CELLS = 1024  # cells of a block map; larger pools share cells
MAX_ROWS = 64  # sequences of one step shown in detail
MAX_VALUES = 512  # positions, slots and block ids shown of one sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One sequence's part in one step, for the timeline."""

    request_id: str
    choice: int
    num_scheduled: int
    prefill: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBrief:
    """One step of the timeline."""

    step: int
    seconds: float  # host and device time
    bars: tuple[Bar, ...]
    num_sequences: int  # bars may be fewer
    num_prefill: int  # positions
    num_decode: int  # positions
    num_running: int
    num_waiting: int
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    finished: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """One sequence of one step: what was known before it and what it computes."""

    request_id: str
    choice: int
    row: int
    num_known: int
    num_cached: int
    num_scheduled: int
    samples: bool
    prefill: bool
    block_table: tuple[int, ...]  # long ones are cut to MAX_VALUES
    positions: tuple[int, ...]
    slot_mapping: tuple[int, ...]
    input_ids: tuple[int, ...] = ()  # lessons only

    @property
    def context_len(self) -> int:
        """KV positions once this step has written its own."""
        return self.num_cached + self.num_scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One step in detail."""

    step: int
    block_size: int
    rows: tuple[RowView, ...]
    num_sequences: int  # rows may be fewer
    cu_seqlens_q: tuple[int, ...]
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()  # (source, target) blocks copied before the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One block of a block map, or ``per_cell`` neighbours in a large pool."""

    first: int  # block id
    free: int
    cached: int
    used: int
    shared: int
    owners: tuple[str, ...] = ()  # request ids, at most three
    ref_count: int = 0  # the highest


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """A block pool at one moment."""

    num_blocks: int
    per_cell: int
    cells: tuple[Cell, ...]
    free: int
    cached: int
    used: int
    shared: int  # of the used ones: held by more than one sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What ``/debug/steps`` answers."""

    block_size: int
    steps: tuple[StepBrief, ...]  # oldest first
    blocks: BlockMap | None  # now
    detail: StepView | None  # of the chosen step


def block_map(pool: BlockPool, seqs: Sequences, max_cells: int = MAX_CELLS) -> BlockMap:
    """Which blocks are free, cached, used or shared, and by whom."""
    owners: dict[int, list[str]] = {}
    per_cell = -(-pool.num_blocks // max_cells)
    for row in np.flatnonzero(seqs.num_blocks).tolist():
        name = seqs.request[row].request_id
        held = seqs.block_table[row][: seqs.num_blocks[row]]
        for cell in np.unique(held // per_cell).tolist():
            known = owners.setdefault(cell, [])
            if len(known) < 3 and name not in known:
                known.append(name)
    held = pool.ref_count
    used, shared = held > 0, held > 1
    cached = pool.cached & ~used

    def counts(mask: npt.NDArray[np.bool_]) -> list[int]:
        padded = np.zeros(-(-pool.num_blocks // per_cell) * per_cell, np.int32)
        padded[: mask.size] = mask
        found: list[int] = padded.reshape(-1, per_cell).sum(axis=1).tolist()
        return found

    columns = zip(
        counts(~used & ~cached), counts(cached), counts(used & ~shared), counts(shared), strict=True
    )
    cells = tuple(
        Cell(
            first=i * per_cell,
            free=free,
            cached=kept,
            used=own,
            shared=many,
            owners=tuple(owners.get(i, ())),
            ref_count=int(held[i * per_cell : (i + 1) * per_cell].max()),
        )
        for i, (free, kept, own, many) in enumerate(columns)
    )
    return BlockMap(
        num_blocks=pool.num_blocks,
        per_cell=per_cell,
        cells=cells,
        free=int(np.count_nonzero(~used & ~cached)),
        cached=int(np.count_nonzero(cached)),
        used=int(np.count_nonzero(used)),
        shared=int(np.count_nonzero(shared)),
    )


def step_brief(plan: Plan, stats: StepStats, finished: Sequence[str]) -> StepBrief:
    """A step for the timeline."""
    prefill = plan.num_cached < plan.num_prompt
    bars = tuple(
        Bar(
            request_id=plan.requests[i].request_id,
            choice=int(plan.choices[i]),
            num_scheduled=int(plan.num_scheduled[i]),
            prefill=bool(prefill[i]),
        )
        for i in range(min(plan.num_sequences, MAX_ROWS))
    )
    return StepBrief(
        step=plan.step,
        seconds=stats.host_s + stats.device_s,
        bars=bars,
        num_sequences=plan.num_sequences,
        num_prefill=stats.num_prefill_tokens,
        num_decode=stats.num_decode_tokens,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        admitted=plan.admitted,
        preempted=plan.preempted,
        finished=tuple(finished),
    )


def step_view(plan: Plan, tokens: dict[tuple[str, int], Sequence[int]] | None = None) -> StepView:
    """A step in detail. ``tokens`` are the known tokens by (request id, choice), if to be shown."""
    rows = []
    for i, row in enumerate(plan):
        if i == MAX_ROWS:
            break
        rows.append(_row_view(row, int(plan.num_prompt[i]), plan.block_size, tokens))
    ends = np.cumsum(plan.num_scheduled[:MAX_ROWS]).tolist()
    return StepView(
        step=plan.step,
        block_size=plan.block_size,
        rows=tuple(rows),
        num_sequences=plan.num_sequences,
        cu_seqlens_q=(0, *ends),
        admitted=plan.admitted,
        preempted=plan.preempted,
        copies=tuple((int(a), int(b)) for a, b in plan.copies.reshape(-1, 2)),
    )


def _row_view(
    row: PlanRow,
    num_prompt: int,
    block_size: int,
    tokens: dict[tuple[str, int], Sequence[int]] | None,
) -> RowView:
    end = min(row.num_scheduled, MAX_VALUES)
    positions = tuple(range(row.num_cached, row.num_cached + end))
    table = row.block_table
    known = (tokens or {}).get((row.request_id, row.choice), ())
    return RowView(
        request_id=row.request_id,
        choice=row.choice,
        row=row.row,
        num_known=row.num_known,
        num_cached=row.num_cached,
        num_scheduled=row.num_scheduled,
        samples=row.samples,
        prefill=row.num_cached < num_prompt,
        block_table=table[:MAX_VALUES],
        positions=positions,
        slot_mapping=tuple(table[p // block_size] * block_size + p % block_size for p in positions),
        input_ids=tuple(known[p] for p in positions if p < len(known)),
    )
