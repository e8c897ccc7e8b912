"""The server on the real engine with a tiny random model: many streams, cut at random."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer import LLM, SamplingParams
from infer.enginebuild import build_engine
from infer.tokenizer import Tokenizer
from tests.server.harness import Running, serving
from tests.server.tiny import write_tiny

pytestmark = pytest.mark.anyio

NUM_BLOCKS = 96
LOAD = {"load_format": "random", "dtype": "float32", "device": "cpu"}
ENGINE = {"num_blocks": NUM_BLOCKS, "max_num_seqs": 16, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", params=[0, 1], ids=["depth0", "depth1"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    tokenizer = Tokenizer.from_folder(folder)
    settings = {
        "load": {"model": str(folder), **LOAD},
        "engine": {**ENGINE, "pipeline_depth": request.param},
    }
    with serving(build=lambda: build_engine(settings), tokenizer=tokenizer) as running:
        yield running


def bodies(count: int) -> list[dict[str, Any]]:
    """Requests of many kinds, with prompts that share beginnings."""
    rng = random.Random(7)
    start = [rng.randrange(256) for _ in range(40)]
    made = []
    for i in range(count):
        own = [rng.randrange(256) for _ in range(rng.randrange(1, 60))]
        made.append(
            {
                "prompt": start[: rng.choice((0, 20, 40))] + own,
                "max_tokens": rng.randrange(1, 24),
                "temperature": rng.choice((0, 0.8)),
                "seed": i,
                "n": rng.choice((1, 1, 1, 3)),
                "ignore_eos": True,
                "priority": rng.choice((0, 0, 1)),
            }
        )
    return made


def offline(folder: Path, wanted: list[dict[str, Any]]) -> list[list[str]]:
    """The texts that ``LLM.generate`` gives for the same requests."""
    llm = LLM(str(folder), **LOAD, **ENGINE)
    names = ("max_tokens", "temperature", "seed", "n", "ignore_eos")
    params = [SamplingParams(**{k: body[k] for k in names}) for body in wanted]
    outputs = llm.generate([body["prompt"] for body in wanted], params, progress=False)
    tokenizer = llm.model.tokenizer
    assert tokenizer is not None
    return [[tokenizer.decode(c.token_ids) for c in out.outputs] for out in outputs]


async def stream(http: httpx.AsyncClient, body: dict[str, Any], cut_after: int | None) -> list[str]:
    """One streamed answer's texts; with ``cut_after``, leave after so many events."""
    texts = [""] * body["n"]
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        seen = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line.endswith("[DONE]"):
                continue
            seen += 1
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
            if seen == cut_after:
                break
    return texts


async def whole(http: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
    answer = await http.post("/v1/completions", json=body)
    return [choice["text"] for choice in answer.json()["choices"]]


def idle(server: Running) -> bool:
    """Whether nothing runs or waits and no block is held."""
    stats = server.notes.steps[-1]
    return (
        stats.num_running == 0
        and stats.num_waiting == 0
        and stats.num_free_blocks + stats.num_cached_blocks == NUM_BLOCKS == stats.num_blocks
    )


def client(server: Running) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, limits=limits, timeout=120, trust_env=False)


async def test_streams_equal_offline_generation(server: Running, folder: Path) -> None:
    wanted = bodies(60)
    reference = await asyncio.to_thread(offline, folder, wanted)
    async with client(server) as http:
        streamed = await asyncio.gather(*(stream(http, body, None) for body in wanted))
        assert streamed == reference
        assert await asyncio.gather(*(whole(http, body) for body in wanted[:20])) == reference[:20]
    server.notes.wait_for(lambda: idle(server))


@pytest.mark.parametrize(
    "change", [{"prompt": [1] * 5000}, {"max_tokens": 5000}], ids=["prompt", "answer"]
)
async def test_what_does_not_fit_the_context_has_openais_code(
    server: Running, change: dict[str, Any]
) -> None:
    async with client(server) as http:
        answer = await http.post("/v1/completions", json={"prompt": [1], **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_streams_cut_at_random_leave_nothing_behind(server: Running) -> None:
    rng = random.Random(3)
    async with client(server) as http:
        left = [body | {"max_tokens": 80} for body in bodies(60)]
        streams = [
            asyncio.create_task(stream(http, body, rng.randrange(1, 9) if i % 2 else None))
            for i, body in enumerate(left)
        ]
        whole_answers = [asyncio.create_task(whole(http, body)) for body in left[:10]]
        server.notes.wait_for(lambda: len(server.notes.steps) > 0)
        # Half are cut by their readers; of the rest and of the whole answers some still wait.
        await asyncio.gather(*streams[1::2])
        for task in (*streams, *whole_answers):
            task.cancel()
        await asyncio.gather(*streams, *whole_answers, return_exceptions=True)
    server.notes.wait_for(lambda: idle(server))
    async with client(server) as http:
        again = await asyncio.gather(*(whole(http, body) for body in bodies(5)))
        assert all(text for texts in again for text in texts)
