"""A deterministic engine of the step API's shape, whose next tokens are a function of the prompt.

Choice ``i`` of a prompt continues with ``next_token(last, i)``. Tests can hold its steps, fail one,
and look at what it still has open.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from infer.client import Engine
from infer.engineloop import Transitions
from infer.errors import RequestError
from infer.tokenizer import Tokenizer
from infer.types import (
    EngineInfo,
    Event,
    FinishEvent,
    FinishReason,
    Logprob,
    PromptLogprobsEvent,
    Request,
    StepStats,
    TokenEvent,
)

VOCAB = 512
MAX_LEN = 4096
MAX_SEQS = 8


def next_token(last: int, index: int) -> int:
    """The token the fake engine generates after ``last``, in printable byte range."""
    return 97 + (last + 1 + index) % 26


def expected(prompt: Iterable[int], count: int, index: int = 0) -> list[int]:
    """The first ``count`` tokens of choice ``index``."""
    last = list(prompt)[-1]
    tokens = []
    for _ in range(count):
        last = next_token(last, index)
        tokens.append(last)
    return tokens


@dataclass(frozen=True)
class Sequence:
    request: Request
    index: int
    tokens: tuple[int, ...] = ()
    launched: int = 0

    @property
    def limit(self) -> int:
        return self.request.params.max_tokens or 512


@dataclass(frozen=True)
class State:
    waiting: tuple[Sequence, ...] = ()
    running: tuple[Sequence, ...] = ()
    aborted: tuple[Sequence, ...] = ()
    step: int = 0
    in_flight: int = 0


@dataclass(frozen=True)
class Report:
    events: tuple[Event, ...]
    stats: StepStats


class Gate:
    """Lets steps through: all of them while open, else as many as were allowed."""

    def __init__(self, *, is_open: bool = True) -> None:
        self._condition = threading.Condition()
        self._open = is_open
        self._allowed = 0
        self._failure: Exception | None = None

    def open(self) -> None:
        with self._condition:
            self._open = True
            self._condition.notify_all()

    def allow(self, steps: int) -> None:
        with self._condition:
            self._allowed += steps
            self._condition.notify_all()

    def fail(self, error: Exception) -> None:
        """The next step raises ``error``."""
        with self._condition:
            self._failure = error
            self._condition.notify_all()

    def step(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._open or self._allowed > 0 or self._failure)
            if self._failure is not None:
                raise self._failure
            if not self._open:
                self._allowed -= 1


@dataclass
class FakeModel:
    gate: Gate = field(default_factory=Gate)
    depth: int = 0
    reply: Callable[[Request, int], Iterable[int]] | None = None  # (request, choice) -> tokens
    states: list[State] = field(default_factory=list)  # the latest state, for tests to look at
    broken: bool = False  # fails though it has nothing to do

    def check(self) -> None:
        if self.broken:
            raise RuntimeError("a rank is gone")


def _submit(state: State, request: Request) -> State:
    if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= VOCAB:
        raise RequestError("token id out of range", param="prompt")
    if len(request.prompt_token_ids) >= MAX_LEN:
        raise RequestError(f"the prompt is longer than {MAX_LEN}", param="prompt")
    if request.cache_salt == "submit-bug":
        raise ZeroDivisionError("a bug in submit")
    new = tuple(Sequence(request, i) for i in range(request.params.n))
    return replace(state, waiting=state.waiting + new)


def _abort(state: State, request_id: str) -> State:
    def split(group: tuple[Sequence, ...]) -> tuple[tuple[Sequence, ...], tuple[Sequence, ...]]:
        gone = tuple(s for s in group if s.request.request_id == request_id)
        return tuple(s for s in group if s not in gone), gone

    waiting, gone_waiting = split(state.waiting)
    running, gone_running = split(state.running)
    aborted = state.aborted + gone_waiting + gone_running
    return replace(state, waiting=waiting, running=running, aborted=aborted)


def _has_work(state: State) -> bool:
    return bool(state.waiting or state.running or state.aborted or state.in_flight)


def _advance(
    model: FakeModel, state: State, tickets: tuple[Any, ...]
) -> tuple[State, tuple[Any, ...], list[Report]]:
    state, ticket = _launch(model, state)
    tickets = (*tickets, ticket)
    reports = []
    while len(tickets) > (model.depth if ticket[0] else 0):
        state, report = _collect(model, state, tickets[0])
        tickets = tickets[1:]
        reports.append(report)
    return state, tickets, reports


def _launch(model: FakeModel, state: State) -> tuple[State, Any]:
    model.gate.step()
    room = MAX_SEQS - len(state.running)
    admitted, waiting = state.waiting[:room], state.waiting[room:]
    rows = tuple(replace(s, launched=s.launched + 1) for s in state.running + admitted)
    ticket = (
        tuple((s.request.request_id, s.index) for s in rows),
        tuple(dict.fromkeys(s.request.request_id for s in admitted)),
    )
    state = replace(
        state,
        waiting=waiting,
        running=rows,
        step=state.step + 1,
        in_flight=state.in_flight + 1,
    )
    return state, ticket


def _collect(model: FakeModel, state: State, ticket: Any) -> tuple[State, Report]:
    launched, admitted = ticket
    events: list[Event] = [_finish(s, FinishReason.ABORT) for s in state.aborted]
    running = []
    for sequence in state.running:
        request, index = sequence.request, sequence.index
        if (request.request_id, index) not in launched:
            running.append(sequence)
            continue
        params = request.params
        if not sequence.tokens and params.prompt_logprobs is not None and index == 0:
            count = params.prompt_logprobs
            own = [
                (Logprob(t, -1.0, 1), (Logprob(t, -1.0, 1), Logprob(98, -2.0, 2))[:count])
                for t in request.prompt_token_ids[1:]
            ]
            events.append(PromptLogprobsEvent(request.request_id, tuple(own)))
        last = sequence.tokens[-1] if sequence.tokens else request.prompt_token_ids[-1]
        if model.reply is None:
            token = next_token(last, index)
        else:
            token = [*model.reply(request, index), EOS][len(sequence.tokens)]
        sequence = replace(sequence, tokens=(*sequence.tokens, token))
        logprob, top = None, ()
        if params.logprobs is not None:
            logprob = Logprob(token, -0.5, 1)
            top = (logprob, Logprob(65, -1.5, 2), Logprob(66, -2.5, 3))[: params.logprobs]
        events.append(TokenEvent(request.request_id, index, token, logprob, top))
        text = bytes(t for t in sequence.tokens if t < 256).decode("latin-1")
        stop = next((s for s in params.stop if s in text), None)
        stop = stop or next((t for t in params.stop_token_ids if t == token), None)
        if stop is not None or (token == EOS and not params.ignore_eos):
            events.append(_finish(sequence, FinishReason.STOP, stop))
        elif len(sequence.tokens) >= sequence.limit:
            events.append(_finish(sequence, FinishReason.LENGTH))
        else:
            running.append(sequence)
    state = replace(state, running=tuple(running), aborted=(), in_flight=state.in_flight - 1)
    model.states[:] = [state]
    stats = StepStats(
        step=state.step,
        time=time.monotonic(),
        num_running=len(running),
        num_waiting=len(state.waiting),
        num_prefill_tokens=0,
        num_decode_tokens=len(launched),
        num_sequences=len(launched),
        num_generated_tokens=sum(isinstance(e, TokenEvent) for e in events),
        num_preempted=0,
        num_blocks=64,
        num_free_blocks=64 - len(running),
        num_cached_blocks=0,
        prefix_queries=0,
        prefix_hits=0,
        host_s=0.0,
        device_s=0.0,
        first_token_ids=admitted,
    )
    return state, Report(tuple(events), stats)


def _finish(sequence: Sequence, reason: FinishReason, stop: str | int | None = None) -> FinishEvent:
    return FinishEvent(
        sequence.request.request_id,
        sequence.index,
        reason,
        stop=stop,
        num_prompt_tokens=len(sequence.request.prompt_token_ids),
        num_cached_tokens=1 if len(sequence.request.prompt_token_ids) > 16 else 0,
        num_generated_tokens=len(sequence.tokens),
    )


INFO = EngineInfo(
    model_name="fake",
    architecture="fake",
    device="cpu",
    dtype="float32",
    attention_backend="torch",
    max_model_len=MAX_LEN,
    max_num_seqs=MAX_SEQS,
    max_num_batched_tokens=256,
    block_size=16,
    num_blocks=64,
    kv_bytes_per_token=1,
    weight_bytes=1,
    vocab_size=VOCAB,
    tp_size=1,
    pipeline_depth=0,
    compiled=False,
    versions={},
)

TRANSITIONS = Transitions(
    submit=_submit, abort=_abort, has_work=_has_work, advance=_advance, check=FakeModel.check
)


def fake_engine(model: FakeModel) -> Engine:
    """An engine over ``model``."""
    return Engine(transitions=TRANSITIONS, model=model, state=State(), info=INFO)


def build(options: dict[str, Any]) -> Engine:
    """A fake engine for another process; ``options`` may name what goes wrong in it."""
    trouble = options.get("trouble")
    if trouble == "build":
        raise RequestError("no such model", param="model")
    if trouble == "exit":
        os._exit(3)
    model = FakeModel(depth=1)
    if trouble == "step":
        model.gate.fail(RuntimeError("injected"))
    engine = fake_engine(model)

    def look(step: int | None) -> str:
        if step == 404:
            raise KeyError("injected")
        if step == 503:
            os._exit(3)
        return f'{{"step": {step}}}'

    return replace(engine, look=look) if options.get("watched") else engine


SPECIALS = ("<|im_start|>", "<|im_end|>")
EOS = 257
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
tools: {{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def fake_tokenizer() -> Tokenizer:
    """A byte-level tokenizer: ids below 256 are bytes, then come control and added tokens."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }
    vocab = {letters[byte]: byte for byte in range(256)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return Tokenizer.build(
        backend,
        {"eos_token": "<|im_end|>"},
        eos_token_ids=[EOS],
        chat_templates={"default": TEMPLATE},
    )
