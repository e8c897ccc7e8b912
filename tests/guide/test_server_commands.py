"""The guide's commands that need a clone, a server of their own, or Docker."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.guide.snippets import ROOT, blocks

TESTED = (
    *("git clone URL purestep", "cd purestep && make run", "infer serve --port 8000"),
    *("curl ", "infer dashboard --url", "docker compose -f", "infer verify --html report.html"),
)
READY_S = 180
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def environment() -> dict[str, str]:
    """With ``infer`` of this environment first on the path, and no model hub."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"}


@contextmanager
def running(command: str, folder: Path, url: str) -> Iterator[None]:
    """A server, from its first answer until the block ends."""
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: S602 - the guide's own text
            command,
            shell=True,
            cwd=folder,
            env=environment(),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + READY_S
        while not answers(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, f"no answer: {log.read_text()}"
            process_wait(process)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def process_wait(process: subprocess.Popen[bytes]) -> None:
    """Up to a tenth of a second, or until the process ends."""
    try:
        process.wait(0.1)
    except subprocess.TimeoutExpired:
        pass


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def curls() -> list[str]:
    found = [c for block in blocks("sh") for c in block.commands if c.startswith("curl ")]
    assert len(found) >= 3
    return found


def test_from_nothing_to_a_chat(tmp_path: Path) -> None:
    """The two commands, on a clone; the environment is this one instead of a new .venv."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout, so there is nothing to clone")
    clone, change = next(b for b in blocks("sh") if "git clone" in b.text).commands
    command = clone.replace("URL", f"file://{ROOT}")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, capture_output=True)  # noqa: S602
    port = free_port()
    command = f"{change} PY={sys.executable} ARGS='--port {port}'"
    page = f"http://127.0.0.1:{port}"
    with running(command, tmp_path, f"{page}/health"):
        with urllib.request.urlopen(f"{page}/ui/", timeout=60) as answer:
            assert b"<html" in answer.read()
        for curl in curls():
            said = subprocess.run(  # noqa: S602
                curl.replace("127.0.0.1:8000", f"127.0.0.1:{port}"),
                shell=True,
                check=True,
                cwd=tmp_path,
                capture_output=True,
                text=True,
            )
            assert "error" not in said.stdout[:20], said.stdout
            assert said.stdout


def test_server_and_page_apart(tmp_path: Path) -> None:
    serve = next(c for b in blocks("sh") for c in b.commands if c.startswith("infer serve"))
    page = next(c for b in blocks("sh") for c in b.commands if c.startswith("infer dashboard"))
    port, other = free_port(), free_port()
    serve = serve.replace("8000", str(port)) + " --no-dashboard"
    page = page.replace("8000", str(port)).replace("7860", str(other))
    (tmp_path / "page").mkdir()
    with (
        running(serve, tmp_path, f"http://127.0.0.1:{port}/health"),
        running(page, tmp_path / "page", f"http://127.0.0.1:{other}/"),
    ):
        pass


def test_compose_file() -> None:
    command = next(c for b in blocks("sh") for c in b.commands if c.startswith("docker "))
    if shutil.which("docker") is None:
        pytest.skip("Docker is not installed")
    *base, verb, _, one, two = command.split()
    assert (verb, one, two) == ("up", "prometheus", "grafana")
    done = subprocess.run(
        [*base, "config", "--services"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"Docker has no compose: {done.stderr.strip()[:80]}")
    assert {one, two} <= set(done.stdout.split())


def test_whole_verification(tiny: Path, tmp_path: Path) -> None:
    command = next(c for b in blocks("sh") for c in b.commands if "--html" in c)
    done = subprocess.run(  # noqa: S602
        f"{command} --model {tiny}",
        shell=True,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
