"""What the device keeps for every row between steps: tokens, block tables, sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infer.config import Limits
from infer.ops.sample import SamplingRows
from infer.plan import Plan
from infer.sequences import Sequences


@dataclass(frozen=True, slots=True)
class RowState:
    """Donated with the KV cache. Row ``max_num_seqs`` is a spare for padded batches."""

    last_token: Tensor  # i32[max_num_seqs + 1], the token each row sampled last
    block_tables: Tensor  # i32[max_num_seqs + 1, max_blocks_per_seq]
    sampling: SamplingRows


def make(limits: Limits, device: torch.device) -> RowState:
    """Rows without sequences; the spare row's table points at the spare block."""
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
    )


def introduce(rows: RowState, plan: Plan, seqs: Sequences) -> RowState:
    """Tell the device about rows that start in this step, and about new block-table entries."""
    device = rows.last_token.device
    if plan.starts.size:
        _set_parameters(rows, plan.starts, seqs)
    if plan.table_rows.size:
        deltas = torch.from_numpy(
            np.stack([plan.table_rows, plan.table_columns, plan.table_blocks])
        ).to(device, non_blocking=True)
        rows.block_tables.index_put_((deltas[0].long(), deltas[1].long()), deltas[2])
    return rows


def _set_parameters(rows: RowState, starts: np.ndarray[tuple[int], np.dtype[np.int32]], seqs: Sequences) -> None:
    device = rows.last_token.device
    params = [seqs.request[row].params for row in starts.tolist()]
    seeds = np.array([p.seed for p in params], np.int64)
    words = np.stack([seeds & 0xFFFFFFFF, seeds >> 32], axis=1).astype(np.uint32).view(np.int32)
    last = [seqs.token_ids[row][seqs.num_tokens[row] - 1] for row in starts.tolist()]
    index = torch.from_numpy(starts).to(device).long()
    s = rows.sampling
    for target, values in (
        (s.temperature, np.array([p.temperature for p in params], np.float32)),
        (s.top_k, np.array([p.top_k for p in params], np.int32)),
        (s.top_p, np.array([p.top_p for p in params], np.float32)),
        (s.min_p, np.array([p.min_p for p in params], np.float32)),
        (s.seed, words),
        (s.choice, seqs.choice[starts]),
        (rows.last_token, np.array(last, np.int32)),
    ):
        target.index_copy_(0, index, torch.from_numpy(values).to(device))
