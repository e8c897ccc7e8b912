"""The server with its page, as people run it: whom it talks to, and which files it gives away."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.reliability.process import ROOT, Served, served
from tests.reliability.test_supply import addresses, audited, foreign

SECRETS = ("root:x:", "[build-system]", "purestep-secret-file")


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "addresses"


@pytest.fixture(scope="module")
def server(tiny: Path, notes: Path) -> Iterator[Served]:
    options = ("--num-blocks", "64", "--engine-process")
    with served(tiny, *options, page=True, env=audited(notes)) as running:
        yield running


def get(server: Served, target: str, method: str = "GET") -> tuple[int, str]:
    """Status and answer to a request line sent as it is: clients would tidy the path up."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
        line = f"{method} {target} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\n"
        raw.sendall((line + "connection: close\r\ncontent-length: 0\r\n\r\n").encode("latin-1"))
        data = b""
        while piece := raw.recv(65536):
            data += piece
    return int(data.split()[1]), data.decode("latin-1")


def targets(file: Path, port: int) -> list[str]:
    """Ways to ask for files and addresses that the page has no business with."""
    up = ("..", "%2e%2e", "..%2f..", "%2e%2e%2f", "....//", "..\\..", "%252e%252e", "..;")
    made = [f"{base}{'/'.join([step] * 8)}/etc/passwd" for step in up for base in BASES]
    for absolute in (str(file), "/etc/passwd", str(ROOT / "pyproject.toml"), "pyproject.toml"):
        for base in ("/ui/", "/ui/gradio_api/", "/"):
            made += [f"{base}file={absolute}", f"{base}file/{absolute}", f"{base}file=//{absolute}"]
            made += [f"{base}file=file://{absolute}", f"{base}file={absolute}%00.png"]
    for base in ("/ui/", "/ui/gradio_api/"):
        for address in (f"http://127.0.0.1:{port}/v1/models", "https://host.invalid/"):
            made += [f"{base}proxy={address}", f"{base}file={address}", f"{base}file/{address}"]
        made += [f"{base}stream/x/1/{file}"]
        made += [f"{base}custom_component/x/client/component/../../{file}"]
    return made


BASES = ("/ui/", "/ui/static/", "/ui/assets/", "/ui/gradio_api/file=", "/ui/svelte/", "/", "/v1/")


def test_no_file_of_the_machine_is_given_away(server: Served, tmp_path: Path) -> None:
    file = tmp_path / "secret.txt"
    file.write_text(SECRETS[2])
    assert get(server, "/ui/")[0] == 200
    asked = targets(file, server.port)
    assert len(asked) > 100
    for target in asked:
        status, answer = get(server, target)
        assert status < 500, target
        assert not any(secret in answer for secret in SECRETS), target
        assert '"object":"list"' not in answer, f"{target} was fetched for the caller"
    assert get(server, "/ui/gradio_api/upload", "POST")[0] == 404


def test_the_server_and_its_page_talk_to_nobody(server: Served, notes: Path) -> None:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        assert http.get("/ui/").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}).is_success
    noted = addresses(notes)
    assert any("socket.bind '127.0.0.1'" in line for line in noted)
    assert foreign(noted) == []


def test_the_page_names_no_other_host(server: Served) -> None:
    page = httpx.get(f"{server.url}/ui/", trust_env=False, timeout=60)
    policy = page.headers["content-security-policy"]
    assert "http" not in policy
    assert "default-src 'self'" in policy
