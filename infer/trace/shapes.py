"""Shapes of every layer's tensors, seen by standing between the decoder and its backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from infer.kv import KVCache
from infer.model import Model
from infer.ops import LayerShape, Ops
from infer.runtime import Runtime
from infer.state import EngineState

Entry = dict[str, Any]


def watch(model: Model, state: EngineState) -> tuple[EngineState, ShapeLog]:
    """A state, new and with neither graphs nor compiled layers, whose steps are logged.

    On a CPU it runs the weights as they were loaded, not as they are packed for speed.
    """
    log = ShapeLog(model, state.kv)
    if model.device.type == "cpu":
        return replace(state, runtime=Runtime(model, log.watched(state.runtime.ops))), log
    state.runtime.ops = log.watched(state.runtime.ops)
    return state, log


class ShapeLog:
    """Stands between an engine's decoder and its operations, and keeps what passes."""

    def __init__(self, model: Model, kv: KVCache) -> None:
        self._entries: list[Entry] = []
        self._names = _names(model)
        self._layers = {cache.data_ptr(): i for i, cache in enumerate(kv.k)}

    def take(self) -> list[Entry]:
        """The entries since the last call, in the order of the computation."""
        entries, self._entries = self._entries, []
        return entries

    def watched(self, ops: Ops) -> Ops:
        """``ops``, telling this log."""
        return replace(
            ops,
            linear=self._linear(ops.linear),
            qk_norm_rope_store=self._heads(ops.qk_norm_rope_store),
            attention=self._attention(ops.attention),
        )

    def _note(self, layer: int | None, name: str, **shapes: Any) -> None:
        entry = {k: list(v.shape if isinstance(v, Tensor) else v) for k, v in shapes.items()}
        self._entries.append({"layer": layer, "name": name, **entry})

    def _linear(self, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = inner(x, weight, bias)
            layer, name = self._names.get(weight.data_ptr(), (None, "linear"))
            self._note(layer, name, input=x, weight=weight, output=out)
            return out

        return linear

    def _heads(self, inner: Any) -> Any:
        def store(
            qkv: Tensor,
            q_norm: Tensor | None,
            k_norm: Tensor | None,
            k_cache: Tensor,
            v_cache: Tensor,
            step: Any,
            shape: LayerShape,
        ) -> Tensor:
            q: Tensor = inner(qkv, q_norm, k_norm, k_cache, v_cache, step, shape)
            kv = (qkv.shape[0], shape.num_kv_heads, shape.head_dim)
            layer = self._layers.get(k_cache.data_ptr())
            self._note(layer, "heads", q=q, k=kv, v=kv, cache=k_cache)
            return q

        return store

    def _attention(self, inner: Any) -> Any:
        def attention(
            q: Tensor, k_cache: Tensor, v_cache: Tensor, step: Any, shape: LayerShape
        ) -> Tensor:
            out: Tensor = inner(q, k_cache, v_cache, step, shape)
            self._note(self._layers.get(k_cache.data_ptr()), "attention", q=q, output=out)
            return out

        return attention


def _names(model: Model) -> dict[int, tuple[int | None, str]]:
    """Address of a projection's weight -> (layer, its name)."""
    names: dict[int, tuple[int | None, str]] = {}
    for index, layer in enumerate(model.weights.layers):
        for field in fields(layer):
            tensor = getattr(layer, field.name)
            if tensor is not None:
                names[tensor.data_ptr()] = (index, field.name)
    names[model.weights.lm_head.data_ptr()] = (None, "lm_head")
    return names
