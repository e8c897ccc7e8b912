"""What one step will do: the scheduler's decision as a value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infer.blocks import Int32
from infer.cohort import Cohort
from infer.sequences import Objects
from infer.types import FinishEvent


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One sequence of a step, as people read it."""

    request_id: str
    choice: int
    row: int
    num_known: int  # tokens of the sequence before the step, launched ones included
    num_cached: int  # positions that have KV before the step
    num_scheduled: int  # positions this step computes
    block_table: tuple[int, ...]
    samples: bool  # the step reaches the last known token and samples the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step's sequences (S), its sampling rows (M) and what changes on the device before it.

    Sequences with one position come first. An empty plan computes nothing: there was no work, or
    (``stalled``) blocks ran out while a launched step must be collected first.
    """

    step: int
    rows: Int32  # i32[S]
    num_prompt: Int32  # i32[S]
    num_known: Int32  # i32[S]
    num_cached: Int32  # i32[S]
    num_scheduled: Int32  # i32[S]
    samples: Int32  # i32[num sampling sequences], indices into S
    sample_seqs: Int32  # i32[M], index into ``samples``: n choices share one logits row
    sample_rows: Int32  # i32[M], rows that receive a token
    sample_epochs: Int32  # i32[M], their epochs: a later epoch means the token is dropped
    prompt_logprobs: Int32  # indices into S of sequences whose every position needs logits
    copies: Int32  # i32[C, 2], (source, target) blocks copied before this step's KV write
    table_rows: Int32  # i32[D], block-table entries that change: row,
    table_columns: Int32  # i32[D], column,
    table_blocks: Int32  # i32[D], block id
    starts: Int32  # rows whose sampling parameters must be set on the device
    need: int  # Need flags, the union over the sampling rows
    num_decode: int  # sequences with one position: the first of S
    requests: Objects  # object[S], Request of each sequence
    choices: Int32  # i32[S]
    tables: Objects  # object[max_num_seqs], block tables, to ceil((cached + scheduled) / size)
    block_size: int
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    finished: tuple[FinishEvent, ...] = ()  # aborted before this step
    outputs: tuple[Int32, ...] = ()  # generated tokens of each of ``finished``
    prefix_queries: int = 0
    prefix_hits: int = 0
    stalled: bool = False
    cohort: Cohort | None = None  # its sequences, if they are all and decode their own tokens

    @property
    def num_sequences(self) -> int:
        """Sequences in the batch."""
        return int(self.rows.size)

    @property
    def num_tokens(self) -> int:
        """Positions this step computes."""
        return int(self.num_scheduled.sum())

    def __iter__(self) -> Iterator[PlanRow]:
        """The step's sequences in batch order."""
        sampling = set(self.samples.tolist())
        for i in range(self.num_sequences):
            known, cached, scheduled = (
                int(a[i]) for a in (self.num_known, self.num_cached, self.num_scheduled)
            )
            row, num_blocks = int(self.rows[i]), -(-(cached + scheduled) // self.block_size)
            yield PlanRow(
                request_id=self.requests[i].request_id,
                choice=int(self.choices[i]),
                row=row,
                num_known=known,
                num_cached=cached,
                num_scheduled=scheduled,
                block_table=tuple(self.tables[row][:num_blocks].tolist()),
                samples=i in sampling,
            )
