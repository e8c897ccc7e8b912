"""What a collected step tells: its plan, its events and its statistics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from infer.blocks import Int32
from infer.commit import Accepted
from infer.plan import Plan
from infer.types import Event, Logprob, PromptLogprobsEvent, StepStats, TokenEvent

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """Raw log-probabilities of N chosen tokens and of the best K beside each."""

    chosen: Float32  # f32[N]
    rank: Int32  # i32[N], 1 is the best
    top_ids: Int32  # i32[N, K]
    top: Float32  # f32[N, K], falling

    def rows(self, index: Int32 | slice) -> LogprobArrays:
        """The same for some of the tokens."""
        return LogprobArrays(
            self.chosen[index], self.rank[index], self.top_ids[index], self.top[index]
        )

    def entry(self, i: int, token_id: int, top_n: int) -> tuple[Logprob, tuple[Logprob, ...]]:
        """Token i's own log-probability and its ``top_n`` alternatives."""
        own = Logprob(token_id, float(self.chosen[i]), int(self.rank[i]))
        ids, values = self.top_ids[i, :top_n].tolist(), self.top[i, :top_n].tolist()
        best = tuple(Logprob(t, v, k + 1) for k, (t, v) in enumerate(zip(ids, values, strict=True)))
        return own, best


@dataclass(frozen=True, slots=True)
class StepValues:
    """What a step computed, on the host. M sampling rows, P prompt positions."""

    tokens: Int32  # i32[M]
    failed: npt.NDArray[np.bool_]  # bool[M], logits were not numbers
    logprobs: LogprobArrays | None = None  # of M tokens
    prompt_logprobs: LogprobArrays | None = None  # of P positions, each for its next token


@dataclass(frozen=True)
class Report:
    """One step. ``events`` are made from arrays the first time somebody asks."""

    plan: Plan
    accepted: Accepted
    stats: StepStats
    logprobs: LogprobArrays | None = None
    prompt_logprobs: tuple[PromptLogprobsEvent, ...] = ()

    @property
    def step(self) -> int:
        """The step's number."""
        return self.plan.step

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Prompt log-probabilities, then tokens, each followed by its finish if it has one."""
        ends = {(f.request_id, f.index): f for f in self.accepted.finished}
        out: list[Event] = [*self.prompt_logprobs]
        a = self.accepted
        for i, (request, choice, token) in enumerate(
            zip(a.requests, a.choices.tolist(), a.tokens.tolist(), strict=True)
        ):
            own: Logprob | None = None
            best: tuple[Logprob, ...] = ()
            wanted = request.params.logprobs
            if self.logprobs is not None and wanted is not None:
                own, best = self.logprobs.entry(int(a.sampled[i]), token, wanted)
            out.append(TokenEvent(request.request_id, choice, token, own, best))
            end = ends.pop((request.request_id, choice), None)
            if end is not None:
                out.append(end)
        return (*out, *ends.values())
