"""``LLM``: generation for scripts and notebooks, in a few lines on top of the step API."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

from tqdm import tqdm

from infer import engine
from infer.config import EngineConfig
from infer.errors import ConfigError, EngineError, RequestError, StateError
from infer.initialize import init
from infer.interrupt import deferred_interrupt
from infer.loading import load
from infer.model import Model
from infer.outputs import Delta, OutputBuilder, RequestOutput
from infer.presets import find_preset
from infer.report import Report
from infer.state import EngineState, Ticket
from infer.types import Request, SamplingParams

LOAD_OPTIONS = ("device", "dtype", "load_format", "threads", "tp")
ENGINE_OPTIONS = tuple(f.name for f in fields(EngineConfig))

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


def advance(
    model: Model, state: EngineState, tickets: tuple[Ticket, ...]
) -> tuple[EngineState, tuple[Ticket, ...], list[Report]]:
    """One turn of the pipelined loop: launch a step, then collect all but the newest ``depth``.

    A step that stalled, or computed nothing, lets every launched step be collected first.
    """
    state, ticket = engine.launch(model, state)
    tickets = (*tickets, ticket)
    keep = state.pipeline_depth if ticket.plan.num_sequences else 0
    reports = []
    while len(tickets) > keep:
        state, report = engine.collect(model, state, tickets[0])
        tickets = tickets[1:]
        reports.append(report)
    return state, tickets, reports


class LLM:
    """A model with one engine state. ``generate``, ``chat`` and ``stream`` run it to the end.

    Args:
        model: a loaded ``Model``, or what ``infer.load`` takes.
        options: any option of ``EngineConfig``, and those of ``load`` when it has to load.

    One thread at a time may generate; ``state`` is the engine's state between calls, and stays
    good when a call is interrupted.
    """

    def __init__(self, model: Model | str | None = None, **options: Any) -> None:
        unknown = sorted(set(options) - {*LOAD_OPTIONS, *ENGINE_OPTIONS})
        if unknown:
            known = ", ".join(sorted((*LOAD_OPTIONS, *ENGINE_OPTIONS)))
            raise ConfigError(f"unknown option {unknown[0]!r}; the options are {known}")
        load_options = {k: v for k, v in options.items() if k in LOAD_OPTIONS}
        engine_options = {k: v for k, v in options.items() if k in ENGINE_OPTIONS}
        if isinstance(model, Model):
            if load_options:
                raise ConfigError(
                    f"{', '.join(sorted(load_options))}: options of load, but the model is loaded"
                )
            self.model = model
        else:
            preset = find_preset(model) if model is not None else None
            engine_options = {**(preset.engine if preset else {}), **engine_options}
            self.model = load(model, **load_options)
        self.state: EngineState = init(self.model, EngineConfig(**engine_options))
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue one prompt or many; outputs come in the order of the prompts.

        Prompts are texts or token ids. ``params`` is one for all, or one for each.

        Raises:
            RequestError: a prompt can never run; nothing was generated.
        """
        ids = self._prompt_ids(prompts)
        requests = self._requests(ids, params)
        with self._lock:
            return self._run(requests, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many through the model's chat template.

        ``template`` goes to ``Tokenizer.encode_chat`` and through it to the template, for example
        ``enable_thinking=False``, or ``continue_final_message=True, add_generation_prompt=False``.
        """
        many = bool(messages) and not isinstance(messages[0], Mapping)
        chats: Any = messages if many else [messages]
        ids = [self._chat_ids(chat, tools, template) for chat in chats]
        requests = self._requests(ids, params)
        with self._lock:
            return self._run(requests, progress)

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any
    ) -> Iterator[Delta]:
        """Continue one prompt (or chat) and yield what each step adds. Closing it aborts."""
        ids = self._one_prompt(prompt, template)
        (request,) = self._requests([ids], params)
        with self._lock:
            yield from self._stream(request)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """``generate`` in a worker thread, for asyncio programs."""
        return await asyncio.to_thread(self.generate, prompts, params, progress=False)

    async def astream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any
    ) -> AsyncIterator[Delta]:
        """``stream`` in worker threads, for asyncio programs."""
        deltas = self.stream(prompt, params, **template)
        try:
            while (delta := await asyncio.to_thread(next, deltas, None)) is not None:
                yield delta
        finally:
            await asyncio.to_thread(deltas.close)  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the other ranks of a tensor-parallel model now, not when the last reference goes.

        With one rank there is nothing to end.
        """
        if self.model.tp.link is not None:
            self.model.tp.link.close()

    def encode(self, prompt: Prompt | Messages) -> list[int]:
        """Token ids of a text or, through the chat template, of messages; ids stay as they are."""
        return list(self._one_prompt(prompt, {}))

    # --- prompts ----------------------------------------------------------------------------------

    def _tokenizer(self) -> Any:
        if self.model.tokenizer is None:
            raise RequestError(
                f"model {self.model.name!r} has no tokenizer; give token ids", param="prompt"
            )
        return self.model.tokenizer

    def _chat_ids(self, chat: Messages, tools: Any, template: Mapping[str, Any]) -> list[int]:
        ids: list[int] = self._tokenizer().encode_chat(chat, tools=tools, **template)
        return ids

    def _one_prompt(self, prompt: Prompt | Messages, template: Mapping[str, Any]) -> Sequence[int]:
        if isinstance(prompt, str):
            encoded: list[int] = self._tokenizer().encode(prompt)
            return encoded
        if isinstance(prompt, Mapping):
            raise RequestError(
                "a prompt is a mapping, it must be a text or token ids; messages are for chat",
                param="prompt",
            )
        if prompt and isinstance(prompt[0], Mapping):
            return self._chat_ids(prompt, None, template)  # type: ignore[arg-type]
        return prompt  # type: ignore[return-value]

    def _prompt_ids(self, prompts: Prompt | Sequence[Prompt]) -> list[Sequence[int]]:
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many: Any = [prompts] if single else prompts
        return [self._one_prompt(prompt, {}) for prompt in many]

    def _requests(
        self, ids: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(ids)
        if isinstance(params, Mapping):
            raise RequestError("params is a mapping, it must be SamplingParams", param="params")
        if len(params) != len(ids):
            raise RequestError(
                f"{len(params)} sampling parameters for {len(ids)} prompts; give one, or one each",
                param="params",
            )
        return [
            Request(request_id=f"llm-{next(self._ids)}", prompt_token_ids=tuple(prompt), params=one)
            for prompt, one in zip(ids, params, strict=True)
        ]

    # --- running ----------------------------------------------------------------------------------

    def _start(self, requests: list[Request]) -> dict[str, OutputBuilder]:
        if self.model.tp.link is not None:
            self.model.tp.link.check()
        if engine.has_work(self.state):
            raise StateError("this LLM's state has requests of its own; step it to its end first")
        arrival = time.monotonic()
        self.state = engine.submit(self.state, requests)
        return {r.request_id: OutputBuilder(r, self.model.tokenizer, arrival) for r in requests}

    def _steps(
        self, builders: Mapping[str, OutputBuilder], check: Callable[[], None] | None = None
    ) -> Iterator[Report]:
        """Run to the end; however this is left, nothing of the requests stays behind.

        A Ctrl-C is held back during a step. ``check`` raises one that the caller holds back, for a
        caller that does not let others run between steps.
        """
        tickets: tuple[Ticket, ...] = ()
        failed = False
        try:
            while engine.has_work(self.state):
                began = time.monotonic()
                if check is None:
                    with deferred_interrupt():
                        self.state, tickets, reports = advance(self.model, self.state, tickets)
                else:
                    self.state, tickets, reports = advance(self.model, self.state, tickets)
                    check()
                for report in reports:
                    for name in report.plan.admitted:
                        builders[name].scheduled(began)
                    yield report
        except EngineError:
            failed = True  # the ranks have ended, and nothing can be stepped any more
            raise
        finally:
            if not failed:
                self._drain(builders, tickets)

    def _drain(self, builders: Mapping[str, OutputBuilder], tickets: tuple[Ticket, ...]) -> None:
        if not engine.has_work(self.state):
            return
        with deferred_interrupt():
            for name in builders:
                self.state = engine.abort(self.state, name)
            while engine.has_work(self.state):
                self.state, tickets, _ = advance(self.model, self.state, tickets)

    def _run(self, requests: list[Request], progress: bool) -> list[RequestOutput]:
        builders = self._start(requests)
        by_token = any(r.params.logprobs is not None for r in requests)
        outputs: dict[str, RequestOutput] = {}
        num_tokens, started = 0, time.monotonic()
        shown = tqdm(total=len(requests), unit="req", desc="Generating") if progress else None
        with nullcontext() if shown is None else shown as bar, deferred_interrupt() as check:
            for report in self._steps(builders, check):
                _take(report, builders, by_token)
                num_tokens += report.stats.num_generated_tokens
                names = {finish.request_id for finish in report.accepted.finished}
                ended = {name: builders[name].result() for name in names if builders[name].done}
                outputs |= ended
                if bar is not None and ended:
                    rate = num_tokens / (time.monotonic() - started)
                    bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
                    bar.update(len(ended))
        return [outputs[r.request_id] for r in requests]

    def _stream(self, request: Request) -> Iterator[Delta]:
        builders = self._start([request])
        builder = builders[request.request_id]
        for report in self._steps(builders):
            for event in report.events:
                delta = builder.push(event)
                if delta is not None:
                    yield delta


def _take(report: Report, builders: Mapping[str, OutputBuilder], by_token: bool) -> None:
    """Hand a step's results to their requests; token by token only where that is needed."""
    if by_token:
        for event in report.events:
            builders[event.request_id].push(event)
        return
    plan, now = report.plan, report.stats.time
    if plan.cohort is None:
        sampling = plan.samples
        for i in sampling[plan.num_known[sampling] == plan.num_prompt[sampling]].tolist():
            builders[plan.requests[i].request_id].first_token(now)
    for event in report.prompt_logprobs:
        builders[event.request_id].push(event)
    accepted = report.accepted
    for finish, tokens in zip(accepted.finished, accepted.outputs, strict=True):
        builders[finish.request_id].complete(finish, tokens.tolist(), now)
