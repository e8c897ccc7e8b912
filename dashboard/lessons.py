"""Lessons at work: a private engine that steps forward, and back, because its state is a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import infer
from dashboard.scenarios import Lesson
from dashboard.views import BlockMap, StepView, block_map, step_view
from infer.config import ModelConfig, RopeConfig
from infer.types import FinishEvent, TokenEvent

# Two layers of random weights: what the lessons show does not depend on what the model says.
TINY = ModelConfig(
    architecture="qwen3",
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    qk_norm=True,
    dtype="float32",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """A request after a step."""

    name: str
    status: str  # not arrived, waiting, running, preempted or finished
    num_known: int
    num_cached: int
    tokens: tuple[int, ...]  # generated
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A lesson after some number of steps: the last one's plan and the state it left."""

    step: StepView | None  # None before the first
    sequences: tuple[SequenceView, ...]
    blocks: BlockMap
    events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Moment:
    """Where a walk was: enough to go on from there."""

    snapshot: Any
    frame: Frame
    tokens: Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class Walk:
    """One reader's walk through a lesson. Call it from one thread at a time.

    ``moments[i]`` is the engine after i steps. Going back restores its snapshot; going forward
    from there computes the step again, from the restored state.
    """

    lesson: Lesson
    model: Any
    moments: list[_Moment] = field(default_factory=list)
    at: int = 0
    ended: bool = False  # the last moment is the lesson's end
    _state: Any = None

    @classmethod
    def begin(cls, lesson: Lesson, model: Any) -> Walk:
        """A walk before its first step."""
        walk = cls(lesson, model)
        config = infer.EngineConfig(
            block_size=lesson.block_size,
            num_blocks=lesson.num_blocks,
            max_model_len=min(1024, lesson.block_size * lesson.num_blocks),
            max_num_seqs=lesson.max_num_seqs,
            max_num_batched_tokens=lesson.max_num_batched_tokens,
            prefix_caching=lesson.prefix_caching,
            attention_backend="torch",
            compile=False,
            cuda_graphs=False,
            pipeline_depth=0,
        )
        walk._state = infer.init(model, config)
        walk._arrive(0)
        walk._remember({a.name: a.prompt for a in lesson.arrivals}, None, ())
        return walk

    @property
    def frame(self) -> Frame:
        """What there is to see now."""
        return self.moments[self.at].frame

    @property
    def num_known_steps(self) -> int:
        """Steps made so far; more may follow unless ``ended``."""
        return len(self.moments) - 1

    def forward(self, watch: Callable[[Any, Any], None] | None = None) -> None:
        """Make one step, and show its report and state to ``watch``; at the end, do nothing."""
        if self.ended and self.at == self.num_known_steps:
            return
        earlier = self.moments[self.at]
        self._state, report = infer.step(self.model, self._state)
        if watch is not None:
            watch(report, self._state)
        tokens = {name: list(ids) for name, ids in earlier.tokens.items()}
        view = step_view(report.plan, {(name, 0): ids for name, ids in tokens.items()})
        for event in report.events:
            if isinstance(event, TokenEvent):
                tokens[event.request_id].append(event.token_id)
        self.at += 1
        self._arrive(self.at)
        lines = tuple(_line(event) for event in report.events)
        kept = {name: tuple(ids) for name, ids in tokens.items()}
        if self.at <= self.num_known_steps:
            assert self.moments[self.at].tokens == kept, "a restored state took another way"
        else:
            self._remember(kept, view, lines)

    def back(self) -> None:
        """Return to the state one step ago."""
        self.go(self.at - 1)

    def go(self, index: int) -> None:
        """Return to the state after ``index`` steps, or step forward to it."""
        index = max(0, index)
        if index <= self.num_known_steps:
            if index != self.at:
                self.at = index
                self._state = infer.restore(self.model, self.moments[index].snapshot)
            return
        self.go(self.num_known_steps)
        while self.at < index and not self.ended:
            self.forward()

    def _arrive(self, step: int) -> None:
        for arrival in self.lesson.arrivals:
            if arrival.step == step:
                params = infer.SamplingParams(
                    temperature=0, max_tokens=arrival.max_tokens, ignore_eos=True
                )
                request = infer.Request(
                    request_id=arrival.name, prompt_token_ids=arrival.prompt, params=params
                )
                self._state = infer.submit(self._state, request)

    def _remember(
        self, tokens: Mapping[str, tuple[int, ...]], view: StepView | None, events: tuple[str, ...]
    ) -> None:
        host = self._state.host
        frame = Frame(
            step=view,
            sequences=tuple(self._sequence(a.name, tokens[a.name]) for a in self.lesson.arrivals),
            blocks=block_map(host.pool, host.seqs),
            events=events,
        )
        self.moments.append(_Moment(infer.snapshot(self._state), frame, tokens))
        later = any(a.step > self.at for a in self.lesson.arrivals)
        self.ended = not later and not infer.has_work(self._state)

    def _sequence(self, name: str, known: tuple[int, ...]) -> SequenceView:
        arrival = next(a for a in self.lesson.arrivals if a.name == name)
        host = self._state.host
        generated = known[len(arrival.prompt) :]
        rows = host.seqs.rows_of.get(name)
        base = SequenceView(
            name=name,
            status="waiting",
            num_known=len(known),
            num_cached=0,
            tokens=generated,
            block_table=(),
        )
        if rows:
            row = rows[0]
            table = host.seqs.block_table[row][: host.seqs.num_blocks[row]]
            return replace(
                base,
                status="preempted" if host.seqs.status[row] == 2 else "running",
                num_cached=int(host.seqs.num_cached_tokens[row]),
                block_table=tuple(table.tolist()),
            )
        if arrival.step > self.at:
            return replace(base, status="not arrived")
        return replace(base, status="finished") if generated else base


def tiny_model() -> Any:
    """The model of the lessons; made in well under a second."""
    return infer.load(
        config=TINY, load_format="random", device="cpu", dtype="float32", progress=False
    )


def _line(event: Any) -> str:
    if isinstance(event, TokenEvent):
        return f"{event.request_id}: token {event.token_id}"
    if isinstance(event, FinishEvent):
        return (
            f"{event.request_id}: finished ({event.reason.value}) "
            f"after {event.num_generated_tokens} tokens"
        )
    return str(event)
