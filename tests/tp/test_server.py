"""The server over ranks: chunks, prefix hits, preemption and streams that are cut, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infer.enginebuild import build_engine
from infer.tokenizer import Tokenizer
from tests.server.harness import Running, serving
from tests.server.test_engine import bodies, client, offline, stream
from tests.server.tiny import write_tiny
from tests.tp.test_faults import workers

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LOAD: dict[str, Any] = {"load_format": "random", "dtype": "float32", "device": "cpu", "threads": 1}
# So few blocks, and steps so short, that prompts are cut and sequences preempted.
ENGINE: dict[str, Any] = {
    "num_blocks": 24,
    "block_size": 8,
    "max_model_len": 160,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", params=[(2, 0), (2, 1), (4, 1)], ids=str)
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    tokenizer = Tokenizer.from_folder(folder)
    size, depth = request.param
    settings = {
        "load": {"model": str(folder), **LOAD, "tp": size},
        "engine": {**ENGINE, "pipeline_depth": depth},
    }
    before = workers()
    with serving(build=lambda: build_engine(settings), tokenizer=tokenizer) as running:
        assert len(workers() - before) == size - 1
        yield running
    assert not workers() - before


async def test_streams_equal_offline_generation(server: Running, folder: Path) -> None:
    wanted = bodies(24)
    reference = await asyncio.to_thread(offline, folder, wanted)
    async with client(server) as http:
        # Those that are cut make room in places that no plan foresaw.
        cut = [stream(http, body | {"max_tokens": 60}, 2) for body in bodies(30)[24:]]
        streamed, _ = await asyncio.gather(
            asyncio.gather(*(stream(http, body, None) for body in wanted)), asyncio.gather(*cut)
        )
    assert streamed == reference
    steps = server.notes.steps
    assert sum(s.num_preempted for s in steps) > 0
    assert sum(s.prefix_hits for s in steps) > 0
    server.notes.wait_for(lambda: steps[-1].num_running == 0)
