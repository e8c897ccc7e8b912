"""The one owner of torch.compile: one layer is compiled, once, and serves all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from infer.models import decoder
from infer.native.build import compiler
from infer.ops import LayerFn, LayerShape, Ops, torch_traced
from infer.parallel import TP
from infer.weights import LayerWeights


def compiled(ops: Ops, device: torch.device | str) -> tuple[Ops, str | None]:
    """Return ``ops`` with a compiled layer, or unchanged and the reason why.

    Token counts, metadata lengths and the number of KV blocks are dynamic: after one step of one
    token and one of several, nothing compiles again.
    """
    reason = obstacle(ops, device)
    if reason is not None:
        return ops, reason
    traced = replace(
        ops,
        prepare=torch_traced.prepare,
        qk_norm_rope_store=torch_traced.qk_norm_rope_store,
        attention=torch_traced.attention,
    )
    return replace(traced, layer=_layer(traced)), None


def obstacle(ops: Ops, device: torch.device | str) -> str | None:
    """Why a layer over these stages cannot be compiled here; None if it can."""
    if ops.name != "torch":
        return f"the stages of backend {ops.name} are kernels already"
    if torch.device(device).type == "cpu" and compiler() is None:
        return "there is no C++ compiler (looked for $CXX, g++, clang++ and c++)"
    return None


def num_compilations() -> int:
    """Graphs compiled in this process so far; it stands still once everything is warm."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # whoever compiles has imported it
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def _layer(ops: Ops) -> LayerFn:
    run: Callable[..., tuple[Tensor, Tensor]] = torch.compile(decoder.layer, fullgraph=True)

    def layer(
        shape: LayerShape,
        tp: TP,
        ops: Ops,
        w: LayerWeights,
        k_cache: Tensor,
        v_cache: Tensor,
        hidden: Tensor,
        residual: Tensor,
        step: torch_traced.TracedStep,
    ) -> tuple[Tensor, Tensor]:
        _mark(k_cache, v_cache, hidden, residual, step)
        return run(shape, tp, ops, w, k_cache, v_cache, hidden, residual, step)

    return layer


def _mark(
    k_cache: Tensor,
    v_cache: Tensor,
    hidden: Tensor,
    residual: Tensor,
    step: torch_traced.TracedStep,
) -> None:
    """Say which sizes change. One token is a size that torch always compiles for itself."""
    by_token = (hidden, residual, step.cos, step.sin, step.slots)
    tokens = by_token if hidden.shape[0] > 1 else ()
    for tensor in (*tokens, k_cache, v_cache, step.tiles, step.rows, step.blocks, step.masks):
        torch._dynamo.mark_dynamic(tensor, 0)
