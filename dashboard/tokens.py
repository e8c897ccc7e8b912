"""Tokens with their probabilities, as values and as HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. ``top`` are the likeliest ones, itself included."""

    text: str
    logprob: float | None = None
    top: tuple[tuple[str, float], ...] = ()


def tokens_of(text: str, logprobs: Mapping[str, Any] | None) -> list[Token]:
    """The tokens of one piece of a stream; one without probabilities when there are none."""
    if not logprobs or not logprobs.get("tokens"):
        return [Token(text)] if text else []
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    return [
        Token(
            _readable(token),
            logprob,
            tuple(sorted(((_readable(t), v) for t, v in (top or {}).items()), key=lambda p: -p[1])),
        )
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True
        )
    ]


def tokens_html(
    name: str, tokens: Sequence[Token], *, prefix: str = "", note: str = "", forks: bool = False
) -> str:
    """A column of tokens, coloured by probability; page.js shows the alternatives of one.

    Where it ``forks``, choosing a token starts something.
    """
    role = "button" if forks else "img"
    body = "".join(_token(i, token, role) for i, token in enumerate(tokens))
    if prefix:
        body = f'<span class="prefix" title="forked from A">{escape(prefix)}</span>{body}'
    if not body:
        body = '<span class="hint">Nothing generated yet.</span>'
    return (
        f'<section class="panel tokens-box"><h3>{name}</h3>'
        f'<div class="tokens" role="group" aria-label="Tokens of {name}">{body}</div>'
        '<div class="token-detail" role="status"></div>'
        f'<p class="hint">{escape(note) or "&nbsp;"}</p>'
        '<p class="legend">unlikely <span class="swatches"><span class="swatch p-0"></span>'
        '<span class="swatch p-2"></span><span class="swatch p-3"></span>'
        '<span class="swatch p-5"></span></span> certain</p></section>'
    )


def _token(index: int, token: Token, role: str) -> str:
    visible = escape(token.text).replace("\n", "↵<br>") or "∅"
    focus = 0 if index == 0 else -1
    if token.logprob is None:
        return (
            f'<span class="token" role="{role}" data-index="{index}" tabindex="{focus}">'
            f"{visible}</span>"
        )
    share = math.exp(token.logprob)
    top = [[text, round(100 * math.exp(value), 2)] for text, value in token.top]
    detail = json.dumps({"text": token.text, "share": round(100 * share, 2), "top": top},
                        ensure_ascii=False)  # fmt: skip
    label = f"{token.text.strip() or 'blank'}, {100 * share:.0f} percent"
    return (
        f'<span class="token p-{_level(share)}" role="{role}" data-index="{index}" '
        f'tabindex="{focus}" aria-label="{escape(label, quote=True)}" '
        f'data-detail="{escape(detail, quote=True)}">{visible}</span>'
    )


def _level(share: float) -> int:
    """0 (unlikely) to 5 (certain)."""
    return sum(share >= bound for bound in (0.1, 0.3, 0.55, 0.8, 0.95))


def _readable(token: str) -> str:
    return "�" if token.startswith("bytes:") else token
