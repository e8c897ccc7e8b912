"""All comparisons of one model, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from infer.errors import ConfigError
from infer.provenance import commit, processor, versions
from infer.verify.checks import CHECKS, Check
from infer.verify.context import Context, make_context
from infer.verify.half import half
from infer.verify.result import Outcome, Row
from infer.verify.subject import Subject

HALF_CHECKS = (
    Check("bf16-native", "bfloat16, backend native", half("native")),
    Check("bf16-torch", "bfloat16, backend torch", half("torch")),
    Check("bf16-triton", "bfloat16, backend triton", half("triton")),
    # flash-attn computes in 16 bits only, on pages of 256.
    Check(
        "bf16-flash_attn",
        "bfloat16, backend flash_attn",
        half("flash_attn", block_size=256, num_blocks=8),
    ),
    Check("bf16-graphs", "bfloat16, CUDA Graphs", half("auto", cuda_graphs=True)),
)
ALL_CHECKS = (*CHECKS, *HALF_CHECKS)


def verify(
    subject: Subject,
    *,
    only: Sequence[str] = (),
    tp: int = 1,
    half: bool = True,
    seed: int = 0,
    tell: Callable[[Row], None] | None = None,
) -> Outcome:
    """Make the comparisons, or those named by ``only``.

    Args:
        tp: ranks to compare with one; 1 leaves that out.
        half: compare bfloat16 too, when any of its comparisons is asked for.
        tell: called with each row as it is done.

    Raises:
        ConfigError: there is no comparison of such a name.
        InferError: the model cannot be loaded.
    """
    chosen = _chosen(only)
    wants_half = half and any(check in HALF_CHECKS for check in chosen)
    context = make_context(subject, tp=tp, half=wants_half, seed=seed)
    rows = []
    for check in chosen:
        row = _made(check, context)
        rows.append(row)
        if tell is not None:
            tell(row)
    return Outcome(conditions=_conditions(context), rows=tuple(rows))


def _chosen(only: Sequence[str]) -> tuple[Check, ...]:
    names = [check.name for check in ALL_CHECKS]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise ConfigError(f"there is no comparison {unknown[0]!r}; choose {', '.join(names)}")
    return tuple(check for check in ALL_CHECKS if not only or check.name in only)


def _made(check: Check, context: Context) -> Row:
    """The check's row. An engine that breaks down has failed the comparison, not ended the rest."""
    try:
        return check.run(check.name, check.title, context)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return Row(name=check.name, title=check.title, status="fail", reasons=(reason,))


def _conditions(context: Context) -> dict[str, str]:
    """What a verdict depends on."""
    model = context.model
    found = {
        "model": model.name,
        "weights": "random" if context.subject.random else str(model.path),
        "device": processor(model.device),
        "threads": str(torch.get_num_threads()),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "paths": ", ".join(f"{p.num_prompt} + {p.num_generated}" for p in context.paths),
        **versions(),
    }
    revision = commit()
    return {**found, "commit": revision} if revision else found
