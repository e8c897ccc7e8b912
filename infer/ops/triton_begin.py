"""What a decode step begins with, in one kernel: changed rows, token ids, embeddings, the plan."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from infer.batch import Batch
from infer.ops.triton_common import next_power_of_2
from infer.ops.triton_plan import DecodePlan, divide, plan_constants, plan_programs


@triton.jit(do_not_specialize=["num_seqs", "num_items", "num_counters", "first_token"])
def _begin_kernel(
    hidden_ptr, embed_ptr, embed_stride, input_ids, src_rows, last_token, words_ptr, places_ptr,
    new_words, items_ptr, counters, seq_rows, context_lens, num_seqs, num_items, num_counters,
    first_token,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, CHANGES: tl.constexpr, PDL: tl.constexpr,
    TILE: tl.constexpr, MIN_CHUNK: tl.constexpr, CHUNKS: tl.constexpr, WINDOW: tl.constexpr,
    MIXED: tl.constexpr, SEQS: tl.constexpr, ITEMS: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """The first programs lay out attention; each other one has a token and a change."""
    program = tl.program_id(0)
    if program < first_token:
        divide(
            program, items_ptr, counters, seq_rows, context_lens, context_lens, num_seqs,
            num_items, num_counters, TILE, MIN_CHUNK, CHUNKS, WINDOW, MIXED, SEQS, ITEMS, COUNTERS,
        )  # fmt: skip
    else:
        seq = program - first_token
        row = tl.load(src_rows + seq)
        changes = tl.arange(0, CHANGES)
        places = tl.load(places_ptr + changes, mask=changes < num_seqs, other=-2)
        # Last tokens are the first words: one that changes now may be on its way, so not from there
        found = tl.max(tl.where(places == row, changes, -1), axis=0)
        known = tl.load(input_ids + seq)
        last = tl.load(last_token + tl.maximum(row, 0))
        changed = tl.load(new_words + tl.maximum(found, 0))
        token = tl.where(row < 0, known, tl.where(found >= 0, changed, last))
        tl.store(words_ptr + tl.load(places_ptr + seq), tl.load(new_words + seq))
        cols = tl.arange(0, BLOCK)
        mask = cols < HIDDEN
        value = tl.load(embed_ptr + token.to(tl.int64) * embed_stride + cols, mask=mask)
        tl.store(hidden_ptr + seq.to(tl.int64) * HIDDEN + cols, value, mask=mask)
    if PDL:
        # Programs that start once this one has ended may read all this ahead of their wait.
        lanes = tl.arange(0, 128)
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", [lanes], tl.int32, is_pure=False, pack=1
        )


def begin_step(
    hidden: Tensor,
    embed: Tensor,
    batch: Batch,
    last_token: Tensor,
    words: Tensor,
    places: Tensor,
    new_words: Tensor,
    plan: DecodePlan,
    *,
    sliding_window: int | None,
    pdl: bool,
) -> None:
    """Write ``words[places] = new_words``, ``hidden`` ``[num_seqs, hidden_size]``, and the plan.

    ``words`` (i32) begin with ``last_token``, see ``infer.rows``; there is a change a sequence. A
    decode batch: sequence s is token s.
    """
    num_seqs, hidden_size = hidden.shape
    assert batch.attention.decode
    assert places.shape[0] == num_seqs
    programs = plan_programs(plan)
    _begin_kernel[(programs + num_seqs,)](
        hidden, embed, embed.stride(0), batch.input_ids, batch.src_rows, last_token, words, places,
        new_words, plan.items, plan.counters, batch.attention.seq_rows,
        batch.attention.context_lens, num_seqs, plan.items.shape[0], plan.counters.shape[0],
        programs,
        HIDDEN=hidden_size, BLOCK=next_power_of_2(hidden_size), CHANGES=next_power_of_2(num_seqs),
        PDL=pdl, num_warps=4, **plan_constants(plan, num_seqs, sliding_window, mixed=False),
    )  # fmt: skip
