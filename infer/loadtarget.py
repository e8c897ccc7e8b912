"""A server started for one load: how soon it is ready and what it takes while idle."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import httpx

from infer.errors import ConfigError

READY_S = 600.0
STOP_S = 60.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedServer:
    """A server that answers, and what its start took."""

    url: str
    ready_s: float  # from the start of the process to its first healthy answer
    idle_mib: float  # memory of its processes at that moment

    def figures(self) -> dict[str, float]:
        """For a report."""
        return {"ready_s": round(self.ready_s, 3), "idle_mib": round(self.idle_mib, 1)}


@contextmanager
def started_server(options: str, api_key: str | None = None) -> Iterator[StartedServer]:
    """Run ``infer serve OPTIONS`` on a free port, until the block ends.

    Raises:
        ConfigError: it ended before it was ready, or was not ready in ten minutes.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "infer.cli", "serve", *shlex.split(options)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--api-key", api_key] if api_key else []
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as log:
        began = time.monotonic()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait(process, url, began, log)
            ready_s = time.monotonic() - began
            yield StartedServer(url=url, ready_s=ready_s, idle_mib=tree_mib(process.pid))
        finally:
            _end(process)


def _wait(process: subprocess.Popen[bytes], url: str, began: float, log: TextIO) -> None:
    with httpx.Client(base_url=url, trust_env=False, timeout=5) as http:
        while time.monotonic() - began < READY_S:
            if process.poll() is not None:
                raise ConfigError(f"the server did not start: {_last_line(log)}")
            try:
                if http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(POLL_S)
    raise ConfigError(f"the server was not ready after {READY_S:.0f} s: {_last_line(log)}")


def _last_line(log: TextIO) -> str:
    log.seek(0)
    lines = log.read().strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tree_mib(pid: int) -> float:
    """Memory of a process and its descendants in MiB; pages they share count once. Linux only."""
    total = 0
    for member in _tree(pid):
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:
            continue  # it has just ended
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def _tree(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            parent = int(
                (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            )
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found
