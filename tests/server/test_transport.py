"""The engine in a process of its own: the same client, and what happens when either end dies."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from infer import wire
from infer.client import LinkedClient
from infer.engineloop import Output, Refusal
from infer.errors import (
    CapacityError,
    ContextLengthError,
    EngineError,
    EngineUnavailable,
    RequestError,
)
from infer.transport import start_process
from infer.types import (
    Logprob,
    PromptLogprobsEvent,
    Request,
    SamplingParams,
    TokenEvent,
)
from tests.server.fakes import expected
from tests.server.harness import Notes
from tests.server.test_client import read, request

pytestmark = pytest.mark.anyio
BUILDER = "tests.server.fakes:build"


def pid(client: LinkedClient) -> int:
    process = client._link._process  # type: ignore[attr-defined]
    return int(process.pid)


async def test_requests_stream_over_the_wire() -> None:
    notes = Notes()
    client = await start_process(BUILDER, {}, [notes])
    assert client.info.vocab_size == 512
    wanted = [request(f"r{i}", [i], max_tokens=20, n=1 + i % 2, logprobs=2) for i in range(30)]
    answers = await asyncio.gather(*(read(client, w) for w in wanted))
    for w, (tokens, _) in zip(wanted, answers, strict=True):
        for index in range(w.params.n):
            assert tokens[index] == expected(w.prompt_token_ids, 20, index)
    with pytest.raises(RequestError, match="out of range") as refused:
        await read(client, request("bad", [99_999]))
    assert refused.value.param == "prompt"
    await client.shutdown(5)
    await client.shutdown(5)
    assert len(notes.requests) == 30
    assert notes.steps
    with pytest.raises(ProcessLookupError):
        os.kill(pid(client), 0)


async def test_a_killed_process_ends_every_request_and_turns_health_red() -> None:
    client = await start_process(BUILDER, {})
    async with client.generate(request("r", [1], max_tokens=100_000)) as stream:
        await anext(stream)
        os.kill(pid(client), signal.SIGKILL)
        with pytest.raises(EngineError, match="exit code -9"):
            async for _ in stream:
                pass
    assert not client.health.ok
    with pytest.raises(EngineUnavailable):
        client.generate(request("late", [1]))
    await client.shutdown(0)


async def test_a_failed_step_ends_every_request() -> None:
    client = await start_process(BUILDER, {"trouble": "step"})
    with pytest.raises(EngineError, match="injected"):
        await read(client, request("r", [1]))
    assert "injected" in (client.health.cause or "")
    await client.shutdown(0)


async def test_the_engine_can_be_looked_at_while_it_runs() -> None:
    client = await start_process(BUILDER, {"watched": True})
    async with client.generate(request("r", [1], max_tokens=100_000)) as stream:
        await anext(stream)
        looks = [client.look(step) for step in (3, None, 7)]
        assert await asyncio.gather(*looks) == ['{"step": 3}', '{"step": None}', '{"step": 7}']
        with pytest.raises(EngineError, match="not watched"):
            await client.look(404)  # a fault of who watches is not the engine's
        await anext(stream)
    assert client.health.ok
    looking = asyncio.ensure_future(client.look(503))
    with pytest.raises(EngineUnavailable, match="ended"):
        await looking
    with pytest.raises(EngineUnavailable, match="ended"):
        await client.look()
    await client.shutdown(0)


async def test_an_engine_that_nobody_watches_says_so() -> None:
    client = await start_process(BUILDER, {})
    with pytest.raises(EngineError, match="not watched"):
        await client.look()
    await client.shutdown(0)


@pytest.mark.parametrize(
    ("trouble", "error", "match"),
    [("build", RequestError, "no such model"), ("exit", EngineError, "exit code 3")],
)
async def test_an_engine_that_cannot_be_made(
    trouble: str, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        await start_process(BUILDER, {"trouble": trouble})


def test_the_wire_keeps_every_value() -> None:
    params = SamplingParams(stop=("a", "é"), logit_bias={5: -1.5}, seed=2**63 - 1, n=3, top_p=1)
    sent = Request(request_id="é", prompt_token_ids=(1, 2), params=params, cache_salt="s")
    best = Logprob(1, -0.25, 1)
    output = Output(
        events=(
            PromptLogprobsEvent("é", (((best, (best,))),)),
            TokenEvent("é", 2, 7, best, (best, best)),
        ),
        refusals=(
            Refusal("x", RequestError("no", param="p")),
            Refusal("y", CapacityError("full")),
            Refusal("z", ContextLengthError("long", param="prompt")),
        ),
    )
    frames = wire.Frames()
    stream = wire.frame(wire.SubmitMessage(sent)) + wire.frame(wire.output_message(output))
    payloads = [p for i in range(len(stream)) for p in frames.feed(stream[i : i + 1])]
    got = wire.msgspec.msgpack.decode(payloads[0], type=wire.ToEngine)
    assert got == wire.SubmitMessage(sent)
    back = wire.message_output(wire.msgspec.msgpack.decode(payloads[1], type=wire.FromEngine))
    assert back.events == output.events
    assert [(type(r.error), str(r.error)) for r in back.refusals] == [
        (RequestError, "no"),
        (CapacityError, "full"),
        (ContextLengthError, "long"),
    ]
