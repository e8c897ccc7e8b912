"""A model's weights laid out for the kernels, and the step that runs over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.batch import Batch
from infer.kv import KVCache
from infer.native.build import BuildError, library_file
from infer.native.library import (
    Engine,
    LayerStruct,
    Library,
    MatrixStruct,
    ModelStruct,
    SamplingStruct,
    StepStruct,
)
from infer.ops import LayerShape, Ops, WholeWeights
from infer.ops.sample import sample
from infer.ops.sampling import GREEDY_BELOW, Sampled, SampleFlags, SamplingRows
from infer.weights import Weights

DTYPES = (torch.float32, torch.bfloat16)


def native_library() -> Library | str:
    """The kernels, compiled if need be; or the reason why there are none."""
    try:
        return Library(library_file())
    except (BuildError, OSError) as error:
        return str(error)


@dataclass(frozen=True, slots=True)
class NativeWeights(WholeWeights):
    """What ``lay_out`` makes of ``Weights``; its ``layers`` are empty, the engine holds them."""

    engine: Engine
    kept: tuple[Tensor, ...]  # all that the engine points at

    def run(
        self, kv: KVCache, batch: Batch, last_token: Tensor, ops: Ops, shape: LayerShape
    ) -> Tensor:
        """See ``WholeWeights``; the stream is float32."""
        meta = batch.attention
        stream = torch.empty(batch.input_ids.shape[0], self.embed.shape[1], dtype=torch.float32)
        k, v = self.engine.pages(kv)
        self.engine.layers(
            StepStruct(
                input_ids=batch.input_ids.data_ptr(),
                src_rows=batch.src_rows.data_ptr(),
                last_token=last_token.data_ptr(),
                positions=meta.positions.data_ptr(),
                slot_mapping=meta.slot_mapping.data_ptr(),
                seq_rows=meta.seq_rows.data_ptr(),
                cu_seqlens_q=meta.cu_seqlens_q.data_ptr(),
                context_lens=meta.context_lens.data_ptr(),
                block_tables=meta.block_tables.data_ptr(),
                k=k,
                v=v,
                stream=stream.data_ptr(),
                num_tokens=stream.shape[0],
                num_seqs=meta.seq_rows.shape[0],
                table_width=meta.block_tables.stride(0),
                block_size=kv.block_size,
                half=kv.k[0].dtype == torch.bfloat16,
            )
        )
        return stream

    def logits(self, hidden: Tensor, rows: Tensor, eps: float) -> Tensor:
        """See ``WholeWeights``."""
        out = torch.empty(rows.shape[0], self.lm_head.shape[0], dtype=torch.float32)
        self.engine.logits(hidden, rows, out)
        return out

    def sample(
        self,
        logits: Tensor,
        sample_logits: Tensor,
        positions: Tensor,
        rows: Tensor,
        params: SamplingRows,
        flags: SampleFlags,
    ) -> Sampled:
        """See ``WholeWeights``."""
        if flags.top_k or flags.top_p or flags.min_p:
            with one_thread():
                return sample(logits, sample_logits, positions, params.select(rows), flags)
        logits, count = logits.contiguous(), rows.shape[0]
        tokens = torch.empty(count, dtype=torch.int32)
        scores, nan = torch.empty(count), torch.empty(count, dtype=torch.bool)
        self.engine.sample(
            SamplingStruct(
                logits=logits.data_ptr(),
                sample_logits=sample_logits.data_ptr(),
                sample_rows=rows.data_ptr(),
                positions=positions.data_ptr(),
                temperature=params.temperature.data_ptr(),
                seed=params.seed.data_ptr(),
                choice=params.choice.data_ptr(),
                tokens=tokens.data_ptr(),
                scores=scores.data_ptr(),
                nan=nan.data_ptr(),
                num_samples=count,
                vocab_size=logits.shape[1],
                greedy_below=GREEDY_BELOW,
            )
        )
        return Sampled(tokens, scores, nan)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to the calling thread.

    Its helpers go on spinning for milliseconds after their work, on the cores that the kernels'
    own threads need next.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def lay_out(weights: Weights, shape: LayerShape, cos_sin: Tensor, library: Library) -> Weights:
    """Lay ``weights`` out for ``library``, in the order in which a step reads them.

    The threads are torch's, as many as it has now.
    """
    assert weights.norm.dtype in DTYPES
    layout = _Layout(weights, library)
    layers = (LayerStruct * len(weights.layers))()
    for struct, w in zip(layers, weights.layers, strict=True):
        struct.input_norm = layout.vector(w.input_norm)
        struct.q_norm, struct.k_norm = layout.vector(w.q_norm), layout.vector(w.k_norm)
        struct.post_norm = layout.vector(w.post_norm)
        struct.qkv = layout.matrix(w.qkv, w.qkv_bias)
        struct.o = layout.matrix(w.o, w.o_bias)
        struct.gate_up = layout.matrix(w.gate_up, w.gate_up_bias, paired=True)
        struct.down = layout.matrix(w.down, w.down_bias)
    lm_head = layout.matrix(weights.lm_head, None)
    embed = weights.embed.contiguous()
    layout.kept += [embed, cos_sin]
    model = ModelStruct(
        num_layers=len(weights.layers),
        hidden_size=embed.shape[1],
        intermediate_size=weights.layers[0].down.shape[1],
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        half=embed.dtype == torch.bfloat16,
        window=shape.sliding_window or 0,
        eps=shape.eps,
        scale=shape.scale,
        embed=embed.data_ptr(),
        norm=layout.vector(weights.norm),
        cos_sin=cos_sin.data_ptr(),
        lm_head=lm_head,
        layers=layers,
    )
    return NativeWeights(
        embed=embed,
        layers=(),
        norm=weights.norm,
        lm_head=weights.lm_head,
        engine=library.engine(model, torch.get_num_threads()),
        kept=tuple(layout.kept),
    )


class _Layout:
    """Gives out places in one block of memory, so that what is read next lies next."""

    def __init__(self, weights: Weights, library: Library) -> None:
        self._library = library
        self._used = 0
        sizes = [_struct(weights.lm_head, False)]
        for w in weights.layers:
            sizes += [_struct(w.gate_up, True), *(_struct(x, False) for x in (w.qkv, w.o, w.down))]
        self._memory = library.storage(sum(map(library.packed_bytes, sizes)) + 64)
        self._start = -self._memory.data_ptr() % 64
        self.kept = [self._memory]

    def vector(self, values: Tensor | None) -> int | None:
        """Keep a float32 copy; its address."""
        if values is None:
            return None
        self.kept.append(values.float().contiguous())
        return self.kept[-1].data_ptr()

    def matrix(self, weight: Tensor, bias: Tensor | None, *, paired: bool = False) -> MatrixStruct:
        """Pack a weight into the next place."""
        struct = _struct(weight, paired)
        struct.panels = self._memory.data_ptr() + self._start + self._used
        struct.bias = self.vector(bias)
        self._used += self._library.packed_bytes(struct)
        self._library.pack(struct, weight.contiguous())
        return struct


def _struct(weight: Tensor, paired: bool) -> MatrixStruct:
    outputs, inputs = weight.shape
    half = weight.dtype == torch.bfloat16
    return MatrixStruct(outputs=outputs, inputs=inputs, half=half, paired=paired)
