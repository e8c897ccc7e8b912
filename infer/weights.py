"""The weights of a dense decoder: their tree, and the one description everything derives from.

``abstract(cfg, tp)`` says for each tensor of the tree which checkpoint tensors it is made of and
which part of them this rank holds. Allocation, loading, fusing, sharding, random initialisation and
memory figures are maps over that description; nothing else knows a checkpoint name.

Sharding goes by axis name. Heads are dealt in groups (the query heads that share a KV head): whole
groups while there are enough, parts of a group with the KV head replicated when there are more
ranks than KV heads, and zeros where the count does not divide. Zero heads add nothing, because
their columns of ``o`` are zero too. The feed-forward width and the vocabulary are padded alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from infer.config import ModelConfig
from infer.errors import ConfigError
from infer.parallel import TP

AxisName = Literal["embed", "vocab", "heads", "kv_heads", "ffn", "head_dim", "once"]
Init = Literal["normal", "ones"]
FFN_MULTIPLE = 16  # a feed-forward width that does not divide is padded to this


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Projections are ``[out_features, in_features]``; absent ones are None.

    With several ranks, sizes are the rank's own (``local_config``). ``o_bias`` and ``down_bias``
    are zero on every rank but the first: add them before the sum over ranks.
    """

    input_norm: Tensor  # [hidden_size]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size], rows q, k, v
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Tensor  # [hidden_size, num_heads * head_dim]
    o_bias: Tensor | None
    post_norm: Tensor  # [hidden_size]
    gate_up: Tensor  # [2 * intermediate_size, hidden_size], rows gate, up
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden_size, intermediate_size]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of one rank."""

    embed: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden_size]
    lm_head: Tensor  # [vocab_size, hidden_size]; the same tensor as embed when tied


# --- description ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """Indices ``src .. src + length`` of a checkpoint dimension, kept at ``dst`` on this rank."""

    src: int
    dst: int
    length: int


@dataclass(frozen=True, slots=True)
class Axis:
    """A named dimension: its size in the checkpoint, its size here, and what is kept of it."""

    size: int
    local: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor's place in a parameter. Only dimension ``dim`` may be cut."""

    hf_name: str
    hf_shape: tuple[int, ...]  # whole, as the checkpoint has it
    axes: tuple[AxisName, ...]
    dim: int
    size: int  # of ``dim`` on this rank; what no span reaches is zero
    spans: tuple[Span, ...]
    rows: tuple[int, int]  # rows of the parameter it fills

    @property
    def padded(self) -> bool:
        """Whether zeros are left beside what the checkpoint fills."""
        return sum(span.length for span in self.spans) < self.size


@dataclass(frozen=True, slots=True)
class Param:
    """One tensor of the tree: pieces laid one below the other."""

    shape: tuple[int, ...]  # on this rank
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    init: Init

    @property
    def axes(self) -> tuple[AxisName, ...]:
        """Axis names of the first piece; the pieces of a parameter differ only in their rows."""
        return self.pieces[0].axes

    @property
    def hf_names(self) -> tuple[str, ...]:
        """The checkpoint tensors it is made of, in order."""
        return tuple(piece.hf_name for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        """Bytes on this rank."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


# --- sharding -------------------------------------------------------------------------------------


def local_config(cfg: ModelConfig, tp: TP) -> ModelConfig:
    """The configuration with this rank's own numbers; ``cfg`` itself when there is one rank.

    ``num_heads``, ``num_kv_heads``, ``intermediate_size`` and ``vocab_size`` are the rank's, with
    padding; every rank has the same. The ids of its vocabulary rows are ``vocab_range``.

    Raises:
        ConfigError: more ranks than attention heads, or a rank outside the group.
    """
    if not 0 <= tp.rank < tp.size:
        raise ConfigError(f"tp rank is {tp.rank}, it must be from 0 to {tp.size - 1}")
    if tp.size > cfg.num_heads:
        raise ConfigError(
            f"tp is {tp.size}, it must be at most the number of attention heads ({cfg.num_heads}): "
            "a head is not split"
        )
    if tp.size == 1:
        return cfg
    groups, _, heads = _head_groups(cfg, tp)
    return replace(
        cfg,
        num_heads=groups * heads,
        num_kv_heads=groups,
        intermediate_size=_share(cfg.intermediate_size, tp.size, FFN_MULTIPLE),
        vocab_size=_share(cfg.vocab_size, tp.size, 1),
    )


def vocab_range(cfg: ModelConfig, tp: TP) -> range:
    """Vocabulary ids whose embedding and logits this rank holds, in row order, without padding."""
    share = _share(cfg.vocab_size, tp.size, 1)
    return range(min(tp.rank * share, cfg.vocab_size), min((tp.rank + 1) * share, cfg.vocab_size))


def _share(size: int, parts: int, multiple: int) -> int:
    """Each part's size: even where it divides, else rounded up to ``multiple``."""
    if size % parts == 0:
        return size // parts
    return -(-size // (parts * multiple)) * multiple


def _head_groups(cfg: ModelConfig, tp: TP) -> tuple[int, int, int]:
    """(KV heads a rank, ranks that share a KV head, query heads a KV head has on a rank)."""
    replicas = max(1, tp.size // cfg.num_kv_heads)
    groups = -(-cfg.num_kv_heads * replicas // tp.size)
    return groups, replicas, -(-(cfg.num_heads // cfg.num_kv_heads) // replicas)


def _head_axes(cfg: ModelConfig, tp: TP) -> tuple[Axis, Axis]:
    """The axes of query rows and of KV rows, in units of head_dim."""
    groups, replicas, heads = _head_groups(cfg, tp)
    group_heads = cfg.num_heads // cfg.num_kv_heads
    dim = cfg.head_dim
    q_spans, kv_spans = [], []
    for slot in range(groups):
        kv_head, part = divmod(tp.rank * groups + slot, replicas)
        if kv_head >= cfg.num_kv_heads:
            break  # the groups left over are zero
        kv_spans.append(Span(kv_head * dim, slot * dim, dim))
        first = part * heads
        count = min(heads, group_heads - first)
        if count > 0:
            src = (kv_head * group_heads + first) * dim
            q_spans.append(Span(src, slot * heads * dim, count * dim))
    return (
        Axis(cfg.q_size, groups * heads * dim, _joined(q_spans)),
        Axis(cfg.kv_size, groups * dim, _joined(kv_spans)),
    )


def _joined(spans: list[Span]) -> tuple[Span, ...]:
    """Neighbours merged, so that a whole tensor is one span."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last and (last.src + last.length, last.dst + last.length) == (span.src, span.dst):
            joined[-1] = Span(last.src, last.dst, last.length + span.length)
        else:
            joined.append(span)
    return tuple(joined)


def _whole(size: int) -> Axis:
    return Axis(size, size, (Span(0, 0, size),))


def _cut(size: int, local: int, tp: TP) -> Axis:
    start = tp.rank * local
    length = min(local, size - start)
    return Axis(size, local, (Span(start, 0, length),) if length > 0 else ())


def _axes(cfg: ModelConfig, tp: TP) -> dict[AxisName, Axis]:
    """What each axis name means on this rank: the whole table of sharding rules."""
    local = local_config(cfg, tp)
    heads, kv_heads = _head_axes(cfg, tp)
    hidden = cfg.hidden_size
    return {
        "embed": _whole(hidden),
        "head_dim": _whole(cfg.head_dim),
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": _cut(cfg.intermediate_size, local.intermediate_size, tp),
        "vocab": _cut(cfg.vocab_size, local.vocab_size, tp),
        # A bias after a sum over ranks: one rank alone adds it.
        "once": _whole(hidden) if tp.rank == 0 else Axis(hidden, hidden, ()),
    }


# --- the tree -------------------------------------------------------------------------------------


def abstract(
    cfg: ModelConfig, tp: TP | None = None, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Param]:
    """Describe every tensor of this rank by its path in ``Weights`` (``layers.3.qkv``).

    ``lm_head`` is absent when it is tied to ``embed``.

    Raises:
        ConfigError: the model cannot be split over ``tp.size`` ranks.
    """
    axes = _axes(cfg, tp or TP())

    def param(init: Init, *pieces: tuple[str, tuple[AxisName, ...]]) -> Param:
        built: list[Piece] = []
        row = 0
        for name, names in pieces:
            dim = next((i for i, a in enumerate(names) if a not in ("embed", "head_dim")), 0)
            rows = (row, row + axes[names[0]].local)
            hf_shape = tuple(axes[a].size for a in names)
            cut = axes[names[dim]]
            built.append(Piece(name, hf_shape, names, dim, cut.local, cut.spans, rows))
            row = rows[1]
        tail = tuple(axes[a].local for a in pieces[0][1][1:])
        return Param((row, *tail), dtype, tuple(built), init)

    params = {"embed": param("normal", ("model.embed_tokens.weight", ("vocab", "embed")))}
    for layer in range(cfg.num_layers):
        described = _layer(cfg, f"model.layers.{layer}", param)
        params |= {f"layers.{layer}.{name}": value for name, value in described.items()}
    params["norm"] = param("ones", ("model.norm.weight", ("embed",)))
    if not cfg.tie_word_embeddings:
        params["lm_head"] = param("normal", ("lm_head.weight", ("vocab", "embed")))
    return params


def _layer(cfg: ModelConfig, at: str, param: Callable[..., Param]) -> dict[str, Param]:
    attn, mlp = f"{at}.self_attn", f"{at}.mlp"
    q, k, v = f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"
    gate, up = f"{mlp}.gate_proj", f"{mlp}.up_proj"
    described = {
        "input_norm": param("ones", (f"{at}.input_layernorm.weight", ("embed",))),
        "qkv": param(
            "normal",
            (f"{q}.weight", ("heads", "embed")),
            (f"{k}.weight", ("kv_heads", "embed")),
            (f"{v}.weight", ("kv_heads", "embed")),
        ),
        "o": param("normal", (f"{attn}.o_proj.weight", ("embed", "heads"))),
        "post_norm": param("ones", (f"{at}.post_attention_layernorm.weight", ("embed",))),
        "gate_up": param(
            "normal", (f"{gate}.weight", ("ffn", "embed")), (f"{up}.weight", ("ffn", "embed"))
        ),
        "down": param("normal", (f"{mlp}.down_proj.weight", ("embed", "ffn"))),
    }
    if cfg.qkv_bias:
        described["qkv_bias"] = param(
            "normal",
            (f"{q}.bias", ("heads",)),
            (f"{k}.bias", ("kv_heads",)),
            (f"{v}.bias", ("kv_heads",)),
        )
    if cfg.qk_norm:
        described["q_norm"] = param("ones", (f"{attn}.q_norm.weight", ("head_dim",)))
        described["k_norm"] = param("ones", (f"{attn}.k_norm.weight", ("head_dim",)))
    if cfg.o_bias:
        described["o_bias"] = param("normal", (f"{attn}.o_proj.bias", ("once",)))
    if cfg.mlp_bias:
        described["gate_up_bias"] = param(
            "normal", (f"{gate}.bias", ("ffn",)), (f"{up}.bias", ("ffn",))
        )
        described["down_bias"] = param("normal", (f"{mlp}.down_proj.bias", ("once",)))
    return described


def tree(cfg: ModelConfig, tensors: Mapping[str, Tensor]) -> Weights:
    """Hang tensors by path into ``Weights``; optional ones that are absent become None."""
    names = [f.name for f in fields(LayerWeights)]
    layers = tuple(
        LayerWeights(**{name: tensors.get(f"layers.{layer}.{name}") for name in names})  # type: ignore[arg-type]
        for layer in range(cfg.num_layers)
    )
    return Weights(
        embed=tensors["embed"],
        layers=layers,
        norm=tensors["norm"],
        lm_head=tensors.get("lm_head", tensors["embed"]),
    )


# --- maps over the description --------------------------------------------------------------------


class Source(Protocol):
    """Where checkpoint tensors come from."""

    def fill(self, piece: Piece, out: Tensor, init: Init) -> None:
        """Write the piece's spans into ``out`` (its rows of the parameter), converting the dtype.

        What no span reaches is zero already.
        """


def materialize(
    params: Mapping[str, Param],
    source: Source,
    device: torch.device,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """Allocate every parameter on ``device`` and fill it, one checkpoint tensor after the other.

    Args:
        progress: told the bytes of each parameter as it is done.
    """
    tensors: dict[str, Tensor] = {}
    with torch.inference_mode():
        for path, param in params.items():
            make = torch.zeros if any(piece.padded for piece in param.pieces) else torch.empty
            tensor = make(param.shape, dtype=param.dtype, device=device)
            for piece in param.pieces:
                source.fill(piece, tensor[slice(*piece.rows)], param.init)
            tensors[path] = tensor
            if progress is not None:
                progress(param.num_bytes)
    return tensors


def weight_bytes(cfg: ModelConfig, dtype: torch.dtype, tp: TP | None = None) -> int:
    """Bytes of all weights on one rank, from the configuration alone."""
    return sum(param.num_bytes for param in abstract(cfg, tp, dtype).values())
