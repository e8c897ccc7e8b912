"""The compiled kernels as Python sees them: the structures and functions of ``step.cpp``."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.kv import KVCache


def _fields(**kinds: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for names, kind in kinds.items() for name in names.split("__")]


class MatrixStruct(Structure):
    """``Matrix``: packed weights ``[outputs, inputs]``."""

    _fields_ = _fields(panels__bias=c_void_p, outputs__inputs__half__paired=c_int32)


class LayerStruct(Structure):
    """``Layer``."""

    _fields_ = _fields(
        input_norm__q_norm__k_norm__post_norm=c_void_p, qkv__o__gate_up__down=MatrixStruct
    )


class ModelStruct(Structure):
    """``Model``."""

    _fields_ = [
        *_fields(
            num_layers__hidden_size__intermediate_size__num_heads__num_kv_heads__head_dim=c_int32,
            half__window=c_int32,
            eps__scale=c_float,
            embed__norm__cos_sin=c_void_p,
            lm_head=MatrixStruct,
        ),
        ("layers", POINTER(LayerStruct)),
    ]


class StepStruct(Structure):
    """``Step``."""

    _fields_ = _fields(
        input_ids__src_rows__positions__slot_mapping__last_token=c_void_p,
        seq_rows__cu_seqlens_q__context_lens=c_void_p,
        block_tables__k__v__stream=c_void_p,
        num_tokens__num_seqs__table_width__block_size__half=c_int32,
    )


class SamplingStruct(Structure):
    """``Sampling``."""

    _fields_ = _fields(
        logits__sample_logits__sample_rows__positions=c_void_p,
        temperature__seed__choice__tokens__scores__nan=c_void_p,
        num_samples__vocab_size=c_int32,
        greedy_below=c_float,
    )


class Library:
    """The functions of one compiled library.

    Raises:
        OSError: the file cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self._functions = ctypes.CDLL(str(path))

        def declare(name: str, result: Any, *arguments: Any) -> None:
            function = getattr(self._functions, name)
            function.restype, function.argtypes = result, arguments

        declare("purestep_packed_bytes", c_size_t, POINTER(MatrixStruct))
        declare("purestep_pack", None, POINTER(MatrixStruct), c_void_p, c_void_p)
        declare("purestep_large_pages", None, c_void_p, c_size_t)
        declare("purestep_engine", c_void_p, POINTER(ModelStruct), c_int32)
        declare("purestep_free", None, c_void_p)
        declare("purestep_layers", c_int32, c_void_p, POINTER(StepStruct))
        declare("purestep_sample", None, c_void_p, POINTER(SamplingStruct))
        declare("purestep_logits", c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_void_p)

    def packed_bytes(self, matrix: MatrixStruct) -> int:
        """Bytes ``pack`` writes."""
        return int(self._functions.purestep_packed_bytes(matrix))

    def pack(self, matrix: MatrixStruct, weight: Tensor) -> None:
        """Lay out a contiguous weight ``[outputs, inputs]`` where ``matrix.panels`` points."""
        self._functions.purestep_pack(matrix, weight.data_ptr(), matrix.panels)

    def storage(self, size: int) -> Tensor:
        """uint8 ``[size]`` of memory on large pages where there are any; contents undefined."""
        memory = torch.empty(size, dtype=torch.uint8)
        self._functions.purestep_large_pages(memory.data_ptr(), size)
        return memory

    def engine(self, model: ModelStruct, threads: int) -> Engine:
        """An engine over weights and tables that must outlive it."""
        return Engine(self._functions, model, threads)


class Engine:
    """Runs layers and LM head with threads of its own. One call at a time."""

    def __init__(self, functions: Any, model: ModelStruct, threads: int) -> None:
        self._functions = functions
        self._handle = functions.purestep_engine(model, threads)
        if not self._handle:
            raise MemoryError("no memory for the kernels' working space")
        self._kv: tuple[KVCache, Any, Any] | None = None
        # Not at exit: a thread may still be inside a step then, and the system frees all anyway.
        weakref.finalize(self, functions.purestep_free, self._handle).atexit = False

    def layers(self, step: StepStruct) -> None:
        """Run every layer; writes the residual stream and the step's K and V.

        Raises:
            MemoryError: the step's workspace does not fit.
        """
        if not self._functions.purestep_layers(self._handle, step):
            raise MemoryError(f"no memory for a step of {step.num_tokens} tokens")

    def logits(self, hidden: Tensor, rows: Tensor, out: Tensor) -> None:
        """Final norm and LM head of ``rows`` (i32) of the stream, into f32 ``out``.

        Raises:
            MemoryError: the workspace does not fit.
        """
        pointers = (hidden.data_ptr(), rows.data_ptr(), rows.numel(), out.data_ptr())
        if not self._functions.purestep_logits(self._handle, *pointers):
            raise MemoryError(f"no memory for logits of {rows.numel()} tokens")

    def sample(self, sampling: SamplingStruct) -> None:
        """Sample every row, greedy or random."""
        self._functions.purestep_sample(self._handle, sampling)

    def pages(self, kv: KVCache) -> tuple[int, int]:
        """Addresses of the arrays of the addresses of K and of V."""
        if self._kv is None or self._kv[0] is not kv:
            self._kv = kv, addresses(kv.k), addresses(kv.v)
        return ctypes.addressof(self._kv[1]), ctypes.addressof(self._kv[2])


def addresses(tensors: Sequence[Tensor]) -> Any:
    """A C array of where tensors' values begin."""
    return (c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
