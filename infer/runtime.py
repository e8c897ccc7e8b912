"""The handle that turns a plan into device work; the one mutable thing a state carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from infer import device_step as step
from infer import rows as row_state
from infer.batch import AttentionMeta, Batch
from infer.blocks import Int32
from infer.compile import num_compilations
from infer.device_step import DeviceValues, Extras
from infer.errors import StateError
from infer.hostbatch import HostBatch
from infer.kv import KVCache
from infer.model import Model
from infer.ops import Ops
from infer.ops.logprobs import Logprobs
from infer.ops.sampling import SampleFlags
from infer.plan import Plan
from infer.report import LogprobArrays, StepValues
from infer.rows import RowState
from infer.sequences import PENALTIES, Need, Sequences
from infer.staging import Direct, Uploader
from infer.weights import vocab_range


class Pending(Protocol):
    """Values that a device is still computing."""

    def wait(self) -> StepValues:
        """Block until they are there."""


class Ready:
    """Values that are there already."""

    def __init__(self, values: StepValues) -> None:
        self._values = values

    def wait(self) -> StepValues:
        """Return them."""
        return self._values


EMPTY = StepValues(np.empty(0, np.int32), np.empty(0, np.bool_))


class Runtime:
    """Runs steps eagerly (or through a compiled layer) for one (model, KV cache).

    ``generation`` is that of the newest state; an older one was already advanced.
    """

    asynchronous = False  # ``run`` returns before the device has finished

    def __init__(
        self,
        model: Model,
        ops: Ops,
        *,
        executable: Model | None = None,
        uploader: Uploader | None = None,
    ) -> None:
        self.generation = 0
        self.ops = ops
        self._model = model
        self._executable = executable or model  # the same weights, laid out for the device
        self.uploader: Uploader = uploader or Direct()
        self._compilations = self.num_compilations()
        # Shown every step's logits, f32[num_logits, vocab_size], in service None; see infer.verify.
        self.on_logits: Callable[[Tensor], None] | None = None

    def executable(self, model: Model) -> Model:
        """The form of ``model`` that runs here.

        Raises:
            StateError: the state was made with another model.
        """
        if model.weights is not self._model.weights:
            raise StateError(
                f"this state was made with model {self._model.name!r}, it cannot step "
                f"{model.name!r}; make a state for each model with init"
            )
        return self._executable

    def release(self) -> None:
        """Free what would keep a group of ranks from ending; nothing can run afterwards."""

    def take_counters(self) -> tuple[bool, int]:
        """Whether the last step replayed a graph, and recompilations since the last call."""
        return False, self._newly_compiled()

    def num_compilations(self) -> int:
        """What this process has compiled so far."""
        return num_compilations()

    def _newly_compiled(self) -> int:
        before, self._compilations = self._compilations, self.num_compilations()
        return self._compilations - before

    @torch.inference_mode()
    def run(
        self,
        model: Model,
        kv: KVCache,
        rows: RowState,
        plan: Plan,
        batch: HostBatch,
        seqs: Sequences,
    ) -> tuple[Pending, KVCache, RowState]:
        """Launch one step. ``kv`` and ``rows`` are donated."""
        model = self.executable(model)
        arrays = {**step_arrays(plan, seqs, rows), **batch_arrays(batch)}
        uploaded = self.uploader.upload(arrays)
        kv, rows = self.prepare(model, kv, rows, plan, seqs, uploaded)
        if not plan.num_sequences:
            return Ready(EMPTY), kv, rows
        device_batch = device_batch_of(uploaded, batch, rows.block_tables)
        values, kv, rows = self.compute(
            model, kv, rows, device_batch, extras(plan, seqs, uploaded, model.tp.size)
        )
        return self.fetch(values), kv, rows

    def prepare(
        self,
        model: Model,
        kv: KVCache,
        rows: RowState,
        plan: Plan,
        seqs: Sequences,
        uploaded: dict[str, Tensor],
    ) -> tuple[KVCache, RowState]:
        """Bring rows and shared blocks up to date before the step's own work."""
        rows = row_state.introduce(rows, uploaded)
        if plan.starts.size and (seqs.slot[plan.starts] >= 0).any():
            held = vocab_range(model.config, model.tp)
            eos = model.defaults.eos_token_ids
            rows = row_state.fill_slots(rows, plan, seqs, eos, vocab_offset=held.start)
        return copy_blocks(kv, uploaded.get("copies")), rows

    def compute(
        self, model: Model, kv: KVCache, rows: RowState, batch: Batch, wants: Extras
    ) -> tuple[DeviceValues | None, KVCache, RowState]:
        """Forward pass and sampling."""
        hidden, kv = step.forward(model, self.ops, kv, rows, batch)
        prompt = None
        if wants.prompt_top_n is not None:
            prompt = step.prompt_logprobs(model, self.ops, hidden, batch, wants.prompt_top_n)
        if not batch.logits_rows.numel():
            if prompt is None:
                return None, kv, rows
            none = batch.sample_rows
            return DeviceValues(none, none.bool(), None, prompt), kv, rows
        scores = step.logits(model, self.ops, hidden, batch.logits_rows)
        if self.on_logits is not None:
            self.on_logits(scores)
        values, rows = step.pick(model, scores, rows, batch, wants)
        return DeviceValues(values.tokens, values.nan, values.logprobs, prompt), kv, rows

    def fetch(self, values: DeviceValues | None) -> Pending:
        """Start bringing the values to the host."""
        return Ready(EMPTY if values is None else host_values(values))


def step_arrays(plan: Plan, seqs: Sequences, rows: RowState) -> dict[str, Int32]:
    """What must change on the device before a step, and which sampling rows ask for more."""
    arrays: dict[str, Int32] = {}
    if plan.starts.size or plan.table_rows.size:
        arrays |= row_state.changes(plan, seqs, rows)
    if plan.copies.size:
        arrays["copies"] = plan.copies
    if plan.need & PENALTIES:
        slots = seqs.slot[plan.sample_rows]
        arrays["edit_samples"] = np.flatnonzero(slots >= 0).astype(np.int32)
        arrays["edit_slots"] = slots[slots >= 0]
    return arrays


def batch_arrays(batch: HostBatch) -> dict[str, Int32]:
    """The batch's arrays by name."""
    names = (
        "input_ids src_rows positions slot_mapping seq_rows cu_seqlens_q context_lens logits_rows "
        "sample_logits sample_rows sample_positions prompt_rows prompt_targets"
    )
    return {name: getattr(batch, name) for name in names.split()}


def device_batch_of(uploaded: dict[str, Tensor], batch: HostBatch, block_tables: Tensor) -> Batch:
    """The uploaded arrays as the forward pass takes them."""
    meta = AttentionMeta(
        positions=uploaded["positions"],
        slot_mapping=uploaded["slot_mapping"],
        seq_rows=uploaded["seq_rows"],
        cu_seqlens_q=uploaded["cu_seqlens_q"],
        context_lens=uploaded["context_lens"],
        block_tables=block_tables,
        max_seqlen_q=batch.max_seqlen_q,
        max_seqlen_k=batch.max_seqlen_k,
        decode=batch.max_seqlen_q == 1,
    )
    return Batch(
        input_ids=uploaded["input_ids"],
        src_rows=uploaded["src_rows"],
        attention=meta,
        logits_rows=uploaded["logits_rows"],
        sample_logits=uploaded["sample_logits"],
        sample_rows=uploaded["sample_rows"],
        sample_positions=uploaded["sample_positions"],
        prompt_rows=uploaded["prompt_rows"],
        prompt_targets=uploaded["prompt_targets"],
    )


def extras(plan: Plan, seqs: Sequences, uploaded: dict[str, Tensor], num_ranks: int) -> Extras:
    """What the step's sampling rows ask for, as static choices and uploaded indices."""
    top_n = prompt_top_n = None
    if plan.need & Need.LOGPROBS:
        top_n = max(seqs.request[row].params.logprobs or 0 for row in plan.sample_rows.tolist())
    if plan.prompt_logprobs.size:
        wanting = plan.requests[plan.prompt_logprobs]
        prompt_top_n = max(request.params.prompt_logprobs or 0 for request in wanting)
    truncates = bool(plan.need & Need.TRUNCATION)
    return Extras(
        flags=SampleFlags(
            greedy=not plan.need & Need.RANDOM, top_k=truncates, top_p=truncates, min_p=truncates
        ),
        edit_samples=uploaded.get("edit_samples"),
        edit_slots=uploaded.get("edit_slots"),
        top_n=top_n,
        prompt_top_n=prompt_top_n,
        most_top_k=_most_top_k(plan, seqs) if truncates and num_ranks > 1 else None,
    )


def _most_top_k(plan: Plan, seqs: Sequences) -> int | None:
    """The largest top-k of the rows that truncate, as a power of two; None if one has none."""
    rows = plan.sample_rows[seqs.need[plan.sample_rows] & Need.TRUNCATION > 0]
    counts = [request.params.top_k or 0 for request in seqs.request[rows]]
    return None if min(counts) <= 0 else 1 << (max(counts) - 1).bit_length()


def host_values(values: DeviceValues) -> StepValues:
    """Copy a step's values to the host, waiting for them."""

    def arrays(found: Logprobs | None) -> LogprobArrays | None:
        if found is None:
            return None
        parts = (found.token, found.rank, found.top_ids, found.top)
        return LogprobArrays(*(part.cpu().numpy() for part in parts))

    return StepValues(
        tokens=values.tokens.cpu().numpy(),
        failed=values.nan.cpu().numpy(),
        logprobs=arrays(values.logprobs),
        prompt_logprobs=arrays(values.prompt_logprobs),
    )


def copy_blocks(kv: KVCache, copies: Tensor | None) -> KVCache:
    """Copy shared partial blocks before anything of the step is written. KV donated."""
    if copies is not None:
        pairs = copies.long()
        for cache in (*kv.k, *kv.v):
            cache.index_copy_(0, pairs[:, 1], cache.index_select(0, pairs[:, 0]))
    return kv
