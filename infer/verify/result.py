"""What a comparison found, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from infer.verify.compare import Errors

Status = Literal["pass", "fail", "not run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison."""

    name: str
    title: str
    status: Status
    errors: Errors | None = None
    measure: str = "rel L2"  # which error the tolerance is for: rel L2 (the largest) or rms
    tolerance: float | None = None
    tokens: tuple[int, int] | None = None  # sampled tokens that were the path's, and all
    counts: dict[str, int] = field(default_factory=dict)  # the mechanism at work
    peak_bytes: int | None = None
    seconds: float = 0.0
    reasons: tuple[str, ...] = ()  # why it failed or was not run


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All comparisons of one model on one machine."""

    conditions: dict[str, str]
    rows: tuple[Row, ...]

    @property
    def failed(self) -> tuple[Row, ...]:
        """Comparisons that failed."""
        return tuple(row for row in self.rows if row.status == "fail")

    @property
    def passed(self) -> bool:
        """Nothing failed, and something ran."""
        return not self.failed and any(row.status == "pass" for row in self.rows)


def judged(
    name: str,
    title: str,
    errors: Errors,
    *,
    tolerance: float,
    measure: str = "rel L2",
    exact_tokens: bool = True,
    tokens: tuple[int, int] | None = None,
    counts: dict[str, int] | None = None,
    expected: dict[str, int] | None = None,
    at_least: dict[str, int] | None = None,
    peak_bytes: int | None = None,
    seconds: float = 0.0,
) -> Row:
    """A row with its verdict.

    Args:
        exact_tokens: every best token and every sampled token must be the reference's, ties aside.
        expected: counts that must be exactly these: the mechanism did what it should.
        at_least: counts below which the mechanism did not come into play, so nothing was shown.
    """
    counts = counts or {}
    reasons = []
    error = errors.rel_l2 if measure == "rel L2" else errors.rms
    if not error <= tolerance:
        reasons.append(f"{measure} {error:.3g} exceeds {tolerance:.3g}")
    if exact_tokens and not errors.same_tokens:
        wrong = errors.total - errors.agreed - errors.ties
        reasons.append(f"{wrong} of {errors.total} best tokens differ")
    if exact_tokens and tokens is not None and tokens[1] - tokens[0] > errors.ties:
        reasons.append(f"{tokens[1] - tokens[0]} of {tokens[1]} sampled tokens differ")
    for what, value in (expected or {}).items():
        if counts.get(what) != value:
            reasons.append(f"{what} is {counts.get(what)}, it should be {value}")
    for what, value in (at_least or {}).items():
        if counts.get(what, 0) < value:
            reasons.append(f"{what} is {counts.get(what, 0)}: the mechanism did not come into play")
    return Row(
        name=name,
        title=title,
        status="fail" if reasons else "pass",
        errors=errors,
        measure=measure,
        tolerance=tolerance,
        tokens=tokens,
        counts=counts,
        peak_bytes=peak_bytes,
        seconds=seconds,
        reasons=tuple(reasons),
    )


def not_run(name: str, title: str, reason: str) -> Row:
    """A comparison that says why it was not made."""
    return Row(name=name, title=title, status="not run", reasons=(reason,))
