"""Sequences that decode together, and what stays the same about them from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infer.blocks import Int32, Int64
from infer.sequences import FREE, Int8, Objects, Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """All admitted sequences, N of them, each of which decodes a token it has sampled.

    It holds for a state whose ``status`` vector is the cohort's own: whatever lets a row come, go
    or wait makes a new vector, and a step of the cohort itself does not. It is a memo: without it
    every transition gives the same values.
    """

    status: Int8  # the very vector of the states it holds for
    last_step: int  # the step that samples the last token of the first of them to reach its limit
    has_free_rows: bool
    index: Int64  # i64[N], their rows, rising: numpy indexes with these several times faster
    rows: Int32  # i32[N], the same
    marks: Int32  # i32[max_num_seqs], 1 for their rows
    counts: Int32  # i32[N + 1], 0 to N
    order: Int32  # i32[N], 0 to N - 1
    ones: Int32  # i32[N]
    zeros: Int32  # i32[N]
    epochs: Int32  # i32[N]
    num_prompt: Int32  # i32[N]
    choices: Int32  # i32[N]
    requests: Objects  # object[N], Request
    need: int  # Need flags, the union
    eos: frozenset[int]  # tokens that may end one of them
    has_stops: bool  # one of them has stop token ids or stop strings of its own

    def holds(self, seqs: Sequences) -> bool:
        """Whether ``seqs`` are still these: only their lengths and blocks have changed."""
        return self.status is seqs.status


def gather(
    seqs: Sequences, index: Int64, known: Int32, step: int, eos: Sequence[int]
) -> Cohort | None:
    """The cohort of ``index``, rising rows that step ``step`` decodes; None if they are not one.

    ``known`` are their tokens before the step, launched ones included.
    """
    num_prompt = seqs.num_prompt_tokens[index]
    size, busy = index.size, np.count_nonzero(seqs.status != FREE)
    if not size or size != busy or np.count_nonzero(known > num_prompt) != size:
        return None
    marks = np.zeros(seqs.num_rows, np.int32)
    marks[index] = 1
    counts = np.arange(size + 1, dtype=np.int32)
    return Cohort(
        status=seqs.status,
        last_step=step + int((seqs.max_total_tokens[index] - known).min()) - 1,
        has_free_rows=size < seqs.num_rows,
        index=index,
        rows=index.astype(np.int32),
        marks=marks,
        counts=counts,
        order=counts[:-1],
        ones=np.ones(size, np.int32),
        zeros=np.zeros(size, np.int32),
        epochs=seqs.epoch[index],
        num_prompt=num_prompt,
        choices=seqs.choice[index],
        requests=seqs.request[index],
        need=int(np.bitwise_or.reduce(seqs.need[index])),
        eos=frozenset(eos) if seqs.stop_on_eos[index].any() else frozenset(),
        has_stops=bool(seqs.check_stops[index].any()),
    )
