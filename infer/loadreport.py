"""What a load's clients saw, summed up: percentiles, rates, and goodput under bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infer.errors import ConfigError

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one request's client saw. Times are seconds from sending."""

    error: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    gaps: tuple[float, ...] = ()  # between events that carried tokens
    total: float = 0.0

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.total - self.ttft) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Bounds in seconds that a good answer keeps; None is no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From ``ttft=0.5,tpot=0.05,e2e=10``.

        Raises:
            ConfigError: another name, or not a number.
        """
        bounds: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                bounds[name.strip()] = float(value)
            except ValueError:
                raise ConfigError(
                    f"slo has {part!r}; a bound is a name and seconds, like ttft=0.5"
                ) from None
        unknown = set(bounds) - {"ttft", "tpot", "e2e"}
        if unknown:
            raise ConfigError(f"slo has {unknown.pop()!r}; the bounds are ttft, tpot and e2e")
        return cls(**bounds)

    def kept(self, result: Result) -> bool:
        """Whether a result keeps every bound."""
        pairs = ((self.ttft, result.ttft), (self.tpot, result.tpot), (self.e2e, result.total))
        return result.error is None and all(
            bound is None or value is None or value <= bound for bound, value in pairs
        )


def summary(results: Sequence[Result], seconds: float, slo: Slo) -> dict[str, Any]:
    """The report of a load; times in milliseconds."""
    good = [r for r in results if r.error is None]
    tpots = [t for r in good if (t := r.tpot) is not None]
    output = sum(r.output_tokens for r in good)
    kept = sum(slo.kept(r) for r in results)
    errors = sorted({r.error for r in results if r.error is not None})
    return {
        "requests": len(results),
        "failed": len(results) - len(good),
        "errors": errors[:5],
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(r.prompt_tokens for r in good),
        "output_tokens": output,
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(output / seconds, 2),
        "ttft_ms": percentiles([r.ttft for r in good]),
        "tpot_ms": percentiles(tpots),
        "itl_ms": percentiles([gap for r in good for gap in r.gaps]),
        "e2e_ms": percentiles([r.total for r in good]),
        "slo": {k: v for k in ("ttft", "tpot", "e2e") if (v := getattr(slo, k)) is not None},
        "goodput_per_s": round(kept / seconds, 3),
        "slo_kept": round(kept / len(results), 4) if results else 0.0,
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles (linear between neighbours) and maximum in milliseconds; {} for none."""
    if not values:
        return {}
    ordered = sorted(values)

    def at(share: float) -> float:
        position = share * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

    shown = {"mean": sum(ordered) / len(ordered)}
    shown |= {f"p{p}": at(p / 100) for p in PERCENTILES}
    shown["max"] = ordered[-1]
    return {name: round(value * 1e3, 3) for name, value in shown.items()}


def render(report: dict[str, Any]) -> str:
    """The report for people."""
    counts = f"{report['requests']} requests, {report['failed']} failed"
    rates = (
        f"{report['requests_per_s']:.2f} requests/s, "
        f"{report['output_tokens_per_s']:.1f} output tokens/s"
    )
    lines = [
        f"{report['model']}: {report['load']}",
        f"{counts}, in {report['seconds']:.2f} s: {rates}",
        "",
        f"{'ms':<6}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99", "max")),
    ]
    for name in ("ttft", "tpot", "itl", "e2e"):
        values = report[f"{name}_ms"]
        if values:
            lines.append(f"{name.upper():<6}" + "".join(f"{v:>10.2f}" for v in values.values()))
    if report["slo"]:
        bounds = ", ".join(f"{k} <= {v:g} s" for k, v in report["slo"].items())
        lines.append(
            f"goodput {report['goodput_per_s']:.2f} requests/s under {bounds} "
            f"({report['slo_kept']:.0%} of requests)"
        )
    if "start" in report:
        start = report["start"]
        lines.append(
            f"server ready after {start['ready_s']:.2f} s, {start['idle_mib']:.0f} MiB at idle"
        )
    lines += [f"error: {error}" for error in report["errors"]]
    return "\n".join([*lines, ""])
