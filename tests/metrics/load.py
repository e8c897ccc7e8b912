"""A load on a scraped engine, and what its client counted on its own.

The engine here is a simulation that reports like a real one; whatever has ``url``, ``model_name``
and ``stop`` can take its place.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import metrics
from infer.types import (
    Event,
    FinishEvent,
    FinishReason,
    RejectionKind,
    Request,
    SamplingParams,
    StepStats,
    TokenEvent,
)
from tests.metrics.samples import INFO
from tests.metrics.test_definitions import Report


@dataclass
class ClientCount:
    """Counted from what arrived at the client, by its own clock."""

    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    finishes: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)


class Load(Protocol):
    """A server under load."""

    url: str  # of its metrics
    model_name: str

    def stop(self) -> ClientCount:
        """Send no more, wait for the running requests, and say what was counted."""
        ...

    def read(self) -> metrics.Reading: ...


@dataclass
class _Sequence:
    """A request in the simulation, and in its client."""

    request: Request
    arrival: float
    length: int  # tokens it will generate
    aborted_after: int | None
    generated: int = 0
    last: float | None = None


class Client:
    """Counts events as they arrive."""

    def __init__(self) -> None:
        self.count = ClientCount()
        self._open: dict[str, tuple[float, float | None]] = {}  # arrival, last token

    def sent(self, request: Request) -> None:
        self.count.requests += 1
        self.count.prompt_tokens += len(request.prompt_token_ids)
        self._open[request.request_id] = (time.monotonic(), None)

    def received(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, TokenEvent):
            arrival, last = self._open[event.request_id]
            self.count.tokens += 1
            if last is None:
                self.count.ttft_s.append(now - arrival)
            else:
                self.count.inter_token_s.append(now - last)
            self._open[event.request_id] = (arrival, now)
        elif isinstance(event, FinishEvent):
            self.count.finishes[str(event.reason)] += 1
            del self._open[event.request_id]


class SimulatedLoad:
    """Steps of about 10 ms over random requests, reported through ``metrics.serve``."""

    def __init__(self, seed: int) -> None:
        self.model_name = INFO.model_name
        self._served = metrics.serve(0, INFO)
        self.url = self._served.url
        self._random = random.Random(seed)
        self._client = Client()
        self._stopping = threading.Event()
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._steps = 0
        self._thread = threading.Thread(target=self._run, name="simulated-load")
        self._thread.start()

    def stop(self) -> ClientCount:
        self._stopping.set()
        self._thread.join()
        return self._client.count

    def read(self) -> metrics.Reading:
        return self._served.metrics.read()

    def close(self) -> None:
        self.stop()
        self._served.close()

    def _run(self) -> None:
        pace = threading.Event()
        while self._running or self._waiting or not self._stopping.is_set():
            if not self._stopping.is_set():
                self._arrivals()
            pace.wait(0.01)  # the device at work
            report = self._step()
            for event in report.events:
                self._client.received(event)
            self._served.on_report(report)

    def _arrivals(self) -> None:
        draw = self._random
        if draw.random() < 0.3:
            length = draw.choice([1, 2, 5, 20, 40])
            request = Request(
                request_id=f"r{self._client.count.requests}",
                prompt_token_ids=tuple(range(draw.randint(1, 300))),
                params=SamplingParams(max_tokens=draw.choice([None, 64])),
            )
            aborted = draw.randrange(1, length) if length > 5 and draw.random() < 0.2 else None
            self._waiting.append(_Sequence(request, time.monotonic(), length, aborted))
            self._client.sent(request)
            self._served.on_submit(request)
        if draw.random() < 0.05:
            self._served.metrics.on_rejection(RejectionKind.INVALID)

    def _step(self) -> Report:
        self._steps += 1
        room = INFO.max_num_seqs - len(self._running)
        started, self._waiting = self._waiting[:room], self._waiting[room:]
        decoding = len(self._running)
        self._running += started
        events: list[Event] = []
        for sequence in list(self._running):
            events += self._advance(sequence)
        return Report(tuple(events), self._stats(started, decoding, events))

    def _advance(self, sequence: _Sequence) -> list[Event]:
        name = sequence.request.request_id
        sequence.generated += 1
        events: list[Event] = [TokenEvent(name, 0, 7)]
        reason = None
        if sequence.generated == sequence.aborted_after:
            reason = FinishReason.ABORT
        elif sequence.generated == sequence.length:
            reason = self._random.choice([FinishReason.STOP, FinishReason.LENGTH])
        if reason is not None:
            self._running.remove(sequence)
            prompt = len(sequence.request.prompt_token_ids)
            events.append(
                FinishEvent(
                    name,
                    0,
                    reason,
                    num_prompt_tokens=prompt,
                    num_cached_tokens=prompt // 4,
                    num_generated_tokens=sequence.generated,
                )
            )
        return events

    def _stats(self, started: list[_Sequence], decoding: int, events: list[Event]) -> StepStats:
        prompts = sum(len(sequence.request.prompt_token_ids) for sequence in started)
        used = min(INFO.num_blocks - 50, 20 * len(self._running))
        return StepStats(
            step=self._steps,
            time=time.monotonic(),
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_prefill_tokens=prompts - prompts // 4,
            num_decode_tokens=decoding,
            num_sequences=decoding + len(started),
            num_generated_tokens=sum(isinstance(event, TokenEvent) for event in events),
            num_preempted=int(self._random.random() < 0.02),
            num_blocks=INFO.num_blocks,
            num_free_blocks=INFO.num_blocks - used - 50,
            num_cached_blocks=50,
            prefix_queries=prompts,
            prefix_hits=prompts // 4,
            host_s=0.0005,
            device_s=0.01,
            graph_hit=not started,
            first_token_ids=tuple(sequence.request.request_id for sequence in started),
        )


MakeLoad = Callable[[], Load]
