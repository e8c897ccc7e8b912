"""The stages of a decoder layer that differ by backend, as one value that is passed around."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from infer.weights import Weights

if TYPE_CHECKING:
    from infer.batch import AttentionMeta, Batch
    from infer.kv import KVCache
    from infer.ops.sampling import Sampled, SampleFlags, SamplingRows
    from infer.parallel import TP
    from infer.rows import RowState


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The static numbers of every layer of one model on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float  # of every RMSNorm
    sliding_window: int | None  # positions a query sees, itself included; None: all

    @property
    def scale(self) -> float:
        """Factor on attention scores, 1 / sqrt(head_dim)."""
        return float(self.head_dim**-0.5)


class QKNormRopeStore(Protocol):
    """Normalise q and k by head (when given norms), rotate them, store k and v; return q.

    ``qkv`` is ``[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]``. Writes token t's k and v
    to slot ``slot_mapping[t]`` of the caches and mutates nothing else; returns a fresh
    ``[num_tokens, num_heads, head_dim]``.
    """

    def __call__(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        step: Any,
        shape: LayerShape,
    ) -> Tensor: ...


class Attention(Protocol):
    """Attend from q ``[num_tokens, num_heads, head_dim]`` over pages; only reads.

    Returns ``[num_tokens, num_heads * head_dim]``. Rows of tokens that belong to no sequence
    (padding) hold anything finite.
    """

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, step: Any, shape: LayerShape
    ) -> Tensor: ...


class Prepare(Protocol):
    """Work out once a step what every layer needs: the ``step`` the other functions receive.

    Its type is the backend's own affair: a value that torch.compile can take as an argument where
    the backend is compiled, so tensors of stable rank and no Python number that changes.
    ``k_cache`` is any layer's, for its block size and dtype.
    """

    def __call__(
        self, meta: AttentionMeta, cos_sin: Tensor, k_cache: Tensor, shape: LayerShape
    ) -> Any: ...


# infer.models.decoder.layer; callers pass every argument by position.
LayerFn = Callable[..., tuple[Tensor, Tensor]]


class FusedDecode(Protocol):
    """Decode steps in fewer kernels than the stages; capturable in a CUDA Graph.

    ``start`` (or ``start_embedded``), ``layers``, and then ``normed``, or ``score`` with ``sample``
    or ``finish``: each passes on, once, what the one before returned. Sequence s is token s and
    sampling row s.
    """

    def start(
        self,
        weights: Weights,
        kv: KVCache,
        rows: RowState,
        batch: Batch,
        changed: Mapping[str, Tensor],
        shape: LayerShape,
    ) -> Any:
        """Apply ``infer.rows.changes`` to ``rows`` (donated), embed tokens, plan; for one rank."""

    def start_embedded(
        self, weights: Weights, kv: KVCache, hidden: Tensor, meta: AttentionMeta, shape: LayerShape
    ) -> Any:
        """Plan the step of these embedded tokens ``[num_seqs, hidden_size]``."""

    def layers(self, weights: Weights, kv: KVCache, run: Any, tp: TP) -> Any:
        """Run all layers."""

    def normed(self, run: Any) -> Tensor:
        """The final norm of every row ``[num_seqs, hidden_size]``."""

    def score(self, weights: Weights, run: Any, batch: Batch, rows: RowState, held: range) -> Any:
        """Score the vocabulary ids ``held``, this rank's, in every row, without truncation."""

    def sample(self, scored: Any) -> Sampled:
        """The best of this rank's ids."""

    def finish(self, scored: Any, batch: Batch, rows: RowState) -> Tensor:
        """The best ids and whether a logit was NaN, i32[2, num_seqs]; for one rank.

        Every row of ``rows`` (donated) remembers its token.
        """


@dataclass(frozen=True, slots=True)
class WholeWeights(Weights):
    """Weights in a backend's own layout, which runs all layers in one go (one rank only).

    ``layers`` may be empty: what this holds is the backend's own affair.
    """

    @abstractmethod
    def run(
        self, kv: KVCache, batch: Batch, last_token: Tensor, ops: Ops, shape: LayerShape
    ) -> Tensor:
        """Run every token through every layer and write its K and V (``kv`` is donated).

        ``last_token`` is ``[rows]``, see ``infer.batch.merge_ids``. Returns the residual stream
        ``[num_tokens, hidden_size]`` before the final norm.
        """

    @abstractmethod
    def logits(self, hidden: Tensor, rows: Tensor, eps: float) -> Tensor:
        """Final norm and LM head of rows (i32) of what ``run`` returned: f32 ``[rows, V]``."""

    def sample(
        self,
        logits: Tensor,
        sample_logits: Tensor,
        positions: Tensor,
        rows: Tensor,
        params: SamplingRows,
        flags: SampleFlags,
    ) -> Sampled:
        """``infer.ops.sample.sample`` with the parameters of rows (i32[M]) of all ``params``."""
        from infer.ops.sample import sample

        return sample(logits, sample_logits, positions, params.select(rows), flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """A backend: what ``infer.models.decoder`` is written in."""

    name: str
    cos_sin: Tensor  # f32[positions, head_dim] of infer.rope, on the model's device
    prepare: Prepare
    # linear(x [T, in], weight [out, in], bias | None) -> [T, out]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    # add_rms_norm(x, residual | None, weight, eps) -> (normed sum, sum)
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    qk_norm_rope_store: QKNormRopeStore
    attention: Attention
    silu_mul: Callable[[Tensor], Tensor]  # [T, 2I], gate then up -> [T, I]
    # Lays weights out once, before the first step; where one rank runs uncompiled layers.
    lay_out: Callable[[Weights, LayerShape], Weights] | None = None
    layer: LayerFn | None = None  # a compiled infer.models.decoder.layer over these stages
    fused_decode: FusedDecode | None = None
    capturable: bool = False  # no stage reads the device back, so CUDA Graphs can hold them
