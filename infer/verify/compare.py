"""How far two sets of logits are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Differences of logits over N positions.

    A position whose best token differs is a *tie* when the reference itself prefers its own by no
    more than the two differ there.
    """

    max_abs: float
    rel_l2: float  # |got - want| / |want| of a position, the largest
    rms: float  # and their root mean square
    agreed: int  # positions with the same best token
    ties: int
    total: int
    by_position: tuple[float, ...]  # relative L2

    @property
    def same_tokens(self) -> bool:
        """Every best token is the same, ties aside."""
        return self.agreed + self.ties == self.total


def compare(got: Tensor, want: Tensor) -> Errors:
    """Compare ``[N, V]`` with ``[N, V]``, N at least 1; what is not finite is far apart."""
    assert got.shape == want.shape and got.shape[0]
    got, want = got.double(), want.double()
    apart = torch.nan_to_num(got - want, nan=float("inf"), posinf=float("inf"), neginf=float("inf"))
    relative = apart.norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)
    ours, theirs = got.argmax(dim=-1), want.argmax(dim=-1)
    differs = ours != theirs
    lead = want.gather(1, theirs[:, None]) - want.gather(1, ours[:, None])
    worst = apart.abs().amax(dim=-1)
    ties = differs & (lead[:, 0] <= 2 * worst) & worst.isfinite()
    return Errors(
        max_abs=float(worst.max()),
        rel_l2=float(relative.max()),
        rms=float(relative.square().mean().sqrt()),
        agreed=int((~differs).sum()),
        ties=int(ties.sum()),
        total=got.shape[0],
        by_position=tuple(relative.tolist()),
    )


def joined(parts: Sequence[Errors]) -> Errors:
    """The errors of several paths as one."""
    total = sum(part.total for part in parts)
    return Errors(
        max_abs=max(part.max_abs for part in parts),
        rel_l2=max(part.rel_l2 for part in parts),
        rms=(sum(part.rms**2 * part.total for part in parts) / total) ** 0.5,
        agreed=sum(part.agreed for part in parts),
        ties=sum(part.ties for part in parts),
        total=total,
        by_position=tuple(value for part in parts for value in part.by_position),
    )
