"""The Triton kernels as a backend: stages for prompts and mixed steps, and whole fused decodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from infer.batch import AttentionMeta, Batch
from infer.kv import KVCache
from infer.ops import LayerShape, triton_store
from infer.ops.sampling import Sampled
from infer.ops.triton_begin import begin_step
from infer.ops.triton_common import dependent_launch
from infer.ops.triton_decode import decode_attention
from infer.ops.triton_head import best_tiles, finish_step, score_head
from infer.ops.triton_plan import (
    DecodeConfig,
    DecodePlan,
    decode_config,
    empty_plan,
    plan_decode,
)
from infer.ops.triton_prefill import PrefillPlan, plan_prefill, prefill_attention
from infer.ops.triton_ranks import decode_layers_of_rank
from infer.ops.triton_step import (
    DecodeBuffers,
    DecodeInputs,
    decode_buffers,
    decode_layers,
    empty_buffers,
    step_config,
)
from infer.parallel import TP
from infer.weights import Weights

if TYPE_CHECKING:
    from infer.rows import RowState

Run = tuple[DecodeBuffers, DecodeInputs]  # what the steps of a fused decode pass on


class Placed(Protocol):
    """A step that says where its tokens are; other backends' do too."""

    @property
    def meta(self) -> AttentionMeta: ...

    @property
    def cos_sin(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TritonStep:
    """What every layer of one step shares."""

    meta: AttentionMeta
    cos_sin: Tensor
    plan: DecodePlan
    prefill: PrefillPlan | None  # None: every sequence has one query position


def prepare(meta: AttentionMeta, cos_sin: Tensor, k_cache: Tensor, shape: LayerShape) -> TritonStep:
    """Divide the step's decode work; see ``infer.ops.Prepare``."""
    prefill = None if meta.decode else plan_prefill(meta, k_cache, shape, skip_single=True)
    config = decode_config(meta.context_lens.shape[0], k_cache.dtype.itemsize * 8)
    return TritonStep(meta, cos_sin, _plan(meta, config, shape), prefill)


def _plan(meta: AttentionMeta, config: DecodeConfig, shape: LayerShape) -> DecodePlan:
    return plan_decode(
        meta.seq_rows,
        meta.context_lens,
        config=config,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        sliding_window=shape.sliding_window,
        cu_seqlens_q=None if meta.decode else meta.cu_seqlens_q,
    )


def qk_norm_rope_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    step: Placed,
    shape: LayerShape,
) -> Tensor:
    """See ``infer.ops.QKNormRopeStore``."""
    return triton_store.qk_norm_rope_store(
        qkv,
        q_norm,
        k_norm,
        k_cache,
        v_cache,
        step.cos_sin,
        step.meta.positions,
        step.meta.slot_mapping,
        shape.num_heads,
        shape.eps,
    )


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, step: TritonStep, shape: LayerShape
) -> Tensor:
    """See ``infer.ops.Attention``."""
    meta = step.meta
    out = torch.empty_like(q)
    if step.prefill is not None:
        prefill_attention(
            out,
            q,
            k_cache,
            v_cache,
            meta.block_tables,
            step.prefill,
            scale=shape.scale,
            sliding_window=shape.sliding_window,
        )
    flat = out.view(q.shape[0], -1)
    decode_attention(
        flat,
        q.view(q.shape[0], -1),
        k_cache,
        v_cache,
        meta.block_tables,
        step.plan,
        num_heads=shape.num_heads,
        scale=shape.scale,
        sliding_window=shape.sliding_window,
    )
    return flat


@dataclass(frozen=True, slots=True)
class TritonDecode:
    """Whole decode steps in few kernels; see ``infer.ops.FusedDecode``."""

    cos_sin: Tensor
    pdl: bool

    def start(
        self,
        weights: Weights,
        kv: KVCache,
        rows: RowState,
        batch: Batch,
        changed: Mapping[str, Tensor],
        shape: LayerShape,
    ) -> Run:
        """Everything before the layers in one kernel."""
        meta, size = batch.attention, weights.embed.shape[1]
        num_seqs = meta.context_lens.shape[0]
        plan = empty_plan(
            num_seqs,
            config=step_config(num_seqs, kv.k[0], shape),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            device=weights.embed.device,
        )
        like = weights.embed.new_empty(num_seqs, size)
        buffers = empty_buffers(like, weights.layers[0], shape)
        begin_step(
            buffers.hidden,
            weights.embed,
            batch,
            rows.last_token,
            rows.words,
            changed["places"],
            changed["words"],
            plan,
            sliding_window=shape.sliding_window,
            pdl=self.pdl,
        )
        return buffers, self._inputs(plan, meta, shape)

    def start_embedded(
        self, weights: Weights, kv: KVCache, hidden: Tensor, meta: AttentionMeta, shape: LayerShape
    ) -> Run:
        """The same for tokens that are embedded already, by all ranks."""
        plan = _plan(meta, step_config(hidden.shape[0], kv.k[0], shape), shape)
        return decode_buffers(hidden, weights.layers[0], shape), self._inputs(plan, meta, shape)

    def _inputs(self, plan: DecodePlan, meta: AttentionMeta, shape: LayerShape) -> DecodeInputs:
        return DecodeInputs(
            plan=plan,
            block_tables=meta.block_tables,
            cos_sin=self.cos_sin,
            slot_mapping=meta.slot_mapping,
            shape=shape,
            pdl=self.pdl,
        )

    def layers(self, weights: Weights, kv: KVCache, run: Run, tp: TP) -> Run:
        """Run all layers."""
        buffers, step = run
        if tp.size > 1:
            return decode_layers_of_rank(weights, kv.k, kv.v, buffers, step, tp), step
        decode_layers(weights, kv.k, kv.v, buffers, step)
        return run

    def score(
        self, weights: Weights, run: Run, batch: Batch, rows: RowState, held: range
    ) -> tuple[Tensor, Tensor]:
        """Score every row's logits without writing them where that pays."""
        return score_head(
            run[0].normed,
            weights.lm_head[: len(held)],
            batch.sample_rows,
            batch.sample_positions,
            rows.sampling,
            vocab_offset=held.start,
            pdl=self.pdl,
        )

    def sample(self, scored: tuple[Tensor, Tensor]) -> Sampled:
        """The best of what ``score`` returned."""
        return best_tiles(scored, pdl=self.pdl)

    def finish(self, scored: tuple[Tensor, Tensor], batch: Batch, rows: RowState) -> Tensor:
        """The same as a step's results, remembered."""
        return finish_step(scored, batch.sample_rows, rows.last_token, pdl=self.pdl)

    def normed(self, run: Run) -> Tensor:
        """The final norm of every row, for an LM head of one's own."""
        return run[0].normed


def fused_decode(cos_sin: Tensor) -> TritonDecode:
    """Fused decode steps on the device of ``cos_sin``."""
    return TritonDecode(cos_sin, dependent_launch(cos_sin.device))
