"""From events to answers: what ``LLM.generate`` and ``LLM.stream`` return."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from infer.errors import EngineError
from infer.text import TextStream
from infer.tokenizer import Tokenizer
from infer.types import (
    Event,
    FinishEvent,
    FinishReason,
    Logprob,
    PromptLogprobsEvent,
    Request,
    RequestStats,
    TokenEvent,
)

TokenLogprobs = tuple[Logprob, tuple[Logprob, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One continuation of a prompt.

    ``text`` is ``token_ids`` decoded by themselves, as transformers decodes them: a sentencepiece
    model's text has lost a first blank, and a prompt and it may not join as they stand.
    """

    index: int
    text: str | None  # None when the model has no tokenizer
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request: its continuations, and the first one's fields for short."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    metrics: RequestStats
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def text(self) -> str | None:
        """Text of the first continuation."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first continuation, a final EOS or stop token included."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first continuation ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities of the first continuation, when asked for."""
        return self.outputs[0].logprobs

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV came from the prefix cache."""
        return self.metrics.num_cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a step added to one continuation of a streamed request."""

    index: int
    text: str
    token_id: int | None = None
    logprob: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class _Choice:
    stream: TextStream | None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishEvent | None = None
    last_token: float | None = None


class OutputBuilder:
    """Collects one request's events. Times are monotonic seconds, read as events arrive."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, arrival: float) -> None:
        self.request = request
        self._arrival = arrival
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._gaps: list[float] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._choices = [
            _Choice(TextStream(tokenizer, request.params) if tokenizer else None)
            for _ in range(request.params.n)
        ]

    @property
    def done(self) -> bool:
        """Whether every continuation has ended."""
        return all(choice.finish is not None for choice in self._choices)

    @property
    def num_tokens(self) -> int:
        """Tokens received so far."""
        return sum(len(choice.token_ids) for choice in self._choices)

    def scheduled(self, when: float) -> None:
        """The request's first step began."""
        self._scheduled = when

    def push(self, event: Event) -> Delta | None:
        """Take the next event; returns what it adds, if anything."""
        if isinstance(event, PromptLogprobsEvent):
            self._prompt_logprobs = event.logprobs
            return None
        choice = self._choices[event.index]
        if isinstance(event, TokenEvent):
            return self._token(choice, event)
        if event.reason is FinishReason.ERROR:
            raise EngineError(f"request {event.request_id!r} failed: {event.error}")
        choice.finish = event
        text = choice.stream.finish(event.reason, event.stop) if choice.stream else ""
        choice.text.append(text)
        return Delta(index=event.index, text=text, finish_reason=event.reason)

    def first_token(self, when: float) -> None:
        """The request's first token came, its value to follow in ``complete``."""
        if self._first_token is None:
            self._first_token = when

    def complete(self, event: FinishEvent, token_ids: Sequence[int], when: float) -> None:
        """Take a continuation as a whole, instead of token by token."""
        choice = self._choices[event.index]
        choice.token_ids = list(token_ids)
        choice.last_token = when
        if choice.stream:
            choice.text.append(choice.stream.push(token_ids))
        self.push(event)

    def _token(self, choice: _Choice, event: TokenEvent) -> Delta:
        now = time.monotonic()
        if self._first_token is None:
            self._first_token = now
        if choice.last_token is not None:
            self._gaps.append(now - choice.last_token)
        choice.last_token = now
        choice.token_ids.append(event.token_id)
        logprob = None
        if event.logprob is not None:
            logprob = (event.logprob, event.top_logprobs)
            choice.logprobs.append(logprob)
        text = choice.stream.push([event.token_id]) if choice.stream else ""
        choice.text.append(text)
        return Delta(index=event.index, text=text, token_id=event.token_id, logprob=logprob)

    def result(self) -> RequestOutput:
        """The finished request."""
        completions = []
        for index, choice in enumerate(self._choices):
            assert choice.finish is not None, "result before the request has ended"
            completions.append(
                Completion(
                    index=index,
                    text="".join(choice.text) if choice.stream else None,
                    token_ids=tuple(choice.token_ids),
                    finish_reason=choice.finish.reason,
                    stop=choice.finish.stop,
                    logprobs=(
                        tuple(choice.logprobs) if self.request.params.logprobs is not None else None
                    ),
                )
            )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=tuple(completions),
            metrics=self._metrics(),
            prompt_logprobs=self._prompt_logprobs,
        )

    def _metrics(self) -> RequestStats:
        finishes = [choice.finish for choice in self._choices if choice.finish is not None]
        last = [choice.last_token for choice in self._choices if choice.last_token is not None]
        params = self.request.params
        return RequestStats(
            request_id=self.request.request_id,
            finish_reason=finishes[0].reason,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=max(f.num_cached_tokens for f in finishes),
            num_generated_tokens=self.num_tokens,
            num_preemptions=sum(f.num_preemptions for f in finishes),
            n=params.n,
            max_tokens=params.max_tokens,
            arrival=self._arrival,
            scheduled=self._scheduled,
            first_token=self._first_token,
            last_token=max(last, default=None),
            finished=time.monotonic(),
            inter_token_s=tuple(self._gaps),
            longest_choice=max(len(choice.token_ids) for choice in self._choices),
        )
