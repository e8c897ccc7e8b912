"""Who may call: keys, hosts, origins, and the size of what is sent."""

from __future__ import annotations

import base64
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from infer.errors import ConfigError
from infer.server.config import ServerConfig
from infer.server.middleware import AccessLog
from infer.types import RejectionKind
from tests.server.harness import Running, serving

KEY = "correct-horse-battery"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(api_key=KEY, max_body_bytes=10_000, body_timeout=0.5) as running:
        yield running


@pytest.fixture(scope="module")
def open_server() -> Iterator[Running]:
    with serving(allowed_origins=("https://app.example",)) as running:
        yield running


ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/x"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/no-such-route"),
    ("GET", "//health"),
    ("GET", "/health/"),
    ("GET", "/health/../v1/models"),
]
BASIC = base64.b64encode(f"anyone:{KEY}".encode()).decode()
WRONG = [
    None,
    "",
    "Bearer",
    f"Bearer {KEY}x",
    f"Bearer {KEY[:-1]}",
    f"Token {KEY}",
    KEY,
    "Basic !!!",
    f"Basic {base64.b64encode(KEY.encode()).decode()}",
    f"Bearer {BASIC}",
    "Bearer \xe9",
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_asks_for_the_key(server: Running, method: str, path: str) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for given in WRONG:
            headers = {} if given is None else {"authorization": given.encode("latin-1")}
            answer = http.request(method, path, headers=headers)
            assert answer.status_code == 401, (path, given)
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert RejectionKind.UNAUTHORIZED in server.notes.rejections


@pytest.mark.parametrize("authorization", [f"Bearer {KEY}", f"bearer {KEY}", f"Basic {BASIC}"])
def test_the_key_opens(server: Running, authorization: str) -> None:
    answer = httpx.get(
        f"{server.url}/v1/models", headers={"authorization": authorization}, trust_env=False
    )
    assert answer.status_code == 200


def test_health_is_open(server: Running) -> None:
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
    assert httpx.head(f"{server.url}/health", trust_env=False).status_code == 200


def test_large_bodies_are_refused(server: Running) -> None:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}

    def pieces() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    url = f"{server.url}/v1/completions"
    declared = httpx.post(url, content=b" " * 10_001, headers=headers, trust_env=False)
    assert declared.status_code == 413
    chunked = httpx.post(url, content=pieces(), headers=headers, trust_env=False)
    assert chunked.status_code == 413
    assert server.notes.rejections.count(RejectionKind.TOO_LARGE) == 2


@pytest.mark.parametrize("length", [b"-1", b"99999999999999999999999999", b"abc", b"+5", b"0x10"])
def test_odd_content_lengths(server: Running, length: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(head % KEY.encode() + b"content-length: %s\r\n\r\n" % length)
        assert raw.recv(100).split()[1] in (b"400", b"413")


def test_large_headers_are_refused(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 100_000)
        assert raw.recv(100).split()[1] in (b"400", b"431")
    test_health_is_open(server)


def test_a_body_that_does_not_arrive(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n"
            b"content-type: application/json\r\nauthorization: Bearer %s\r\n\r\n{" % KEY.encode()
        )
        assert raw.recv(100).split()[1] == b"408"


def test_other_hosts_are_refused_without_a_key(open_server: Running) -> None:
    """DNS rebinding: the attacker's name, resolved to this machine, in a browser on it."""
    for host, status in (
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8000", 200),
    ):
        answer = httpx.get(f"{open_server.url}/v1/models", headers={"host": host}, trust_env=False)
        assert answer.status_code == status, host


def test_foreign_origins_are_refused(open_server: Running) -> None:
    own = open_server.url
    for origin, status in (
        ("https://evil.example", 403),
        ("null", 403),
        ("http://127.0.0.1", 403),
        ("http://[", 403),
        (own, 200),
        ("https://app.example", 200),
    ):
        answer = httpx.post(
            f"{own}/tokenize", json={"prompt": "x"}, headers={"origin": origin}, trust_env=False
        )
        assert answer.status_code == status, origin
        allowed = answer.headers.get("access-control-allow-origin")
        assert allowed == ("https://app.example" if origin == "https://app.example" else None)


def test_preflight(open_server: Running) -> None:
    for origin, status in (("https://app.example", 200), ("https://evil.example", 400)):
        answer = httpx.options(
            f"{open_server.url}/v1/completions",
            headers={
                "origin": origin,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type",
            },
            trust_env=False,
        )
        assert answer.status_code == status


def test_a_page_may_use_openais_client(open_server: Running) -> None:
    # The JavaScript client sends these with every request, and reads these of every answer.
    sent = "authorization,content-type,user-agent,x-stainless-lang,x-stainless-retry-count"
    page = {"origin": "https://app.example"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": sent}
    url = f"{open_server.url}/v1/chat/completions"
    preflight = httpx.options(url, headers={**page, **asked}, trust_env=False)
    assert preflight.status_code == 200
    allowed = preflight.headers["access-control-allow-headers"].lower().split(",")
    assert set(sent.split(",")) <= {name.strip() for name in allowed}
    answer = httpx.post(url, json={}, headers=page, trust_env=False)
    assert answer.status_code == 400
    exposed = answer.headers["access-control-expose-headers"].lower().split(",")
    assert {name.strip() for name in exposed} >= {"x-request-id", "x-should-retry", "retry-after"}


def test_every_origin_when_told_so() -> None:
    with serving(allowed_origins=("*",)) as running:
        for origin in ("https://any.example", "null"):
            answer = httpx.get(
                f"{running.url}/v1/models", headers={"origin": origin}, trust_env=False
            )
            assert answer.status_code == 200, origin
            assert answer.headers["access-control-allow-origin"] in ("*", origin)


def test_non_loopback_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.com"):
        with pytest.raises(ConfigError, match="API key"):
            ServerConfig(host=host)
        assert not ServerConfig(host=host, api_key=KEY).loopback
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        assert ServerConfig(host=host).loopback
    for key in ("short", "with space in it", "é" * 10, ""):
        with pytest.raises(ConfigError, match="printable"):
            ServerConfig(api_key=key)


def test_one_line_a_request_without_the_prompt(
    open_server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="infer"):
        answer = httpx.post(
            f"{open_server.url}/v1/completions",
            json={"prompt": "SECRET words", "max_tokens": 3, "stop": "SECRET"},
            headers={"x-request-id": "my-id.1"},
            trust_env=False,
        )
        bad = httpx.post(
            f"{open_server.url}/v1/completions",
            json={"prompt": 5, "SECRET": "SECRET"},
            headers={"x-request-id": "bad id"},
            trust_env=False,
        )
        # The line is written after the last byte: the next request on the loop comes behind it.
        httpx.get(f"{open_server.url}/health", trust_env=False)
    assert answer.headers["x-request-id"] == "my-id.1"
    assert answer.json()["id"] == "cmpl-my-id.1"
    assert bad.status_code == 400
    assert bad.headers["x-request-id"] != "bad id"
    lines = [r.getMessage() for r in caplog.records if r.name == "infer.access"]
    (line,) = [line for line in lines if "id=my-id.1" in line]
    for part in (
        "status=200",
        "prompt_tokens=12",
        "generated_tokens=3",
        "finish=length",
        "ttft_s=",
    ):
        assert part in line
    assert "SECRET" not in caplog.text


def test_what_open_pages_ask_for_is_logged_for_debugging_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def respond(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("", 401 if "locked" in scope["path"] else 200)(scope, receive, send)

    client = TestClient(AccessLog(respond, lambda error, record: None))
    polled = ["/health", "/metrics", "/metrics/history", "/debug/steps", "/ui/", "/ui/queue/data"]
    told = ["/v1/models", "/v1/chat/completions", "/healthy", "/ui/locked", "/metrics/locked"]
    with caplog.at_level(logging.DEBUG, logger="infer"):
        for path in polled + told:
            client.get(path)
    levels = {
        getattr(record, "fields", {})["path"]: record.levelno
        for record in caplog.records
        if record.name == "infer.access"
    }
    assert levels == {**dict.fromkeys(polled, logging.DEBUG), **dict.fromkeys(told, logging.INFO)}
