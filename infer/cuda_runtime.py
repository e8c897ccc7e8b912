"""The CUDA runtime: steps as graph replays where a graph fits, values fetched without waiting."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from infer import device_step as step
from infer import graphs
from infer import rows as row_state
from infer.blocks import Int32
from infer.config import Limits
from infer.device_step import DeviceValues
from infer.graphs import Graph, Shape
from infer.hostbatch import HostBatch
from infer.kv import KVCache
from infer.model import Model
from infer.ops import Ops
from infer.ops.logprobs import Logprobs
from infer.parallel import TP
from infer.plan import Plan
from infer.report import LogprobArrays, StepValues
from infer.rows import RowState
from infer.runtime import EMPTY, Pending, Ready, Runtime, extras, step_arrays
from infer.sequences import Need, Sequences
from infer.staging import Returns, Staging
from infer.weights import local_config

STAGING_WORDS = 1 << 20
POLL_S = 20e-6
SHORT_TOKENS = 64
BEYOND_GRAPHS = ~int(Need.RANDOM)  # what a row may ask that follows after a graph, not inside


class Fetched:
    """Values on their way to pinned memory; ``wait`` is the one place where the host waits."""

    def __init__(self, values: DeviceValues, num_samples: int, tp: TP) -> None:
        self._num_samples = num_samples
        self._tp = tp
        self._tokens = _to_pinned(values.tokens)
        self._nan = _to_pinned(values.nan)
        self._own = _pinned_logprobs(values.logprobs)
        self._prompt = _pinned_logprobs(values.prompt_logprobs)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> StepValues:
        """Block until the device has finished the step."""
        _wait(self._event, self._tp)
        n = self._num_samples
        return StepValues(
            tokens=self._tokens.numpy()[:n].copy(),
            failed=self._nan.numpy()[:n].copy(),
            logprobs=_arrays(self._own),
            prompt_logprobs=_arrays(self._prompt),
        )


class Replayed:
    """A graph's results on their way; ``wait`` is the one place where the host waits."""

    def __init__(self, array: Int32, event: torch.cuda.Event, num_samples: int, tp: TP) -> None:
        self._tp = tp
        self._array = array
        self._event = event
        self._num_samples = num_samples

    def wait(self) -> StepValues:
        """Block until the device has finished the step."""
        _wait(self._event, self._tp)
        both = self._array.reshape(2, -1)[:, : self._num_samples]
        return StepValues(tokens=both[0].copy(), failed=both[1] != 0)


def _wait(event: torch.cuda.Event, tp: TP) -> None:
    """Wait for the device; among several ranks only as long as the others are there."""
    if tp.link is None:
        event.synchronize()
        return
    while not event.query():  # type: ignore[no-untyped-call]
        tp.link.check()
        time.sleep(POLL_S)


def _to_pinned(tensor: Tensor) -> Tensor:
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor, non_blocking=True)


def _pinned_logprobs(found: Logprobs | None) -> tuple[Tensor, ...] | None:
    if found is None:
        return None
    return tuple(_to_pinned(t) for t in (found.token, found.rank, found.top_ids, found.top))


def _arrays(parts: tuple[Tensor, ...] | None) -> LogprobArrays | None:
    return None if parts is None else LogprobArrays(*(part.numpy().copy() for part in parts))


class CudaRuntime(Runtime):
    """Owns the graphs of one (model, KV cache). Made complete by ``make``."""

    asynchronous = True

    def __init__(
        self,
        model: Model,
        ops: Ops,
        limits: Limits,
        plain: Iterable[Graph],
        to_logits: Iterable[Graph],
    ) -> None:
        self._kernels = None
        if ops.name != "torch":
            from infer import kernelcache

            self._kernels = kernelcache.compilations()
        self._staging = Staging(model.device, STAGING_WORDS)
        super().__init__(model, ops, uploader=self._staging)
        self._returns = Returns(2 * limits.max_num_seqs)
        self._limits = limits
        self._plain = {graph.shape: graph for graph in plain}
        self._to_logits = {graph.shape: graph for graph in to_logits}
        shapes = sorted(self._plain)
        self._decode = [shape for shape in shapes if shape.decode]
        self._decode_sizes = [shape.num_seqs for shape in self._decode]
        self._mixed = [shape for shape in shapes if not shape.decode]
        self._hit = False

    def release(self) -> None:
        """Free the graphs: a group's communicator cannot end before those that hold it."""
        self._plain.clear()
        self._to_logits.clear()

    def take_counters(self) -> tuple[bool, int]:
        """Whether the last step replayed a graph, and recompilations since the last call."""
        return self._hit, self._newly_compiled()

    def num_compilations(self) -> int:
        """Graphs of torch.compile, and kernels."""
        return super().num_compilations() + (self._kernels.count if self._kernels else 0)

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
        graph = self._graph(plan, batch)
        self._hit = graph is not None
        if graph is None:
            return super().run(model, kv, rows, plan, self._padded(batch), seqs)
        arrays = step_arrays(plan, seqs, rows)
        changes = {name: arrays[name] for name in graphs.CHANGE_FIELDS if name in arrays}
        if changes and changes["places"].size > graph.shape.num_changes:
            changes = {}
        arrays = {name: array for name, array in arrays.items() if name not in changes}
        uploaded = self.uploader.upload(arrays) if arrays else {}
        if uploaded or plan.starts.size:
            kv, rows = self.prepare(model, kv, rows, plan, seqs, uploaded)
        self._staging.fill(graph.inputs, lambda out: graph.layout.pack(batch, changes, out))
        graph.graph.replay()
        num_samples = int(plan.sample_rows.size)
        if graph.results is not None:
            array, event = self._returns.start(graph.results)
            return Replayed(array, event, num_samples, model.tp), kv, rows
        assert graph.logits is not None
        wants = extras(plan, seqs, uploaded, model.tp.size)
        if self.on_logits is not None:
            self.on_logits(graph.logits[:num_samples])
        values, rows = step.pick(model, graph.logits, rows, graph.batch, wants)
        return Fetched(values, num_samples, model.tp), kv, rows

    def _padded(self, batch: HostBatch) -> HostBatch:
        """The batch with empty sequences up to ``max_num_seqs``: kernels know no other count."""
        if not batch.num_seqs:
            return batch
        spare = self._limits.max_num_seqs - batch.num_seqs
        return replace(
            batch,
            seq_rows=np.pad(batch.seq_rows, (0, spare), constant_values=self._limits.max_num_seqs),
            cu_seqlens_q=np.pad(batch.cu_seqlens_q, (0, spare), mode="edge"),
            context_lens=np.pad(batch.context_lens, (0, spare)),
            max_seqlen_q=max(batch.max_seqlen_q, 2),  # some sequences have none: not a decode batch
        )

    def _graph(self, plan: Plan, batch: HostBatch) -> Graph | None:
        """The graph a step runs in; None for an eager step."""
        beyond = plan.need & BEYOND_GRAPHS
        if not plan.num_sequences or plan.prompt_logprobs.size:
            return None
        if plan.cohort is not None or graphs.suits(plan, batch):
            at = bisect_left(self._decode_sizes, batch.num_seqs)
            if at == len(self._decode):
                return None
            return (self._to_logits if beyond else self._plain)[self._decode[at]]
        if beyond:
            return None
        seqs = max(batch.num_seqs, int(plan.sample_rows.size))
        shape = graphs.smallest(self._mixed, batch.num_tokens, seqs)
        return self._plain[shape] if shape is not None else None

    def fetch(self, values: DeviceValues | None) -> Pending:
        """Start bringing the values to the host."""
        if values is None:
            return Ready(EMPTY)
        return Fetched(values, values.tokens.shape[0], self._model.tp)


@torch.inference_mode()
def warm_up(model: Model, ops: Ops, kv: KVCache, limits: Limits, *, use_graphs: bool) -> None:
    """Run once whatever an engine of these limits will run, so that all of it is compiled.

    ``kv`` may be of one block: the steps are padding.
    """
    rows = row_state.make(limits, local_config(model.config, model.tp).vocab_size, model.device)
    most = limits.max_num_seqs
    # Eager steps of short and of long prompts use different tiles.
    eager = [
        Shape(limits.max_num_batched_tokens, most, decode=False),
        Shape(SHORT_TOKENS, most, decode=False),
    ]
    shapes = [*eager, *(graphs.all_shapes(limits) if use_graphs else [])]
    if ops.name != "torch":
        from infer import kernelcache

        # All layers use the same kernels. Ranks rehearse alike, and compile each for itself.
        one = replace(model, weights=replace(model.weights, layers=model.weights.layers[:1]))
        first = KVCache(kv.k[:1], kv.v[:1])
        kernelcache.fill(lambda: graphs.warm_up(one, ops, first, rows, limits, shapes))
    graphs.warm_up(model, ops, kv, rows, limits, shapes)


def make(
    model: Model, ops: Ops, kv: KVCache, rows: RowState, limits: Limits, *, use_graphs: bool
) -> CudaRuntime:
    """Capture every graph that an engine of these limits will run; ``warm_up`` comes first."""
    plain: list[Graph] = []
    to_logits: list[Graph] = []
    if use_graphs:
        pool = torch.cuda.graph_pool_handle()
        with graphs.quiet_gc(), torch.inference_mode():
            for shape in graphs.all_shapes(limits):
                plain.append(
                    graphs.capture(model, ops, kv, rows, limits, shape, pool, sampling=True)
                )
                if shape.decode:
                    to_logits.append(
                        graphs.capture(model, ops, kv, rows, limits, shape, pool, sampling=False)
                    )
    return CudaRuntime(model, ops, limits, plain, to_logits)
