"""Faults put in from outside, each with the outcome a user may rely on.

Some have their tests elsewhere; tests/RELIABILITY.md lists all of them.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from infer import LLM, SamplingParams
from infer.errors import EngineError
from infer.transport import start_process
from infer.types import FailureKind, FinishReason, Request
from tests.reliability.engines import failing_forward, nan_logits, real, settings
from tests.reliability.process import Served, served
from tests.server.harness import Running, serving

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={**GREEDY, **body}, trust_env=False, timeout=60)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def at_once(server: Running, prompts: list[str], **body: Any) -> list[httpx.Response]:
    """The answers to requests that arrive together."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: post(server.url, prompt=prompt, **body), prompts))


def idle(server: Running) -> bool:
    last = server.notes.steps[-1]
    return last.num_free_blocks + last.num_cached_blocks == last.num_blocks


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("injected fault"),
        torch.OutOfMemoryError("injected fault"),
        MemoryError("injected fault"),
    ],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_that_fails_ends_the_engine_with_the_cause(
    tiny: Path, error: Exception, depth: int
) -> None:
    change = failing_forward(error, sequences=3)
    with real(tiny, change=change, engine={"pipeline_depth": depth}) as server:
        answers = at_once(server, ["a", "bb", "ccc"], max_tokens=200)
        for answer in answers:
            assert answer.status_code == 500
            assert "injected fault" in answer.json()["error"]["message"]
        health = httpx.get(f"{server.url}/health", trust_env=False)
        assert health.status_code == 503
        assert type(error).__name__ in health.json()["error"]["message"]
        assert post(server.url, prompt="late").status_code == 503
        assert server.notes.failures == [FailureKind.ENGINE] * 3


def test_a_script_can_go_on_after_a_step_that_failed(tiny: Path) -> None:
    load = settings(tiny)
    llm = LLM(load["load"].pop("model"), **load["load"], **load["engine"])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    wanted = [out.outputs[0].token_ids for out in llm.generate([[1, 2], [3] * 40], params)]
    compute, steps = llm.state.runtime.compute, 0

    def failing(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise torch.OutOfMemoryError("injected fault")
        return compute(*arguments)

    llm.state.runtime.compute = failing  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        llm.generate([[1, 2], [3] * 40], params)
    again = llm.generate([[1, 2], [3] * 40], params)
    assert [out.outputs[0].token_ids for out in again] == wanted
    assert (llm.state.host.pool.ref_count == 0).all()


@pytest.mark.parametrize("depth", [0, 1])
def test_logits_that_are_not_numbers_fail_one_request(tiny: Path, depth: int) -> None:
    prompts = ["first", "second", "third"]
    with real(tiny) as healthy:
        wanted = [text(post(healthy.url, prompt=prompt)) for prompt in prompts]
    change = nan_logits(rows=3, row=1)
    with real(tiny, change=change, engine={"pipeline_depth": depth}) as server:
        answers = at_once(server, prompts, max_tokens=200)  # so long that they meet
        failed = [i for i, answer in enumerate(answers) if answer.status_code != 200]
        assert len(failed) == 1
        assert answers[failed[0]].status_code == 500
        assert "not numbers" in answers[failed[0]].json()["error"]["message"]
        for i in {0, 1, 2} - set(failed):
            assert text(answers[i]).startswith(wanted[i])
        reasons = sorted(stats.finish_reason for stats in server.notes.requests)
        assert reasons == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]
        assert [text(post(server.url, prompt=prompt)) for prompt in prompts] == wanted
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        server.notes.wait_for(lambda: idle(server))


def test_a_tokenizer_that_fails_fails_its_request(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with real(tiny) as server:
        kind = type(server.tokenizer)
        encode = kind.encode

        def broken(self: Any, given: str, *rest: Any, **options: Any) -> list[int]:
            if "boom" in given:
                raise ZeroDivisionError("SECRET")
            return encode(self, given, *rest, **options)

        monkeypatch.setattr(kind, "encode", broken)
        answers = at_once(server, ["fine", "boom", "fine"])
        assert [answer.status_code for answer in answers] == [200, 500, 200]
        assert "SECRET" not in answers[1].text
        assert server.notes.failures == [FailureKind.INTERNAL]
        assert post(server.url, prompt="after").status_code == 200


def test_text_that_cannot_be_made_fails_its_request(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The detokenizer raises in the middle of a stream."""
    from infer.text import TextStream

    push = TextStream.push
    victims: list[Any] = []

    def broken(self: Any, tokens: Any) -> str:
        if self in victims:
            raise ZeroDivisionError("SECRET")
        out: str = push(self, tokens)
        if not victims:
            victims.append(self)
        return out

    monkeypatch.setattr(TextStream, "push", broken)
    with real(tiny) as server:
        bad = post(server.url, prompt="one", stream=True, max_tokens=40)
        lines = [line for line in bad.text.splitlines() if line]
        assert "error" in json.loads(lines[-2].removeprefix("data: "))
        assert lines[-1] == "data: [DONE]"
        assert "SECRET" not in bad.text
        assert len(text(post(server.url, prompt="one"))) > 0
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        server.notes.wait_for(lambda: idle(server))


class Broken:
    """An observer that raises whatever it is told."""

    def __init__(self) -> None:
        self.told: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)

        def tell(*_: object) -> None:
            self.told.add(name)
            raise ZeroDivisionError("injected fault")

        return tell


def test_an_observer_that_fails_harms_nobody(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    observer = Broken()
    with real(tiny) as server:
        wanted = text(post(server.url, prompt="same"))
        server.loop.call_soon_threadsafe(server.client.add_observer, observer)
        assert text(post(server.url, prompt="same")) == wanted
        assert {"on_step", "on_first_token", "on_request"} <= observer.told
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
    assert "observer Broken failed" in caplog.text


@pytest.mark.anyio
async def test_an_engine_process_that_hangs_is_ended(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.client.STOP_GRACE_S", 0.3)
    client = await start_process(
        "tests.reliability.engines:build_hanging", settings(tiny), step_timeout=1.5
    )
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    request = Request(request_id="r", prompt_token_ids=(1, 2, 3), params=params)
    async with client.generate(request) as stream:
        assert await anext(stream)
        with pytest.raises(EngineError, match="no step for"):
            [events async for events in stream]
    assert not client.health.ok
    assert "step_timeout" in (client.health.cause or "")
    pid = client._link._process.pid  # type: ignore[attr-defined]
    await client.shutdown(0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def runs(pid: int) -> bool:
    """Whether the process is there; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 20) -> bool:
    """Whether these processes end in time."""
    deadline = time.monotonic() + seconds
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)  # other processes: nothing here tells when they end
    return not any(map(runs, pids))


def children(server: Served) -> list[int]:
    lists = Path(f"/proc/{server.process.pid}").glob("task/*/children")
    return [int(pid) for file in lists for pid in file.read_text().split()]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return str(taken.getsockname()[1])


@pytest.mark.parametrize(
    "engine",
    ["--engine-process", pytest.param("--no-engine-process", marks=pytest.mark.slow)],
)
def test_a_killed_server_can_be_started_again(tiny: Path, engine: str) -> None:
    """Readers see the connection end, no process stays behind, and the address is free."""
    options = ("--num-blocks", "64", engine, "--port", free_port())
    with served(tiny, *options) as server:
        wanted = text(post(server.url, prompt="again"))
        own = children(server)
        assert bool(own) == (engine == "--engine-process")
        body = {**GREEDY, "prompt": "x", "max_tokens": 900, "stream": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, trust_env=False, timeout=30
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(lines)
        assert server.process.wait(20) == -signal.SIGKILL
        assert gone(own)
    with served(tiny, *options) as server:
        assert text(post(server.url, prompt="again")) == wanted
        assert server.stop() == 0


@pytest.mark.slow
def test_a_second_signal_means_now(tiny: Path) -> None:
    """SIGTERM lets a request finish (tests/server/test_serve.py); a second one does not wait."""
    with served(tiny, "--num-blocks", "64") as server:
        body = {**GREEDY, "prompt": "x", "max_tokens": 1000, "stream": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, trust_env=False, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            refused = threading.Event()
            while not refused.is_set():  # the first signal has been heard
                if httpx.get(f"{server.url}/health", trust_env=False).status_code == 503:
                    refused.set()
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert server.process.wait(30) == 0


def test_a_reader_that_stops_is_cut_off_at_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """Its answer is larger than what the system buffers; other requests are answered meanwhile."""
    body = {"prompt": "x", "max_tokens": 4000, "n": 8, "stream": True, "logprobs": 3, "timeout": 2}
    with caplog.at_level(logging.CRITICAL), serving(send_buffer=4096) as server:
        raw = socket.socket()
        with raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect(("127.0.0.1", server.port))
            data = json.dumps(body).encode()
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(data), data)
            )
            server.notes.wait_for(lambda: len(server.notes.first) > 0)
            assert post(server.url, prompt="y", max_tokens=50).status_code == 200
            server.notes.wait_for(lambda: server.notes.failures == [FailureKind.DEADLINE])
