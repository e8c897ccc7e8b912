"""One choice of an answer: tokens become text, reasoning and tool calls as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from infer.types import FinishEvent, FinishReason, TokenEvent


@dataclass(slots=True)
class Delta:
    """What a choice gained. False when it gained nothing."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # OpenAI's delta objects

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)
