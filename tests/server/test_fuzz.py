"""Bodies and headers nobody would write: every answer is the client's fault or a success."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.enginebuild import build_engine
from infer.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from infer.tokenizer import Tokenizer
from tests.server.harness import Running, serving
from tests.server.tiny import write_tiny

ROUTES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2]},
}
NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 16, 17, 20, 21, 64, 255, 256, 2**31 - 1, 2**31, -(2**31), 2**63, 2**64, 10**30]
) | st.sampled_from([0.0, -0.0, 0.5, 1.0, 1e-300, 1e300, -1e300, 5e-324])
TEXTS = st.sampled_from(
    ["", "a", "\0", "\x7f", "<|im_end|>", "é" * 3, "\U0001f600", "{{ 7 * 7 }}", "a" * 2000]
) | st.text(max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "name", "role", "1", ""]) | TEXTS, inner, max_size=4
        )
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The real engine on a tiny model, so that odd values reach the schedule and the sampler."""
    folder = write_tiny(tmp_path_factory.mktemp("models") / "tiny")
    settings = {
        "load": {
            "model": str(folder),
            "load_format": "random",
            "dtype": "float32",
            "device": "cpu",
        },
        "engine": {"num_blocks": 64, "max_num_seqs": 16, "max_model_len": 256},
    }
    tokenizer = Tokenizer.from_folder(folder)
    with serving(
        build=lambda: build_engine(settings), tokenizer=tokenizer, body_timeout=2
    ) as running:
        yield running


@st.composite
def odd_bodies(draw: st.DrawFn) -> tuple[str, Any]:
    """A good body with a few of its fields, known or not, set to anything."""
    path = draw(st.sampled_from(list(ROUTES)))
    names = [*ROUTES[path].model_fields, "unknown"]
    changes = draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=4))
    return path, {**GOOD[path], **changes}


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(case=odd_bodies())
def test_odd_bodies(server: Running, case: tuple[str, Any]) -> None:
    path, body = case
    body.setdefault("max_tokens", 2)
    answer = httpx.post(server.url + path, json=body, trust_env=False, timeout=60)
    assert answer.status_code < 500 or answer.status_code == 503, (body, answer.text)
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert '"error"' not in answer.text
    assert server.client.health.ok


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(path=st.sampled_from(list(ROUTES)), data=st.data())
def test_damaged_bodies(server: Running, path: str, data: st.DataObject) -> None:
    good = json.dumps(GOOD[path]).encode()
    at = data.draw(st.integers(0, len(good)))
    damage = data.draw(st.binary(max_size=6))
    body = good[:at] + damage + good[data.draw(st.integers(at, len(good))) :]
    answer = httpx.post(
        server.url + path,
        content=body,
        headers={"content-type": "application/json"},
        trust_env=False,
        timeout=60,
    )
    assert answer.status_code < 500, (body, answer.text)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    headers=st.dictionaries(
        st.sampled_from(
            b"authorization content-type content-length host origin x-request-id accept cookie "
            b"transfer-encoding expect connection upgrade range".split()
        ),
        st.binary(max_size=30).map(lambda b: b.replace(b"\r", b"").replace(b"\n", b"")),
        max_size=5,
    ),
    path=st.sampled_from([b"/v1/completions", b"/health", b"/metrics", b"/v1/models/%ff", b"/%00"]),
)
def test_odd_headers(server: Running, headers: dict[bytes, bytes], path: bytes) -> None:
    lines = b"".join(b"%s: %s\r\n" % pair for pair in headers.items())
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(b"POST %s HTTP/1.1\r\nhost: localhost\r\n%s\r\n{}" % (path, lines))
        raw.shutdown(socket.SHUT_WR)
        answer = raw.recv(200)
    # A connection that was only half of a request may end without an answer.
    assert not answer or answer.split(b" ")[1] < b"500", answer


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_schemathesis(server: Running, tmp_path: Path) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--checks", "all", "--exclude-checks", "positive_data_acceptance"),
            *("--max-examples", "40", "--seed", "1", "--request-timeout", "60"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert server.client.health.ok
