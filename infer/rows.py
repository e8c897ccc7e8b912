"""What the device keeps for every row between steps: tokens, block tables, sampling parameters.

All of it but the penalties lies in one array of words, so that a step's changes are one upload and
one kernel, however many fields they touch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.blocks import Int32
from infer.config import Limits
from infer.host import num_slots
from infer.ops import logit_edits
from infer.ops.logit_edits import LogitEdits
from infer.ops.sampling import SamplingRows
from infer.plan import Plan
from infer.sequences import Sequences
from infer.staging import aligned


@dataclass(frozen=True, slots=True)
class RowState:
    """Donated with the KV cache. Row ``max_num_seqs`` is a spare for padded batches."""

    words: Tensor  # i32, what the tensors before ``edits`` are views of
    last_token: Tensor  # i32[max_num_seqs + 1], the token each row sampled last
    block_tables: Tensor  # i32[max_num_seqs + 1, max_blocks_per_seq]
    sampling: SamplingRows
    edits: LogitEdits  # penalties, bias and bans of the rows that hold a slot


def make(limits: Limits, vocab_size: int, device: torch.device) -> RowState:
    """Rows without sequences; the spare row's table points at the spare block.

    ``vocab_size`` is this rank's own.
    """
    rows, width = limits.max_num_seqs + 1, limits.max_blocks_per_seq
    words = torch.zeros(tables_at(rows) + rows * width, dtype=torch.int32, device=device)
    token, temperature, top_k, top_p, min_p, choice, seed, tables = torch.split(
        words, [*[aligned(rows)] * 6, 2 * aligned(rows), rows * width]
    )
    tables = tables.view(rows, width)
    tables[-1] = limits.num_blocks
    top_p.view(torch.float32).fill_(1)
    return RowState(
        words=words,
        last_token=token[:rows],
        block_tables=tables,
        sampling=SamplingRows(
            temperature=temperature[:rows].view(torch.float32),
            top_k=top_k[:rows],
            top_p=top_p[:rows].view(torch.float32),
            min_p=min_p[:rows].view(torch.float32),
            seed=seed[: 2 * rows].view(rows, 2),
            choice=choice[:rows],
        ),
        edits=logit_edits.allocate(num_slots(limits), vocab_size, device=device),
    )


def tables_at(num_rows: int) -> int:
    """Where the block tables begin among the words: after eight words a row, as ``make`` has them.

    Fields start aligned: kernels are compiled for aligned pointers and for others apart.
    """
    return 8 * aligned(num_rows)


def spare_place(limits: Limits) -> int:
    """A word that padded changes may set: the spare row's first block, to the spare block."""
    return tables_at(limits.max_num_seqs + 1) + limits.max_num_seqs * limits.max_blocks_per_seq


def changes(plan: Plan, seqs: Sequences, rows: RowState) -> dict[str, Int32]:
    """Words that change before a step and their places: of starting rows, and of block tables."""
    num_rows, width = rows.block_tables.shape
    entries = tables_at(num_rows) + plan.table_rows * width + plan.table_columns
    if not plan.starts.size:
        return {"places": entries, "words": plan.table_blocks}
    params = [request.params for request in seqs.request[plan.starts].tolist()]
    floats = np.array([[p.temperature, p.top_p, p.min_p] for p in params], np.float32)
    temperature, top_p, min_p = floats.T.copy().view(np.int32)
    last = [seqs.token_ids[row][seqs.num_tokens[row] - 1] for row in plan.starts.tolist()]
    top_k = [p.top_k for p in params]
    words: list[Any] = [last, temperature, top_k, top_p, min_p, seqs.choice[plan.starts]]
    words.append(seqs.seed[plan.starts].view(np.int32))  # low and high word of each
    places = [field * aligned(num_rows) + plan.starts for field in range(6)]
    places.append((6 * aligned(num_rows) + 2 * plan.starts[:, None] + (0, 1)).reshape(-1))
    return {
        "places": np.concatenate([entries, *places]).astype(np.int32),
        "words": np.concatenate([plan.table_blocks, *words]).astype(np.int32),
    }


def introduce(rows: RowState, changed: Mapping[str, Tensor]) -> RowState:
    """Apply ``changes``, if there are any. Rows donated."""
    if "places" in changed:
        rows.words.index_copy_(0, changed["places"].long(), changed["words"])
    return rows


def fill_slots(
    rows: RowState, plan: Plan, seqs: Sequences, eos: tuple[int, ...], *, vocab_offset: int = 0
) -> RowState:
    """Set the penalty state of starting rows that hold a slot. Rows donated."""
    edits = rows.edits
    for row in plan.starts.tolist():
        slot = int(seqs.slot[row])
        if slot < 0:
            continue
        params = seqs.request[row].params
        length = int(seqs.num_prompt_tokens[row])
        known = torch.from_numpy(seqs.token_ids[row][: seqs.num_tokens[row]].astype(np.int64))
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        edits = logit_edits.fill(
            edits,
            slot,
            prompt=known[:length],
            generated=known[length:],
            bias=params.logit_bias or {},
            stops=sorted(stops) if params.min_tokens else (),
            min_position=length + params.min_tokens,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            vocab_offset=vocab_offset,
        )
    return replace(rows, edits=edits)
