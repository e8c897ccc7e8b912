"""What the device keeps for every row between steps: tokens, block tables, sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from infer.blocks import Int32
from infer.config import Limits
from infer.host import num_slots
from infer.ops import logit_edits
from infer.ops.logit_edits import LogitEdits
from infer.ops.sample import SamplingRows
from infer.plan import Plan
from infer.sequences import Sequences


@dataclass(frozen=True, slots=True)
class RowState:
    """Donated with the KV cache. Row ``max_num_seqs`` is a spare for padded batches."""

    last_token: Tensor  # i32[max_num_seqs + 1], the token each row sampled last
    block_tables: Tensor  # i32[max_num_seqs + 1, max_blocks_per_seq]
    sampling: SamplingRows
    edits: LogitEdits  # penalties, bias and bans of the rows that hold a slot


def make(limits: Limits, vocab_size: int, device: torch.device) -> RowState:
    """Rows without sequences; the spare row's table points at the spare block.

    ``vocab_size`` is this rank's own.
    """
    rows = limits.max_num_seqs + 1
    tables = torch.zeros(rows, limits.max_blocks_per_seq, dtype=torch.int32, device=device)
    tables[-1] = limits.num_blocks

    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    return RowState(
        last_token=full(0, torch.int32),
        block_tables=tables,
        sampling=SamplingRows(
            temperature=full(0, torch.float32),
            top_k=full(0, torch.int32),
            top_p=full(1, torch.float32),
            min_p=full(0, torch.float32),
            seed=torch.zeros(rows, 2, dtype=torch.int32, device=device),
            choice=full(0, torch.int32),
        ),
        edits=logit_edits.allocate(num_slots(limits), vocab_size, device=device),
    )


def starting_values(plan: Plan, seqs: Sequences) -> dict[str, Int32]:
    """Parameters of the rows that start in this step, as int32 words to upload."""
    rows = plan.starts.tolist()
    params = [seqs.request[row].params for row in rows]
    floats = np.array([[p.temperature, p.top_p, p.min_p] for p in params], np.float32)
    seeds = np.array([p.seed for p in params], np.int64)
    words = np.stack([seeds & 0xFFFFFFFF, seeds >> 32], axis=1).astype(np.uint32)
    last = [seqs.token_ids[row][seqs.num_tokens[row] - 1] for row in rows]
    return {
        "starts": plan.starts,
        "start_floats": floats.view(np.int32),
        "start_top_k": np.array([p.top_k for p in params], np.int32),
        "start_seeds": words.view(np.int32),
        "start_choices": seqs.choice[plan.starts],
        "start_tokens": np.array(last, np.int32),
    }


def table_changes(plan: Plan) -> dict[str, Int32]:
    """Changed block-table entries, to upload."""
    return {
        "table_rows": plan.table_rows,
        "table_columns": plan.table_columns,
        "table_blocks": plan.table_blocks,
    }


def introduce(rows: RowState, uploaded: Mapping[str, Tensor]) -> RowState:
    """Apply what ``starting_values`` and ``table_changes`` uploaded. Rows donated."""
    if "starts" in uploaded:
        index = uploaded["starts"].long()
        floats = uploaded["start_floats"].view(torch.float32)
        s = rows.sampling
        for target, values in (
            (s.temperature, floats[:, 0]),
            (s.top_p, floats[:, 1]),
            (s.min_p, floats[:, 2]),
            (s.top_k, uploaded["start_top_k"]),
            (s.seed, uploaded["start_seeds"]),
            (s.choice, uploaded["start_choices"]),
            (rows.last_token, uploaded["start_tokens"]),
        ):
            target.index_copy_(0, index, values)
    if "table_rows" in uploaded:
        where = (uploaded["table_rows"].long(), uploaded["table_columns"].long())
        rows.block_tables.index_put_(where, uploaded["table_blocks"])
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
