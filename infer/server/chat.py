"""``POST /v1/chat/completions``: a conversation through the model's own template, continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.server.generation import News, Prompt
from infer.server.logprobs import chat_logprobs, prompt_logprobs
from infer.server.params import Options
from infer.tokenizer import Tokenizer


@dataclass(slots=True)
class ChatFormat:
    """Writes ``chat.completion`` documents and their chunks."""

    answer_id: str
    created: int
    model: str
    tokenizer: Tokenizer
    options: Options
    role: str  # of the message that the answer is, or goes on with
    _begun: set[int] = field(default_factory=set)

    def whole(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """The answer in one document, without its usage."""
        (prompt,) = prompts
        choices = []
        for choice in prompt.choices:
            total = choice.total
            message: dict[str, Any] = {"role": self.role, "content": total.content or None}
            if not total.tool_calls:
                message["content"] = total.content
            if total.reasoning:
                message["reasoning_content"] = total.reasoning
            if total.tool_calls:
                message["tool_calls"] = [
                    {key: call[key] for key in ("id", "type", "function")}
                    for call in total.tool_calls
                ]
            choices.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": self._logprobs(choice.tokens),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop,
                }
            )
        document = self._document("chat.completion", choices)
        if prompt.logprobs is not None:
            document["prompt_logprobs"] = prompt_logprobs(self.tokenizer, prompt.logprobs)
        return document

    def chunk(self, news: News) -> dict[str, Any]:
        """One choice's news as a streamed document; a choice's first one names its role."""
        choice = news.choice
        delta: dict[str, Any] = {}
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            delta = {"role": self.role, "content": ""}
        if news.delta.content:
            delta["content"] = news.delta.content
        if news.delta.reasoning:
            delta["reasoning_content"] = news.delta.reasoning
        if news.delta.tool_calls:
            delta["tool_calls"] = news.delta.tool_calls
        document = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(news.tokens),
            "finish_reason": choice.finish_reason,
        }
        if choice.stop is not None:
            document["stop_reason"] = choice.stop
        return self._document("chat.completion.chunk", [document])

    def empty_chunk(self) -> dict[str, Any]:
        """A streamed document without choices."""
        return self._document("chat.completion.chunk", [])

    def _logprobs(self, tokens: Sequence[Any]) -> dict[str, Any] | None:
        if self.options.params.logprobs is None:
            return None
        return chat_logprobs(self.tokenizer, tokens)

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
