"""From plan to arrays: the inputs of one forward pass, on the host.

Everything is vectorised segment arithmetic; only prompts, whose tokens live in per-row arrays, are
gathered row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infer import sequences
from infer.blocks import Int32
from infer.cohort import Cohort
from infer.plan import Plan
from infer.sequences import Sequences


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One step's input in host memory. T tokens, S sequences, L logits rows, M sampling rows."""

    input_ids: Int32  # i32[T], 0 where the device knows the token
    src_rows: Int32  # i32[T], >= 0: the row whose last sampled token this is
    positions: Int32  # i32[T]
    slot_mapping: Int32  # i32[T], block * block_size + offset
    seq_rows: Int32  # i32[S]
    cu_seqlens_q: Int32  # i32[S + 1]
    context_lens: Int32  # i32[S], KV positions once this step has written its own
    logits_rows: Int32  # i32[L], the last token of every sequence that samples
    sample_logits: Int32  # i32[M], index into logits_rows
    sample_rows: Int32  # i32[M]
    sample_positions: Int32  # i32[M], position of the token to be sampled
    prompt_rows: Int32  # i32[P], tokens whose successor's log-probability was asked for
    prompt_targets: Int32  # i32[P], those successors; 0 after a prompt's last token
    num_decode: int  # sequences with one position: the first of S
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def num_tokens(self) -> int:
        """Positions to compute."""
        return int(self.input_ids.size)

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return int(self.seq_rows.size)


def build(plan: Plan, seqs: Sequences) -> HostBatch:
    """Arrays for ``plan``, from the host state its ``schedule`` returned."""
    if plan.cohort is not None:
        return _decode(plan, plan.cohort, seqs)
    q_lens, cached = plan.num_scheduled, plan.num_cached
    cu_seqlens_q = np.zeros(q_lens.size + 1, np.int32)
    np.cumsum(q_lens, out=cu_seqlens_q[1:])
    first = cached - cu_seqlens_q[:-1]
    positions = np.arange(cu_seqlens_q[-1], dtype=np.int32) + np.repeat(first, q_lens)
    context_lens = cached + q_lens
    samples = plan.samples.astype(np.int64)  # numpy indexes with these several times faster
    return HostBatch(
        **_inputs(plan, seqs, positions, cu_seqlens_q),
        **_prompt_targets(plan, seqs, cu_seqlens_q),
        positions=positions,
        seq_rows=plan.rows,
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens,
        logits_rows=cu_seqlens_q[1:][samples] - 1,
        sample_logits=plan.sample_seqs,
        sample_rows=plan.sample_rows,
        sample_positions=context_lens[samples[plan.sample_seqs]],
        num_decode=plan.num_decode,
        max_seqlen_q=int(q_lens.max(initial=0)),
        max_seqlen_k=int(context_lens.max(initial=0)),
    )


def _decode(plan: Plan, cohort: Cohort, seqs: Sequences) -> HostBatch:
    """The batch of a step in which every sequence computes the token it sampled last."""
    size = plan.block_size
    return HostBatch(
        input_ids=cohort.zeros,
        src_rows=cohort.rows,
        positions=plan.num_cached,
        slot_mapping=seqs.last_block[cohort.index] * size + plan.num_cached % size,
        seq_rows=cohort.rows,
        cu_seqlens_q=cohort.counts,
        context_lens=plan.num_known,
        logits_rows=cohort.order,
        sample_logits=cohort.order,
        sample_rows=cohort.rows,
        sample_positions=plan.num_known,
        prompt_rows=_EMPTY,
        prompt_targets=_EMPTY,
        num_decode=cohort.rows.size,
        max_seqlen_q=1,
        max_seqlen_k=int(plan.num_known.max()),
    )


def _inputs(plan: Plan, seqs: Sequences, positions: Int32, cu_seqlens_q: Int32) -> dict[str, Int32]:
    size, n = plan.block_size, plan.num_decode
    total = positions.size
    input_ids = np.zeros(total, np.int32)
    src_rows = np.full(total, -1, np.int32)
    slot_mapping = np.empty(total, np.int32)
    rows = plan.rows[:n].astype(np.int64)
    slot_mapping[:n] = seqs.last_block[rows] * size + positions[:n] % size
    generated = positions[:n] >= seqs.num_prompt_tokens[rows]
    src_rows[:n] = np.where(generated, plan.rows[:n], -1)
    for i in np.flatnonzero(~generated).tolist():
        input_ids[i] = seqs.token_ids[rows[i]][positions[i]]
    for i in range(n, plan.rows.size):
        start, end = int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1])
        cached, row = int(plan.num_cached[i]), int(plan.rows[i])
        input_ids[start:end] = seqs.token_ids[row][cached : cached + end - start]
        blocks = plan.tables[row][cached // size : -(-(cached + end - start) // size)]
        slots = (blocks[:, None] * size + np.arange(size, dtype=np.int32)).reshape(-1)
        slot_mapping[start:end] = slots[cached % size :][: end - start]
    return {"input_ids": input_ids, "src_rows": src_rows, "slot_mapping": slot_mapping}


def _prompt_targets(plan: Plan, seqs: Sequences, cu_seqlens_q: Int32) -> dict[str, Int32]:
    rows, targets = [_EMPTY], [_EMPTY]
    for i in plan.prompt_logprobs.tolist():
        rows.append(np.arange(cu_seqlens_q[i], cu_seqlens_q[i + 1], dtype=np.int32))
        successors = np.zeros(plan.num_scheduled[i], np.int32)
        first = int(plan.num_cached[i]) + 1
        known = sequences.tokens(seqs, int(plan.rows[i]))[first : first + successors.size]
        successors[: known.size] = known
        targets.append(successors)
    return {"prompt_rows": np.concatenate(rows), "prompt_targets": np.concatenate(targets)}


_EMPTY = np.empty(0, np.int32)
