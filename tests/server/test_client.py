"""The engine client over its in-process transport: streams, aborts, failure, graceful stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from infer.client import LinkedClient, start_thread
from infer.engineloop import Output
from infer.errors import EngineError, EngineUnavailable, RequestError
from infer.types import (
    FailureKind,
    FinishEvent,
    FinishReason,
    Request,
    SamplingParams,
    StepStats,
    TokenEvent,
)
from tests.server.fakes import MAX_SEQS, FakeModel, Gate, expected, fake_engine
from tests.server.harness import Notes

pytestmark = pytest.mark.anyio


class Broken(Notes):
    """An observer with a fault in it."""

    def on_step(self, stats: StepStats) -> None:
        raise ZeroDivisionError


@asynccontextmanager
async def running(model: FakeModel, *observers: Notes) -> AsyncIterator[LinkedClient]:
    client = await start_thread(lambda: fake_engine(model), observers)
    try:
        yield client
    finally:
        model.gate.open()
        await client.shutdown(0)


def request(name: str, prompt: list[int], **params: object) -> Request:
    return Request(request_id=name, prompt_token_ids=tuple(prompt), params=SamplingParams(**params))  # type: ignore[arg-type]


async def read(
    client: LinkedClient, wanted: Request
) -> tuple[dict[int, list[int]], list[FinishEvent]]:
    tokens: dict[int, list[int]] = {i: [] for i in range(wanted.params.n)}
    ends = []
    async with client.generate(wanted) as stream:
        async for events in stream:
            for event in events:
                if isinstance(event, TokenEvent):
                    tokens[event.index].append(event.token_id)
                elif isinstance(event, FinishEvent):
                    ends.append(event)
    return tokens, ends


@pytest.mark.parametrize("depth", [0, 1])
async def test_streams_are_separate_and_complete(depth: int) -> None:
    notes = Notes()
    async with running(FakeModel(depth=depth), notes) as client:
        wanted = [
            request(f"r{i}", [i, i + 1], max_tokens=3 + i % 5, n=1 + i % 3) for i in range(40)
        ]
        answers = await asyncio.gather(*(read(client, w) for w in wanted))
    for w, (tokens, ends) in zip(wanted, answers, strict=True):
        count = w.params.max_tokens
        assert count is not None
        for index in range(w.params.n):
            assert tokens[index] == expected(w.prompt_token_ids, count, index)
        assert [e.reason for e in ends] == [FinishReason.LENGTH] * w.params.n
    assert sorted(s.request_id for s in notes.requests) == sorted(w.request_id for w in wanted)
    assert len(notes.first) == 40
    assert max(s.num_sequences for s in notes.steps) <= MAX_SEQS
    for stats in notes.requests:
        assert stats.scheduled is not None
        assert stats.first_token is not None
        assert stats.last_token is not None
        assert stats.arrival <= stats.scheduled <= stats.first_token
        assert stats.first_token <= stats.last_token <= stats.finished
        assert stats.num_generated_tokens == stats.n * (stats.max_tokens or 0)
        assert len(stats.inter_token_s) == stats.num_generated_tokens - stats.n


async def test_a_slow_reader_holds_nobody_up_and_loses_nothing() -> None:
    async with (
        running(FakeModel()) as client,
        client.generate(request("slow", [1], max_tokens=200)) as slow,
    ):
        tokens, _ = await read(client, request("fast", [2], max_tokens=300))
        assert len(tokens[0]) == 300
        events = [e async for batch in slow for e in batch]
    assert [e.token_id for e in events if isinstance(e, TokenEvent)] == expected([1], 200)


async def test_leaving_the_block_aborts_running_and_queued_requests() -> None:
    model, notes = FakeModel(gate=Gate(is_open=False)), Notes()
    async with running(model, notes) as client:
        streams = [
            client.generate(request(f"r{i}", [i], max_tokens=1000)) for i in range(MAX_SEQS * 2)
        ]
        model.gate.allow(2)
        await anext(streams[0])
        for stream in streams:
            stream.close()
            stream.close()
        model.gate.open()
        # A request submitted after the aborts is answered after them: commands keep their order.
        await read(client, request("after", [1], max_tokens=1))
        assert not model.states[0].running
        assert not model.states[0].waiting
    assert len(notes.requests) == MAX_SEQS * 2 + 1
    assert {s.finish_reason for s in notes.requests[:-1]} == {FinishReason.ABORT}


async def test_abort_ends_the_stream_with_events_for_every_choice() -> None:
    model = FakeModel(gate=Gate(is_open=False))
    async with running(model) as client, client.generate(request("a", [1], n=2)) as stream:
        model.gate.allow(1)
        first = await anext(stream)
        assert [e.index for e in first] == [0, 1]
        client.abort("a")
        client.abort("a")
        client.abort("never seen")
        rest = [e for batch in [b async for b in stream] for e in batch]
        assert [(e.index, e.reason) for e in rest if isinstance(e, FinishEvent)] == [
            (0, FinishReason.ABORT),
            (1, FinishReason.ABORT),
        ]


async def test_refused_requests_raise_and_harm_nobody() -> None:
    async with running(FakeModel()) as client:
        with pytest.raises(RequestError, match="out of range"):
            await read(client, request("bad", [99_999]))
        salted = Request(request_id="bug", prompt_token_ids=(1,), cache_salt="submit-bug")
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await read(client, salted)
        async with client.generate(request("same", [1])):
            with pytest.raises(RequestError, match="in use"):
                client.generate(request("same", [1]))
        tokens, _ = await read(client, request("good", [1], max_tokens=4))
        assert tokens[0] == expected([1], 4)


async def test_an_engine_that_dies_answers_every_open_request() -> None:
    model, notes = FakeModel(gate=Gate(is_open=False)), Notes()
    async with running(model, notes) as client:
        readers = [
            asyncio.create_task(read(client, request(f"r{i}", [i], max_tokens=9)))
            for i in range(MAX_SEQS + 3)
        ]
        model.gate.allow(3)
        model.gate.fail(RuntimeError("injected"))
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(r, EngineError) for r in results)
        assert not client.health.ok
        assert "injected" in (client.health.cause or "")
        with pytest.raises(EngineUnavailable):
            client.generate(request("late", [1]))
    assert notes.failures == [FailureKind.ENGINE] * len(readers)
    assert {s.finish_reason for s in notes.requests} == {FinishReason.ERROR}


async def test_a_fault_while_handing_out_answers_everybody() -> None:
    model, notes = FakeModel(gate=Gate(is_open=False)), Notes()
    async with running(model, notes) as client:
        readers = [asyncio.create_task(read(client, request(n, [1], max_tokens=9))) for n in "ab"]
        await asyncio.sleep(0)
        client._desk.deliver(Output(events=(TokenEvent("a", 7, 1),)))  # a choice there is not
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(r, EngineError) for r in results)
        assert not client.health.ok
    assert notes.failures == [FailureKind.INTERNAL] * 2


async def test_an_engine_that_dies_while_idle_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.engineloop.CHECK_EVERY_S", 0.001)
    model = FakeModel()
    client = await start_thread(lambda: fake_engine(model))
    assert client.health.ok
    model.broken = True
    await client._link.join(20)
    assert client.health.cause == "RuntimeError: a rank is gone"


async def test_shutdown_lets_requests_finish_refuses_new_ones_and_is_idempotent() -> None:
    model = FakeModel(gate=Gate(is_open=False))
    client = await start_thread(lambda: fake_engine(model))
    reader = asyncio.create_task(read(client, request("r", [1], max_tokens=5)))
    await asyncio.sleep(0)
    stops = [asyncio.create_task(client.shutdown(60)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable):
        client.generate(request("late", [1]))
    assert not client.health.ok
    model.gate.open()
    tokens, ends = await reader
    assert tokens[0] == expected([1], 5)
    assert ends[0].reason is FinishReason.LENGTH
    await asyncio.gather(*stops)
    await client.shutdown(60)


async def test_shutdown_aborts_what_does_not_finish_in_time() -> None:
    model = FakeModel(gate=Gate(is_open=False))
    client = await start_thread(lambda: fake_engine(model))
    reader = asyncio.create_task(read(client, request("r", [1])))
    await asyncio.sleep(0)
    stop = asyncio.create_task(client.shutdown(0))
    _, ends = await reader
    assert [e.reason for e in ends] == [FinishReason.ABORT]
    model.gate.open()
    await stop


async def test_what_build_raises_reaches_the_starter() -> None:
    def build() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        await start_thread(build)  # type: ignore[arg-type]


async def test_a_faulty_observer_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    async with running(FakeModel(), Broken()) as client:
        tokens, _ = await read(client, request("r", [1], max_tokens=3))
    assert tokens[0] == expected([1], 3)
    assert "observer Broken failed" in caplog.text
