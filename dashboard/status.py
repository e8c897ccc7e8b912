"""Small pieces of HTML that several pages show. Everything in them is escaped."""

from __future__ import annotations

from html import escape

from infer.errors import InferError


def meter(used: int | None, note: str, limit: int | None = None) -> str:
    """The line under the composer: how full the context is, or a note."""
    if note or used is None:
        return f'<div class="meter" role="status"><span>{escape(note)}</span></div>'
    if not limit:
        text = f"{used:,} tokens of context used" if used else ""
        return f'<div class="meter" role="status"><span>{text}</span></div>'
    share = min(1.0, used / limit)
    level = "full" if share > 0.9 else "high" if share > 0.7 else "low"
    return (
        '<div class="meter" role="status">'
        f"<span>Context {used:,} of {limit:,} tokens</span>"
        f'<span class="meter-track" aria-hidden="true"><span class="meter-fill {level}" '
        f'style="width:{100 * share:.1f}%"></span></span></div>'
    )


def notice(title: str, text: str, *, kind: str = "info") -> str:
    """A box that says why there is nothing to see."""
    return (
        f'<div class="notice {kind}" role="status"><strong>{escape(title)}</strong>'
        f"<p>{escape(text)}</p></div>"
    )


def failure(error: InferError) -> str:
    """A box for an error."""
    return notice("No answer from the engine", str(error), kind="bad")


def tile(label: str, value: str, note: str = "") -> str:
    """One figure with its name."""
    small = f"<small>{escape(note)}</small>" if note else ""
    return (
        f'<div class="tile"><span class="tile-label">{escape(label)}</span>'
        f'<span class="tile-value">{escape(value)}</span>{small}</div>'
    )


def tiles(*items: str) -> str:
    """A row of tiles."""
    return f'<div class="tiles">{"".join(items)}</div>'
