"""What every comparison shares: the model, the paths, and two runs to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infer.config import EngineConfig
from infer.model import Model
from infer.verify.compare import Errors, compare, joined
from infer.verify.paths import Path, prompts
from infer.verify.reference import greedy_paths, path_logits
from infer.verify.runs import Observed, observe
from infer.verify.subject import Subject

# Relative L2 of a position's logits. In float32 only the order of additions differs.
AGAINST_TRANSFORMERS = 1e-3
AGAINST_OURSELVES = 2e-4
BLOCK = 16
BASE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_blocks": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "prefix_caching": False,
    "compile": False,
    "cuda_graphs": False,
    "pipeline_depth": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Made once, in float32. ``reference`` and ``half`` are transformers' logits by path."""

    subject: Subject
    model: Model
    paths: tuple[Path, ...]
    reference: dict[str, Tensor]  # f32[num_positions, vocab_size]
    half: dict[str, Tensor] | None  # the same in bfloat16; None: not asked for
    base: Observed  # each path alone, whole, eager, without a prefix cache
    tp: int  # ranks to compare with; 1: none

    def config(self, **changes: Any) -> EngineConfig:
        """The options of the base run with ``changes``."""
        return EngineConfig(**{**BASE, **changes})

    def against_base(self, run: Observed, paths: Sequence[Path] | None = None) -> Errors:
        """``run`` beside the base run, over the positions it has."""
        return joined([_apart(run, p, self.base.of(p)) for p in paths or self.paths])

    def against_reference(self, run: Observed, paths: Sequence[Path] | None = None) -> Errors:
        """``run`` beside transformers in float32, over the positions it has."""
        return joined(
            [
                _apart(run, p, (self.reference[p.name], list(range(p.num_positions))))
                for p in paths or self.paths
            ]
        )

    def half_errors(self, run: Observed) -> Errors:
        """transformers' own bfloat16 beside its float32, over the positions ``run`` has."""
        assert self.half is not None
        pairs = [(p.name, run.of(p)[1]) for p in self.paths]
        return joined([compare(self.half[n][at], self.reference[n][at]) for n, at in pairs])


def make_context(subject: Subject, *, tp: int, half: bool, seed: int = 0) -> Context:
    """Load everything and make the runs to compare with.

    Raises:
        InferError: the model cannot be loaded or is too small.
    """
    model = subject.load(torch.float32)
    hf = subject.reference(model, torch.float32)
    paths = tuple(greedy_paths(hf, prompts(model, seed=seed)))
    reference = {path.name: path_logits(hf, path) for path in paths}
    low = None
    if half:
        hf = hf.to(torch.bfloat16)
        low = {path.name: path_logits(hf, path) for path in paths}
    del hf
    base = observe(model, EngineConfig(**BASE), [[path] for path in paths])
    return Context(
        subject=subject,
        model=model,
        paths=paths,
        reference=reference,
        half=low,
        base=base,
        tp=tp,
    )


def sampled_like(run: Observed, paths: Sequence[Path]) -> tuple[int, int]:
    """Sampled tokens that are the path's own, and how many were sampled."""
    found = [
        run.sampled[path.name, at] == path.tokens[at]
        for path in paths
        for at in range(path.num_prompt, len(path.tokens))
        if (path.name, at) in run.sampled
    ]
    return sum(found), len(found)


def _apart(run: Observed, path: Path, want: tuple[Tensor, list[int]]) -> Errors:
    got, at = run.of(path)
    assert at, f"the run has nothing of {path.name}"
    rows = [want[1].index(position) for position in at]
    return compare(got, want[0][rows])
