"""Ranks under the programs people start: the server, the command line, torchrun on two nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from infer import LLM, SamplingParams
from tests.server.tiny import write_tiny
from tests.tp.test_faults import LIMIT_S, children, gone

pytestmark = pytest.mark.slow

MODEL = ("--load-format", "random", "--dtype", "float32", "--device", "cpu", "--num-blocks", "64")
PROMPTS = ([5, 9, 11], [200, 3, 77, 4, 5])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What one process generates."""
    llm = LLM(str(folder), load_format="random", dtype="float32", device="cpu", num_blocks=64)
    params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.0, seed=3)
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, progress=False)]


def start(*command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def answers(*processes: subprocess.Popen[str]) -> list[list[list[int]]]:
    """What each ``infer generate --json`` printed."""
    said = [process.communicate(timeout=100) for process in processes]
    logs = "".join(log for _, log in said)
    assert {process.returncode for process in processes} == {0}, logs
    return [[json.loads(line)["token_ids"] for line in out.splitlines()] for out, _ in said]


def generate(folder: Path) -> tuple[str, ...]:
    prompts = [part for ids in PROMPTS for part in ("--prompt-ids", json.dumps(ids))]
    sampling = ("--max-tokens", "10", "--ignore-eos", "--temperature", "1", "--seed", "3")
    return ("infer", "generate", "--model", str(folder), *MODEL, *prompts, *sampling, "--json")


def test_generate(folder: Path, expected: list[list[int]]) -> None:
    assert answers(start(*generate(folder), "--tp", "2")) == [expected]


def test_torchrun(folder: Path, expected: list[list[int]]) -> None:
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m")
    assert answers(start(*torchrun, *generate(folder))) == [expected]


def test_two_nodes(folder: Path, expected: list[list[int]]) -> None:
    """Two agents, as on two hosts: only the first node's rank prints."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "test")
    sizes = ("--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1")
    command = ("torch.distributed.run", *sizes, *rendezvous, "-m", *generate(folder))
    assert sorted(answers(start(*command), start(*command))) == [[], expected]


def test_a_number_that_torchrun_did_not_start(folder: Path) -> None:
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m")
    process = start(*torchrun, *generate(folder), "--tp", "3")
    _, log = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "error: tp is 3, but torchrun started 2 ranks" in log


# --- the server -----------------------------------------------------------------------------------


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of two ranks and its address."""
    more = ("--port", "0", "--no-dashboard", "--tp", "2", "--threads", "1", *options)
    process = start("infer", "serve", "--model", str(folder), *MODEL, *more)
    assert process.stderr is not None
    log = ""
    try:
        while not (found := re.search(r"API\s+(http://\S+)/v1", log)):
            line = process.stderr.readline()
            assert line, log
            log += line
        yield process, found.group(1)
    finally:
        process.kill()
        process.communicate()


def ranks_below(pid: int) -> list[int]:
    """Processes of followers among the descendants of a process."""
    found = []
    for child in children(pid):
        if b"infer.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
            found.append(child)
        found += ranks_below(child)
    return found


@pytest.mark.parametrize("apart", ["--no-engine-process", "--engine-process"])
def test_serve_and_the_death_of_a_rank(folder: Path, expected: list[list[int]], apart: str) -> None:
    with (
        serving(folder, apart) as (process, url),
        httpx.Client(base_url=url, trust_env=False, timeout=60) as http,
    ):
        options = {"max_tokens": 10, "ignore_eos": True, "temperature": 1.0, "seed": 3}
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            answer = http.post("/v1/completions", json={"prompt": prompt, **options})
            text = answer.json()["choices"][0]["text"]
            assert answer.json()["usage"]["completion_tokens"] == len(tokens)
            assert text == decoded(folder, tokens)
        (rank,) = ranks_below(process.pid)
        body = {"prompt": [1, 2], "max_tokens": 900, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(rank, signal.SIGKILL)
            began = time.monotonic()
            rest = "".join(lines)
        assert time.monotonic() - began < LIMIT_S
        assert "was killed by SIGKILL" in rest
        assert http.get("/health").status_code == 503
        refused = http.post("/v1/completions", json={"prompt": [1], **options})
        assert refused.status_code == 503
        assert "SIGKILL" in refused.json()["error"]["message"]
        assert gone(rank)
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def test_a_server_that_is_killed_leaves_nothing(folder: Path) -> None:
    with serving(folder, "--engine-process") as (process, _):
        (rank,) = ranks_below(process.pid)
        (engine,) = children(process.pid)
        process.kill()
        deadline = time.monotonic() + 2 * LIMIT_S
        while not (gone(rank) and gone(engine)):
            assert time.monotonic() < deadline, "a process stays behind"
            time.sleep(0.05)


def test_stop_in_order(folder: Path) -> None:
    with serving(folder, "--no-engine-process") as (process, url):
        (rank,) = ranks_below(process.pid)
        body = {"prompt": [1, 2], "max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            *_, last = [line for line in lines if line]
        assert last == "data: [DONE]"
        assert process.wait(60) == 0
        assert gone(rank)


def decoded(folder: Path, tokens: list[int]) -> str:
    from infer.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer.decode(tokens)


def test_a_program_that_every_rank_runs(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """With a default group of its own, each rank steps its own state, and takes snapshots."""
    script = tmp_path / "spmd.py"
    script.write_text(
        "import sys, torch.distributed as dist, infer\n"
        "from infer import EngineConfig, Request, SamplingParams\n"
        "dist.init_process_group('gloo')\n"
        "model = infer.load(sys.argv[1], tp=2, device='cpu', dtype='float32', progress=False)\n"
        "assert model.tp.link is None and model.tp.rank == dist.get_rank()\n"
        "state = infer.init(model, EngineConfig(num_blocks=32, max_model_len=64))\n"
        "params = SamplingParams(temperature=1, seed=5, max_tokens=9, ignore_eos=True)\n"
        "request = Request(request_id='a', prompt_token_ids=(4, 5), params=params)\n"
        "state = infer.submit(state, request)\n"
        "tokens = []\n"
        "while infer.has_work(state):\n"
        "    state, report = infer.step(model, state)\n"
        "    tokens += report.accepted.tokens.tolist()\n"
        "    if len(tokens) == 4:\n"
        "        state = infer.restore(model, infer.snapshot(state))\n"
        "sys.stdout.write(f'{tokens}\\n')  # in one piece: ranks share the pipe\n"
        "dist.destroy_process_group()\n"
    )
    folder = checkpoint("qwen3")
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    process = start(*torchrun, str(script), str(folder))
    out, log = process.communicate(timeout=100)
    assert process.returncode == 0, log
    alone = LLM(str(folder), device="cpu", dtype="float32", num_blocks=32)
    params = SamplingParams(temperature=1, seed=5, max_tokens=9, ignore_eos=True)
    expected = str(list(alone.generate([[4, 5]], params, progress=False)[0].outputs[0].token_ids))
    assert out.splitlines() == [expected, expected]
