"""From plan to tensors: the inputs of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """What attention and the KV write need beside q, k and v. Sequences are in batch order.

    Every token t of sequence s writes its K and V to slot ``slot_mapping[t]`` (block * block_size +
    offset) and then sees positions 0 .. positions[t] of its own sequence, through row
    ``seq_rows[s]`` of ``block_tables``.
    """

    positions: Tensor  # i32[num_tokens]
    slot_mapping: Tensor  # i32[num_tokens]
    seq_rows: Tensor  # i32[num_seqs], rows of block_tables
    cu_seqlens_q: Tensor  # i32[num_seqs + 1]
    context_lens: Tensor  # i32[num_seqs], KV positions after this step's write
    block_tables: Tensor  # i32[max_num_seqs + 1, max_blocks_per_seq], stays on the device
    max_seqlen_q: int  # longest query of the batch (or of its bucket)
    max_seqlen_k: int  # longest context of the batch (or of its bucket)
    decode: bool  # every sequence has exactly one query position


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input on the device; sequences, logits and sampling rows are counts apart."""

    input_ids: Tensor  # i32[num_tokens], where the host knows the value
    src_rows: Tensor  # i32[num_tokens], >= 0: take RowState.last_token[src_row] instead
    attention: AttentionMeta
    logits_rows: Tensor  # i32[num_logits], last token of every sequence that samples
    sample_logits: Tensor  # i32[num_samples], which logits row each sampling row reads
    sample_rows: Tensor  # i32[num_samples], the RowState row that receives the token
    sample_positions: Tensor  # i32[num_samples], position of the sampled token (for its noise)
    prompt_rows: Tensor  # i32[num_prompt_logprobs], whose successor's logprob is wanted
    prompt_targets: Tensor  # i32[num_prompt_logprobs], those successors


def merge_ids(batch: Batch, last_token: Tensor) -> Tensor:
    """Take ids from the host where it knows them, else what the named row sampled last."""
    sampled = last_token.index_select(0, batch.src_rows.clamp_min(0))
    return torch.where(batch.src_rows >= 0, sampled, batch.input_ids)
