"""Run paths through an engine and keep what it computed, and how much."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from infer import engine
from infer.config import EngineConfig
from infer.errors import EngineError
from infer.initialize import init
from infer.llm import advance
from infer.model import Model
from infer.report import Report
from infer.state import EngineState, Ticket
from infer.types import Request, SamplingParams
from infer.verify.paths import Path
from infer.verify.peak import Peak
from infer.verify.probe import Key, Probe

MAX_STEPS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a run of paths did."""

    logits: dict[Key, Tensor]  # f32[vocab_size] on the CPU, after the token at that position
    sampled: dict[Key, int]
    num_positions: int  # computed, recomputation included
    num_steps: int
    num_prefill_steps: int
    num_graph_steps: int
    num_preemptions: int
    max_batch: int  # sequences in one step, at most
    cached: dict[str, int] = field(default_factory=dict)  # prompt positions found in the cache
    peak_bytes: int | None = None
    seconds: float = 0.0

    @property
    def cached_any(self) -> bool:
        """Whether a position came from the prefix cache."""
        return any(self.cached.values())

    def of(self, path: Path, name: str | None = None) -> tuple[Tensor, list[int]]:
        """Logits ``[N, vocab_size]`` and positions that this run has of ``path``."""
        name = name or path.name
        at = [p for p in range(path.num_positions) if (name, p) in self.logits]
        if not at:
            return torch.empty(0, 0), at
        return torch.stack([self.logits[name, p] for p in at]), at


def observe(
    model: Model,
    config: EngineConfig,
    waves: Sequence[Sequence[Path]],
    *,
    whole: bool = True,
    logprobs: int | None = None,
    interrupt: int | None = None,
) -> Observed:
    """Run ``waves`` of paths in one engine, each once the one before has ended.

    Args:
        whole: keep the logits of every position; else of those that are sampled from.
        logprobs: asked of every request; steps in graphs then end at their logits.
        interrupt: take a snapshot after so many steps, and go on from a copy made of it.
    """
    paths = {path.name: path for wave in waves for path in wave}
    assert len(paths) == sum(map(len, waves)), "paths of a run have names of their own"
    with Peak(model.device) as peak:
        began = time.perf_counter()
        state, probe = _probed(model, init(model, config), paths, whole)
        tally = _Tally()
        for wave in waves:
            state = engine.submit(state, [_request(path, logprobs) for path in wave])
            tickets: tuple[Ticket, ...] = ()
            while engine.has_work(state):
                state, tickets, reports = advance(model, state, tickets)
                tally.take(reports)
                if interrupt is not None and tally.num_steps == interrupt:
                    state, probe = _restored(model, state, probe, paths, whole)
        seconds = time.perf_counter() - began
    probe.release()
    return Observed(
        logits={key: row.float().cpu() for key, row in probe.logits.items()},
        sampled=probe.sampled,
        num_positions=probe.num_positions,
        num_graph_steps=probe.num_graph_steps,
        num_steps=tally.num_steps,
        num_prefill_steps=tally.num_prefill_steps,
        num_preemptions=tally.num_preemptions,
        max_batch=tally.max_batch,
        cached=tally.cached,
        peak_bytes=peak.bytes,
        seconds=seconds,
    )


def _request(path: Path, logprobs: int | None) -> Request:
    params = SamplingParams(
        temperature=0.0, max_tokens=path.num_generated, ignore_eos=True, logprobs=logprobs
    )
    return Request(request_id=path.name, prompt_token_ids=path.prompt, params=params)


def _probed(
    model: Model, state: EngineState, paths: dict[str, Path], whole: bool
) -> tuple[EngineState, Probe]:
    probe = Probe(model, state.runtime, paths, whole=whole)
    return replace(state, runtime=probe), probe


def _restored(
    model: Model, state: EngineState, probe: Probe, paths: dict[str, Path], whole: bool
) -> tuple[EngineState, Probe]:
    from infer.snapshots import restore, snapshot

    probe.release()
    state, fresh = _probed(model, restore(model, snapshot(state)), paths, whole)
    fresh.logits, fresh.sampled = probe.logits, probe.sampled
    fresh.num_positions = probe.num_positions
    return state, fresh


@dataclass(slots=True)
class _Tally:
    num_steps: int = 0
    num_prefill_steps: int = 0
    num_preemptions: int = 0
    max_batch: int = 0
    cached: dict[str, int] = field(default_factory=dict)

    def take(self, reports: Sequence[Report]) -> None:
        for report in reports:
            plan = report.plan
            self.num_steps += 1
            self.num_prefill_steps += bool((plan.num_cached < plan.num_prompt).any())
            self.num_preemptions += len(plan.preempted)
            self.max_batch = max(self.max_batch, plan.num_sequences)
            for finish in report.accepted.finished:
                self.cached[finish.request_id] = finish.num_cached_tokens
        if self.num_steps > MAX_STEPS:
            raise EngineError(f"the engine does not come to an end within {MAX_STEPS} steps")
