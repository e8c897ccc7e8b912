"""``POST /v1/completions``: prompts of text or token ids, continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.errors import RequestError
from infer.server.choices import Choice
from infer.server.config import ServerConfig
from infer.server.errors import bad_request
from infer.server.generation import News, Prompt
from infer.server.logprobs import LegacyLogprobs, joined, prompt_logprobs
from infer.server.params import Options
from infer.server.protocol import CompletionBody
from infer.tokenizer import Tokenizer
from infer.types import TokenEvent


def prompts_of(body: CompletionBody, config: ServerConfig) -> list[str | list[int]]:
    """The prompts of a request, one by one.

    Raises:
        ApiError: none, or too many.
    """
    given = body.prompt
    prompts: list[str | list[int]]
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        prompts = [given]
    else:
        prompts = list(given)  # type: ignore[arg-type]
    if not 1 <= len(prompts) <= config.max_prompts:
        raise bad_request(
            f"prompt has {len(prompts)} entries, it must have from 1 to {config.max_prompts}",
            param="prompt",
        )
    return prompts


def encode_prompt(
    prompt: str | list[int], tokenizer: Tokenizer, *, add_special_tokens: bool, echo: bool
) -> tuple[tuple[int, ...], str]:
    """A prompt's token ids, and its text when that will be echoed.

    Raises:
        RequestError: the text is not valid Unicode.
    """
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt, add_special_tokens)), prompt
    text = tokenizer.decode(prompt, skip_special_tokens=False) if echo else ""
    return tuple(prompt), text


@dataclass(slots=True)
class CompletionFormat:
    """Writes ``text_completion`` documents."""

    answer_id: str
    created: int
    model: str
    tokenizer: Tokenizer
    options: Options
    texts: Sequence[str]  # of the prompts, for echo
    _legacy: dict[int, LegacyLogprobs] = field(default_factory=dict)

    def whole(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """The answer in one document, without its usage."""
        choices = [
            self._choice(News(prompt, choice, choice.total, choice.tokens))
            for prompt in prompts
            for choice in prompt.choices
        ]
        return self._document(choices)

    def chunk(self, news: News) -> dict[str, Any]:
        """One choice's news as a streamed document."""
        return self._document([self._choice(news)])

    def empty_chunk(self) -> dict[str, Any]:
        """A streamed document without choices."""
        return self._document([])

    def _document(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, news: News) -> dict[str, Any]:
        choice, prompt = news.choice, news.prompt
        first = choice.index not in self._legacy
        text = news.delta.content
        if self.options.echo and first:
            text = self.texts[choice.index // self.options.params.n] + text
        document = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(prompt, choice, news.tokens, first),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop,
        }
        if self.options.show_prompt_logprobs and first and prompt.logprobs is not None:
            document["prompt_logprobs"] = prompt_logprobs(self.tokenizer, prompt.logprobs)
        return document

    def _logprobs(
        self, prompt: Prompt, choice: Choice, tokens: Sequence[TokenEvent], first: bool
    ) -> dict[str, Any] | None:
        legacy = self._legacy.setdefault(choice.index, LegacyLogprobs(self.tokenizer))
        top_n = self.options.params.logprobs
        if top_n is None:
            return None
        parts = []
        if self.options.echo and first:
            if prompt.logprobs is None:
                raise RequestError("the prompt's log-probabilities are missing", param="echo")
            ids = prompt.request.prompt_token_ids
            parts.append(legacy.prompt(ids, prompt.logprobs, top_n))
        parts.append(legacy.tokens(tokens, top_n))
        return joined(parts)
