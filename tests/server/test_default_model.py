"""What the server promises, on the default model in float32: hundreds of streams, long prompts."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from infer import LLM, SamplingParams
from infer.enginebuild import build_engine
from infer.loading import resolve
from infer.presets import DEFAULT, find_preset
from infer.tokenizer import Tokenizer
from tests.server.harness import Running, serving

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(900)]

ENGINE = {"num_blocks": 1400, "max_num_seqs": 64, "max_num_batched_tokens": 256}
LOAD = {"dtype": "float32", "device": "cpu"}
WORDS = ["the", "of", "a", "river", "town", "bird", "stone", "under", "small", "great", "sings"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    preset = find_preset(DEFAULT)
    if preset is None or preset.packaged_file() is None:
        pytest.skip("the default model's package is not installed")
    tokenizer = Tokenizer.from_folder(resolve(DEFAULT))
    settings = {"load": LOAD, "engine": ENGINE}
    with serving(build=lambda: build_engine(settings), tokenizer=tokenizer) as running:
        yield running


def bodies(count: int) -> list[dict[str, Any]]:
    rng = random.Random(11)
    return [
        {
            "prompt": " ".join(rng.choices(WORDS, k=rng.randrange(4, 30))),
            "max_tokens": rng.randrange(6, 18),
            "temperature": rng.choice((0, 0.7)),
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(count)
    ]


def offline(wanted: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    llm = LLM(**LOAD, **ENGINE)
    names = ("max_tokens", "temperature", "seed", "ignore_eos")
    params = [SamplingParams(**{k: body[k] for k in names}) for body in wanted]
    outputs = llm.generate([body["prompt"] for body in wanted], params, progress=False)
    return [out.outputs[0].token_ids for out in outputs]


async def stream(http: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
    """The tokens of one stream, as their texts."""
    tokens: list[str] = []
    wanted = {**body, "stream": True, "logprobs": 0}
    async with http.stream("POST", "/v1/completions", json=wanted) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice["logprobs"]["tokens"]
    return tokens


def client(server: Running) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, limits=limits, timeout=800, trust_env=False)


def idle(server: Running) -> bool:
    stats = server.notes.steps[-1]
    held = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
    return stats.num_running == stats.num_waiting == held == 0


async def test_200_streams_equal_offline_generation(server: Running) -> None:
    wanted = bodies(200)
    reference = await asyncio.to_thread(offline, wanted)
    async with client(server) as http:
        streamed = await asyncio.gather(*(stream(http, body) for body in wanted))
    table = server.tokenizer.token_bytes
    for tokens, ids in zip(streamed, reference, strict=True):
        assert len(tokens) == len(ids)
        for token, token_id in zip(tokens, ids, strict=True):
            assert token.startswith("bytes:") or token.encode() == table[token_id]
    await asyncio.to_thread(server.notes.wait_for, lambda: idle(server))


async def test_200_streams_half_of_them_cut(server: Running) -> None:
    rng = random.Random(5)
    done = len(server.notes.requests)

    async def cut(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(rng.uniform(0.1, 6)):
                await stream(http, {**body, "max_tokens": 200})
        except TimeoutError:
            pass

    async with client(server) as http:
        kept = [asyncio.create_task(stream(http, body)) for body in bodies(200)[::2]]
        await asyncio.gather(*(cut(http, body) for body in bodies(200)[1::2]))
        assert all(await asyncio.gather(*kept))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.to_thread(server.notes.wait_for, lambda: idle(server))
    assert loop.time() - began < 2
    assert len(server.notes.requests) > done


async def test_a_long_prompt_does_not_stall_running_streams(server: Running) -> None:
    """Gaps while a prompt of many chunks is computed, against a step of the whole budget."""
    budget = ENGINE["max_num_batched_tokens"]
    running = [{**body, "max_tokens": 40} for body in bodies(4)]
    long = {"prompt": " ".join(WORDS * 130), "max_tokens": 2, "temperature": 0}
    first = len(server.notes.steps)
    finished = len(server.notes.requests)
    async with client(server) as http:
        tasks = [asyncio.create_task(stream(http, body)) for body in running]
        await asyncio.to_thread(
            server.notes.wait_for,
            lambda: any(s.num_decode_tokens == 4 for s in server.notes.steps[first:]),
        )
        await stream(http, long)
        await asyncio.gather(*tasks)
    steps = server.notes.steps[first:]
    full = [
        s.host_s + s.device_s for s in steps if s.num_prefill_tokens + s.num_decode_tokens == budget
    ]
    assert len(full) >= 5, "the prompt was not computed in chunks"
    gaps = [g for r in server.notes.requests[finished:] for g in r.inter_token_s]
    assert max(gaps) < 3 * statistics.median(full)
