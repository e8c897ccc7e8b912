"""Disconnects, deadlines, a full queue, a dying engine, an orderly stop: nobody is left hanging."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from infer.types import FailureKind, FinishReason, RejectionKind
from tests.server.fakes import MAX_SEQS, FakeModel, Gate, expected
from tests.server.harness import Running, serving

LONG: dict[str, Any] = {"prompt": "abc", "max_tokens": 500, "stream": True}


def held() -> FakeModel:
    return FakeModel(gate=Gate(is_open=False))


class Caller:
    """A client made of a socket: it reads when a test says so, and leaves when it says so."""

    def __init__(self, server: Running, body: dict[str, Any]) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        self._data = b""
        data = json.dumps(body).encode()
        self._socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)
        )

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def read_until(self, marker: bytes) -> bytes:
        """Everything received so far, which then contains ``marker``."""
        while marker not in self._data:
            piece = self._socket.recv(65536)
            assert piece, "the connection ended inside the answer"
            self._data += piece
        return self._data

    def events(self) -> list[str]:
        """The data of every event until the stream's end."""
        lines = self.read_until(b"\r\n0\r\n\r\n").decode().splitlines()
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@contextmanager
def calling(server: Running, body: dict[str, Any], count: int) -> Iterator[list[Caller]]:
    """So many callers, all of them open at the server."""
    with ExitStack() as stack:
        before = num_open(server)
        callers = [stack.enter_context(Caller(server, body)) for _ in range(count)]
        while num_open(server) < before + count:
            pass
        yield callers


def on_loop(server: Running, call: Callable[[], Any]) -> Any:
    """Run ``call`` on the server's event loop and wait for its result."""

    async def run() -> Any:
        return call()

    return asyncio.run_coroutine_threadsafe(run(), server.loop).result(20)


def num_open(server: Running) -> int:
    return int(on_loop(server, lambda: server.client._desk.num_open))


def read_all(raw: socket.socket) -> bytes:
    data = b""
    while piece := raw.recv(65536):
        data += piece
    return data


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(stream: bool) -> None:
    body = {**LONG, "stream": stream}
    with serving(held()) as server, calling(server, body, MAX_SEQS * 2) as callers:
        # Half of the requests run, half are queued, and the engine stands in a step.
        server.model.gate.allow(2)
        server.notes.wait_for(lambda: len(server.notes.steps) == 2)
        for caller in callers:
            caller.close()
        server.notes.wait_for(lambda: len(server.notes.requests) == len(callers))
        assert {s.finish_reason for s in server.notes.requests} == {FinishReason.ABORT}
        assert num_open(server) == 0
        server.model.gate.open()
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, trust_env=False
        )
        assert answer.status_code == 200
        assert not server.model.states[0].running
        assert not server.model.states[0].waiting


def test_a_reader_that_stops_reading_stops_nobody() -> None:
    with serving() as server, Caller(server, {**LONG, "n": 4, "logprobs": 3}):
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 300}, trust_env=False
        )
        assert answer.json()["choices"][0]["text"] == bytes(expected(b"x", 300)).decode()
        server.notes.wait_for(lambda: len(server.notes.requests) == 2)


def test_an_engine_that_dies() -> None:
    with serving(held()) as server, Caller(server, LONG) as streaming:
        server.model.gate.allow(1)
        streaming.read_until(b"data: ")
        with ThreadPoolExecutor(4) as pool:
            waiting = [
                pool.submit(
                    httpx.post,
                    f"{server.url}/v1/completions",
                    json={**LONG, "stream": stream},
                    trust_env=False,
                    timeout=20,
                )
                for stream in (True, False)
            ]
            while num_open(server) < 3:
                pass
            server.model.gate.fail(RuntimeError("injected fault"))
            for answer in waiting:
                assert answer.result(20).status_code == 500
                assert answer.result(20).json()["error"]["code"] == "engine_error"
        rest = streaming.events()
        assert "injected fault" in json.loads(rest[-2])["error"]["message"]
        assert rest[-1] == "[DONE]"
        health = httpx.get(f"{server.url}/health", trust_env=False)
        assert health.status_code == 503
        assert "injected fault" in health.json()["error"]["message"]
        late = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, trust_env=False)
        assert late.status_code == 503
        assert server.notes.failures == [FailureKind.ENGINE] * 3
        assert server.notes.rejections == [RejectionKind.SHUTDOWN]  # the late request alone
        assert {s.finish_reason for s in server.notes.requests} == {FinishReason.ERROR}


def test_a_deadline_ends_a_request() -> None:
    with serving(held()) as server:
        body = {**LONG, "stream": False, "timeout": 0.05}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False)
        assert answer.status_code == 408
        assert answer.headers["x-should-retry"] == "false"
        assert num_open(server) == 0
        with calling(server, {**LONG, "timeout": 0.5}, 1) as (streaming,):
            server.model.gate.allow(2)  # the first is the step that the other request stood in
            events = streaming.events()
        assert json.loads(events[0])["choices"][0]["text"]
        assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
        assert server.notes.failures == [FailureKind.DEADLINE] * 2


def test_a_full_queue_answers_429() -> None:
    with (
        serving(held(), max_queue=2) as server,
        calling(server, LONG, MAX_SEQS + 2) as callers,
    ):
        answer = httpx.post(f"{server.url}/v1/completions", json=LONG, trust_env=False)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "server_busy"
        assert server.notes.rejections == [RejectionKind.CAPACITY]
        never = httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": ["a"] * (MAX_SEQS + 3), "max_tokens": 1},
            trust_env=False,
        )
        assert never.status_code == 400
        callers.pop().close()
        server.notes.wait_for(lambda: len(server.notes.requests) == 1)
        server.model.gate.open()
        again = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, trust_env=False
        )
        assert again.status_code == 200


def test_stopping_answers_everybody() -> None:
    model = held()
    with serving(model) as server, Caller(server, LONG) as streaming:
        model.gate.allow(1)
        streaming.read_until(b"data: ")
        stop = asyncio.run_coroutine_threadsafe(server.client.shutdown(0), server.loop)
        events = streaming.events()
        assert json.loads(events[-2])["error"]["code"] == "engine_unavailable"
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, trust_env=False)
        assert refused.status_code == 503
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 503
        model.gate.open()
        stop.result(20)


def test_a_slow_template_holds_up_only_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = threading.Event()
    with serving(text_timeout=0.2, text_workers=1) as server:
        tokenizer = server.tokenizer
        plain = type(tokenizer).encode

        def encode(self: Any, text: str, add_special_tokens: bool = True) -> list[int]:
            if text == "slow":
                assert blocked.wait(20)
            return plain(self, text, add_special_tokens)

        monkeypatch.setattr(type(tokenizer), "encode", encode)
        url = f"{server.url}/v1/completions"
        slow = httpx.post(url, json={"prompt": "slow"}, trust_env=False)
        assert slow.status_code == 400
        assert "0.2 s" in slow.json()["error"]["message"]
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        ids = httpx.post(url, json={"prompt": "other", "max_tokens": 1}, trust_env=False)
        assert ids.status_code == 400  # the only worker is still busy
        blocked.set()
        with ThreadPoolExecutor(4) as pool:
            fine = pool.submit(
                httpx.post, url, json={"prompt": "fine", "max_tokens": 1}, trust_env=False
            )
            assert fine.result(20).status_code == 200


def test_a_step_that_hangs_ends_its_requests_and_turns_health_red() -> None:
    with serving(held(), step_timeout=1.0) as server, Caller(server, LONG) as streaming:
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        server.model.gate.allow(1)
        streaming.read_until(b"data: ")
        body = {**LONG, "stream": False}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False, timeout=20)
        assert answer.status_code == 500
        assert "no step for" in answer.json()["error"]["message"]
        events = streaming.events()
        assert "step_timeout" in json.loads(events[-2])["error"]["message"]
        sick = httpx.get(f"{server.url}/health", trust_env=False)
        assert sick.status_code == 503
        assert "no step for" in sick.json()["error"]["message"]
        assert server.notes.failures == [FailureKind.WORKER] * 2
        late = httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False)
        assert late.status_code == 503
        assert num_open(server) == 0


def test_an_engine_that_is_slow_but_steps_is_healthy() -> None:
    with serving(held(), step_timeout=0.4) as server, Caller(server, LONG) as streaming:
        for step in range(8):  # together longer than the limit
            threading.Event().wait(0.1)
            server.model.gate.allow(1)
            server.notes.wait_for(lambda step=step: len(server.notes.steps) > step)
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        server.model.gate.open()
        assert streaming.events()[-1] == "[DONE]"


def test_the_same_request_id_twice() -> None:
    with serving(held()) as server, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "x", "max_tokens": 3}
        both = [
            pool.submit(
                httpx.post,
                f"{server.url}/v1/completions",
                json=body,
                headers={"x-request-id": "same"},
                trust_env=False,
                timeout=20,
            )
            for _ in range(2)
        ]
        while num_open(server) < 2:
            pass
        server.model.gate.open()
        assert [answer.result(20).json()["id"] for answer in both] == ["cmpl-same"] * 2


def test_a_bug_in_submit_is_that_requests_own(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        body = {"prompt": "x", "max_tokens": 2}
        url = f"{server.url}/v1/completions"
        bug = httpx.post(url, json={**body, "cache_salt": "submit-bug"}, trust_env=False)
        assert bug.status_code == 500
        assert httpx.post(url, json=body, trust_env=False).status_code == 200
        assert "ZeroDivisionError" in caplog.text


def test_a_bug_in_a_route_answers_500(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("SECRET")

    monkeypatch.setattr("infer.server.routes.completion_options", broken)
    with serving() as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, trust_env=False)
        assert answer.status_code == 500
        assert "SECRET" not in answer.text
        assert server.notes.failures == [FailureKind.INTERNAL]
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200


def test_a_client_that_leaves_inside_its_body_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="infer"), serving() as server:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
                raw.sendall(
                    b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                    b"expect: 100-continue\r\ncontent-length: 100\r\n\r\n" % path.encode()
                )
                assert raw.recv(100).split()[1] == b"100"  # the route waits for the body
                raw.sendall(b'{"pro')
        while sum("finish=disconnect" in r.getMessage() for r in caplog.records) < 3:
            httpx.get(f"{server.url}/health", trust_env=False)
        assert server.notes.failures == []
        assert server.notes.rejections == []
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_half_open_and_pipelined_connections() -> None:
    with serving() as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-le")
        get = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
            raw.sendall(get * 2 + get.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            assert read_all(raw).count(b"HTTP/1.1 200") == 3
