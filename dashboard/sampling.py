"""The sampling controls: their definitions, and what they add to a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from infer.errors import RequestError
from infer.types import MAX_STOP_STRINGS

DEFAULT_MAX_TOKENS = 512
WHOLE = {"max_tokens": (1, 2**31 - 1), "seed": (0, 2**63 - 1)}  # lowest and highest
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A numeric control."""

    name: str
    label: str
    low: float
    high: float
    step: float
    info: str


RANGES = (
    Range(
        name="temperature", label="Temperature", low=0, high=2, step=0.05,
        info="0: always the likeliest",
    ),
    Range(
        name="top_p", label="Top-p", low=0.01, high=1, step=0.01,
        info="probability kept",
    ),
    Range(name="top_k", label="Top-k", low=0, high=200, step=1, info="0: keep all"),
    Range(
        name="min_p", label="Min-p", low=0, high=1, step=0.01,
        info="share of the likeliest",
    ),
)  # fmt: skip
PENALTIES = (
    Range(
        name="repetition_penalty", label="Repetition penalty", low=0.5, high=2, step=0.05,
        info="above 1: fewer repeats",
    ),
    Range(
        name="presence_penalty", label="Presence penalty", low=-2, high=2, step=0.1,
        info="once a token",
    ),
    Range(
        name="frequency_penalty", label="Frequency penalty", low=-2, high=2, step=0.1,
        info="every time",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Controls:
    """The controls of one page by the request field they set."""

    by_name: Mapping[str, Any]  # Gradio components

    @property
    def components(self) -> list[Any]:
        """In the order ``settings`` expects their values."""
        return list(self.by_name.values())

    def settings(self, values: Sequence[Any]) -> dict[str, Any]:
        """Control values as request fields; blanks and neutral penalties are left out.

        Raises:
            RequestError: a whole number is none, or out of range.
        """
        fields: dict[str, Any] = {}
        for name, value in zip(self.by_name, values, strict=True):
            if name == "stop":
                lines = [line for line in str(value or "").splitlines() if line]
                if lines:
                    fields["stop"] = lines[:MAX_STOP_STRINGS]
            elif value is None or (name.endswith("_penalty") and value == _neutral(name)):
                continue
            elif name in WHOLE:
                if str(value).strip():
                    fields[name] = _whole(name, str(value).strip())
            elif name == "top_k":
                fields[name] = int(value)
            else:
                fields[name] = float(value)
        return fields

    def updates(self, defaults: Mapping[str, float]) -> list[Any]:
        """Values and hints that show a model's defaults."""
        updates = []
        for name in self.by_name:
            known = {r.name: r for r in (*RANGES, *PENALTIES)}.get(name)
            value = defaults.get(name, NEUTRAL.get(name))
            if known is None or value is None:
                updates.append(gr.skip())
            else:
                info = f"{known.info} · default\u00a0{value:g}"
                updates.append(gr.update(value=min(value, known.high), info=info))
        return updates


def build_controls(prefix: str, max_tokens: int = DEFAULT_MAX_TOKENS) -> Controls:
    """Place the controls here; element ids begin with ``prefix``."""
    made = build_few(prefix, max_tokens)
    made["stop"] = gr.Textbox(
        value="", label="Stop strings", info="one a line", lines=2, elem_id=f"{prefix}-stop-strings"
    )
    with gr.Accordion("Penalties", open=False):
        made |= {r.name: _slider(prefix, r) for r in PENALTIES}
    return Controls(made)


def build_few(prefix: str, max_tokens: int) -> dict[str, Any]:
    """Place the controls that most experiments need; they go by the field they set."""
    made = {r.name: _slider(prefix, r) for r in RANGES}
    # Text boxes, because a number box that is left blank says 0.
    made["max_tokens"] = gr.Textbox(
        value=str(max_tokens), label="Max tokens", info="blank: to the context's end",
        max_lines=1, elem_id=f"{prefix}-max-tokens",
    )  # fmt: skip
    made["seed"] = gr.Textbox(
        value="", label="Seed", info="blank: a new one each time", max_lines=1,
        elem_id=f"{prefix}-seed",
    )  # fmt: skip
    return made


def _slider(prefix: str, kind: Range) -> Any:
    return gr.Slider(
        kind.low, kind.high, value=_neutral(kind.name), step=kind.step,
        label=kind.label, info=kind.info, elem_id=f"{prefix}-{kind.name.replace('_', '-')}",
    )  # fmt: skip


def _whole(name: str, text: str) -> int:
    low, high = WHOLE[name]
    digits = text.replace(",", "").replace(" ", "")
    if not (digits.isascii() and digits.isdecimal() and low <= int(digits[:20]) <= high):
        label = name.replace("_", " ").capitalize()
        raise RequestError(
            f"{label} is {text[:40]!r}; it must be a whole number from {low} to {high}, or blank",
            param=name,
        )
    return int(digits)


def _neutral(name: str) -> float:
    return NEUTRAL.get(name, 0.0)
