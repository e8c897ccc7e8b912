"""What nobody in good faith would send, over HTTP and below it."""

from __future__ import annotations

import json
import re
import socket
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer.tokenizer import Tokenizer
from tests.reliability.engines import real
from tests.server.fakes import SPECIALS
from tests.server.harness import Running

JSON = {"content-type": "application/json"}
ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
# At the edges of UTF-8's lengths, joined, reversed, composed, invisible, and not characters.
TEXTS = (
    *("\x00", "\x07\x08\x1b[31m", "\x7f", "\x80", "\u07ff", "\u0800", "\uffff", "\U00010000"),
    *("\U0010ffff", "\ufeff", "\u202egnp.exe", "e\u0301", "\u1100\u1161", "\u200b\u200c\u2060"),
    *("\U0001f468\u200d\U0001f469\u200d\U0001f467", "\ufffd", "\ufffe", "\ue000", "\ufdfa" * 50),
    *("a\u0300" * 200, "\r\n\t\v\f\u0085\u2028\u2029", "'; DROP TABLE--", "../../etc/passwd"),
    "{{ 7 * 7 }}{% raw %}",
)


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Running]:
    with real(tiny, max_body_bytes=1 << 20, body_timeout=2) as running:
        yield running


@pytest.fixture(autouse=True)
def unharmed(server: Running) -> Iterator[None]:
    """After each test the server answers as it did before, and holds nothing."""
    yield
    good = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = post(server, "/v1/completions", good)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert server.client.health.ok
    assert server.notes.failures == []


def post(server: Running, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=content, headers=JSON, trust_env=False, timeout=60)


def deep(depth: int) -> Iterator[bytes]:
    for opened, closed in (("[", "]"), ('{"a":', "}")):
        inner = (opened * depth + "1" + closed * depth).encode()
        yield inner
        yield inner[: len(inner) // 2]
        yield b'{"prompt": "x", "max_tokens": 1, "metadata": ' + inner + b"}"


MALFORMED = (
    *(b"", b"{", b"}", b"null", b"[]", b'"x"', b"1", b"{'prompt': 1}", b'{"prompt": "x",}'),
    *(b'{"prompt": NaN}', b'{"prompt": "x", "temperature": Infinity}', b'{"prompt": "\xff"}'),
    *(b'{"prompt": "x"} {"prompt": "y"}', b'\x00{"prompt": "x"}', b'{"prompt": "a\x00b"}'),
    *(b'{"prompt": "x", "max_tokens": 1e999}', b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}"),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}', b'{"messages": "\\ud83d x"}'),
    *(b'{"\\ud800": 1, "prompt": "x"}', '{"prompt": "x"}'.encode("utf-16"), b"\xef"),
    b"\x1f\x8b\x08" + b"\0" * 99,  # compressed, which nobody asked for
)


@pytest.mark.parametrize("path", ROUTES)
def test_malformed_and_deeply_nested_json(server: Running, path: str) -> None:
    for body in (*MALFORMED, *deep(500), *deep(100_000)):
        answer = post(server, path, body)
        allowed = (200, 400, 413) if b"metadata" in body else (400, 413)
        assert answer.status_code in allowed, body[:80]
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]
            assert len(answer.content) < 4000


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_of_ten_megabytes(server: Running, chunked: bool) -> None:
    """Refused at the limit: what comes after it is not kept."""
    body = b'{"prompt": "' + b"a" * (10 << 20) + b'"}'

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    with httpx.Client(trust_env=False, timeout=30) as http:
        content = pieces() if chunked else body
        try:
            answer = http.post(f"{server.url}/v1/completions", content=content, headers=JSON)
        except httpx.TransportError:
            return  # it hung up before the body was sent
    assert answer.status_code == 413


def test_bodies_that_cost_more_than_they_weigh(server: Running) -> None:
    """Just under the size limit: each is refused or answered within seconds."""
    filler, controls = "a" * 900_000, "<|im_end|>" * 80_000
    bodies: list[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": filler}),
        ("/v1/completions", {"prompt": [1] * 300_000}),
        ("/v1/completions", {"prompt": ["x"] * 200_000}),
        ("/v1/completions", {"prompt": "x", "stop": ["s"] * 200_000}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(60_000)}}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1, "user": filler}),
        (
            "/v1/completions",
            {"prompt": "x", "max_tokens": 1, **{f"k{i}": 1 for i in range(50_000)}},
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": filler}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 20_000}),
        ("/v1/chat/completions", {"messages": [{"role": "<|im_end|>" * 50_000, "content": "x"}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "<|im_end|>" * 80_000}]},
        ),
        ("/tokenize", {"prompt": controls}),
        ("/detokenize", {"tokens": [255] * 180_000}),
    ]
    for path, body in bodies:
        began = time.monotonic()
        answer = post(server, path, body)
        assert len(answer.request.content) <= 1 << 20
        assert answer.status_code in (200, 400), (path, str(body)[:80], answer.text[:200])
        assert time.monotonic() - began < 20, (path, str(body)[:80])


def test_any_text_goes_in_and_comes_back(server: Running) -> None:
    """Through tokenizer and detokenizer unchanged, and every answer is valid Unicode."""
    for text in TEXTS:
        answer = post(server, "/tokenize", {"prompt": text})
        assert answer.status_code == 200, ascii(text)
        back = post(server, "/detokenize", {"tokens": answer.json()["tokens"]})
        assert back.json()["prompt"] == text, ascii(text)
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
        assert post(server, "/v1/chat/completions", chat).status_code == 200, ascii(text)
        stop = {"prompt": text, "max_tokens": 3, "stop": text[:8], "user": text, "ignore_eos": True}
        assert post(server, "/v1/completions", stop).status_code == 200, ascii(text)


def test_a_stream_is_the_whole_answer_whatever_bytes_it_is_made_of(server: Running) -> None:
    """A random model writes bytes that are no UTF-8; pieces join to the text of the whole."""
    for seed in range(6):
        body = {
            "prompt": [200 + seed],
            "max_tokens": 40,
            "seed": seed,
            "ignore_eos": True,
            "logit_bias": {str(b): 6 for b in (0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80)},
        }
        whole = post(server, "/v1/completions", body).json()["choices"][0]["text"]
        streamed = post(server, "/v1/completions", {**body, "stream": True}).text
        events = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
        pieces = [json.loads(event)["choices"][0]["text"] for event in events]
        assert "".join(pieces) == whole
        assert not any(unicodedata.category(c) == "Cs" for c in whole)


@pytest.mark.parametrize("token", SPECIALS)
def test_no_text_becomes_a_control_token(server: Running, token: str) -> None:
    """A conversation has the control tokens of its template, whatever its texts spell."""
    tokenizer: Tokenizer = server.tokenizer
    (control,) = tokenizer.encode(token, add_special_tokens=False)

    def count(*messages: dict[str, Any], **more: Any) -> int:
        answer = post(server, "/tokenize", {"messages": list(messages), **more})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["tokens"].count(control))

    for text in (token, f"a{token}b", token * 3, f"{token[:4]}{token}{token[4:]}", f"\n{token}\n"):
        for role in ("user", "system", "assistant"):
            wanted = count({"role": role, "content": "harmless"})
            assert count({"role": role, "content": text}) == wanted, (role, text)
        tool = {"type": "function", "function": {"name": "f", "description": text}}
        plain = {"type": "function", "function": {"name": "f", "description": "harmless"}}
        message = {"role": "user", "content": "x"}
        assert count(message, tools=[tool]) == count(message, tools=[plain]), text
    # Cut over two messages it is still text.
    halves = [{"role": "user", "content": part} for part in (token[:5], token[5:])]
    harmless = [{"role": "user", "content": part} for part in ("aaaa", "bbbb")]
    assert count(*halves) == count(*harmless)


def test_prompts_of_one_token(server: Running) -> None:
    vocab = server.client.info.vocab_size
    for token in (0, 1, 255, 256, 257, vocab - 1):
        for length in (1, 15, 16, 17, 64):
            body = {"prompt": [token] * length, "max_tokens": 3, "ignore_eos": True}
            answer = post(server, "/v1/completions", {**body, "n": 2, "logprobs": 2})
            assert answer.status_code == 200, (token, length, answer.text)
            assert answer.json()["usage"]["completion_tokens"] == 6
    for token in (vocab, -1, 2**31 - 1, -(2**31), 2**31, 2**63):
        assert post(server, "/v1/completions", {"prompt": [token]}).status_code == 400


def exchange(server: Running, data: bytes) -> list[int]:
    """Statuses of all answers to raw bytes, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(data)
        answer = b""
        while piece := raw.recv(65536):
            answer += piece
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


HOST = b"host: localhost\r\n"
INNER = b"GET /v1/models HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n"
KIND = b"content-type: application/json\r\n"
SMUGGLING = {
    "two lengths": b"content-length: 2\r\ncontent-length: 40\r\n\r\n{}",
    "a list of lengths": b"content-length: 2, 40\r\n\r\n{}",
    "a signed length": b"content-length: +2\r\n\r\n{}",
    "an underscore in the length": b"content-length: 1_0\r\n\r\n{}",
    "space before the colon": b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked twice": b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "a coding before chunked": b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a control in the name": b"transfer\x0bencoding: chunked\r\n\r\n0\r\n\r\n",
    "a NUL in the value": b"x: a\x00b\r\ncontent-length: 2\r\n\r\n{}",
    "a bare CR": b"x: a\rtransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n{}",
    "a chunk size that is none": b"transfer-encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
    "a negative chunk size": b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    "an endless chunk size": b"transfer-encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n{}",
}


@pytest.mark.parametrize("name", SMUGGLING)
def test_what_two_servers_could_read_differently_is_refused(server: Running, name: str) -> None:
    """One answer, an error, and what follows on the connection is not taken for a request."""
    request = b"POST /tokenize HTTP/1.1\r\n" + HOST + KIND + SMUGGLING[name] + INNER
    statuses = exchange(server, request)
    assert len(statuses) <= 1, statuses
    assert all(400 <= status < 500 for status in statuses), statuses


def test_what_the_standard_lets_be_read_in_one_way_is_read_so(server: Running) -> None:
    """Chunks win over a length, and a folded line belongs to the header before it."""
    for rest in (
        b"content-length: 6\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"x: a\r\n transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n{}",
    ):
        statuses = exchange(server, b"POST /tokenize HTTP/1.1\r\n" + HOST + KIND + rest + INNER)
        # The body is refused; what follows it is the next request, never a part of it.
        assert statuses == [400, 200]


def test_request_lines_and_hosts(server: Running) -> None:
    for line in (
        b"GET http://evil.example/v1/models HTTP/1.1",
        b"GET /v1/models HTTP/1.1\r\nhost: evil.example",
        b"GET //evil.example/v1/models HTTP/1.1",
        b"CONNECT evil.example:443 HTTP/1.1",
        b"TRACE /v1/models HTTP/1.1",
        b"GET /v1/models HTTP/9.9",
        b"GET /v1/models\x00 HTTP/1.1",
        b"G\xc3\x89T /v1/models HTTP/1.1",
        b"GET  /v1/models  HTTP/1.1",
        b"PRI * HTTP/2.0",
        b"GET /" + b"a" * 60_000 + b" HTTP/1.1",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ):
        statuses = exchange(server, line + b"\r\n" + HOST + b"connection: close\r\n\r\n")
        assert all(status < 500 for status in statuses), (line[:60], statuses)
        if b"evil" in line and b"http" not in line:
            assert all(status >= 400 for status in statuses), (line, statuses)


def test_headers_cannot_be_written_into_an_answer(server: Running) -> None:
    for given in ("a\r\nset-cookie: x=1", "a%0d%0aset-cookie:x=1", "é", "a" * 5000, "{}", "a b"):
        data = b"GET /v1/models HTTP/1.1\r\n%sx-request-id: %s\r\nconnection: close\r\n\r\n" % (
            HOST,
            given.encode(),
        )
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
            raw.sendall(data)
            answer = b""
            while piece := raw.recv(65536):
                answer += piece
        head = answer.partition(b"\r\n\r\n")[0].lower()
        assert b"set-cookie" not in head
        assert b"x-request-id: " + given.encode().lower() + b"\r\n" not in head
