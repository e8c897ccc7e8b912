"""``infer serve`` as a process of its own, and what the system says about it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
READY_S = 120.0


@dataclass(frozen=True)
class Resources:
    """What a process holds."""

    memory_kib: int  # resident and its own: shared pages of files are left out
    descriptors: int
    threads: int
    children: int


@dataclass
class Served:
    """A server that answers."""

    process: subprocess.Popen[str]
    url: str
    log: list[str] = field(repr=False)  # what it has written so far

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def resources(self) -> Resources:
        """Of the server's own process. Linux only."""
        home = Path(f"/proc/{self.process.pid}")
        status = dict(
            line.split(":", 1) for line in (home / "status").read_text().splitlines() if ":" in line
        )
        return Resources(
            memory_kib=int(status["RssAnon"].split()[0]),
            descriptors=len(list((home / "fd").iterdir())),
            threads=int(status["Threads"]),
            children=sum(len(f.read_text().split()) for f in home.glob("task/*/children")),
        )

    def gauge(self, name: str) -> float:
        """A metric's value; ``name`` may go on with a brace and one ``label="value"``."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=30).text
        family, _, label = name.partition("{")
        (line,) = [
            line
            for line in text.splitlines()
            if line.startswith(family + "{") and label in line.rpartition("}")[0]
        ]
        return float(line.rpartition(" ")[2])

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Signal the server and wait for its end; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextmanager
def served(
    tiny: Path, *options: str, page: bool = False, env: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Serve a tiny random model on a free port until the block ends; killed if it still runs.

    ``env`` replaces the environment.
    """
    command = [
        *(sys.executable, "-m", "infer.cli", "serve", "--model", str(tiny), "--port", "0"),
        *("--load-format", "random", "--dtype", "float32", "--device", "cpu", "--threads", "1"),
        *(() if page else ("--no-dashboard",)),
        *options,
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)} if env is None else env,
    )
    log: list[str] = []
    ready = threading.Event()

    def read() -> None:  # to the end: a full pipe would hold the server up
        assert process.stderr is not None
        for line in process.stderr:
            log.append(line)
            if line.strip().startswith("chat" if page else "metrics"):
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(READY_S), "the server does not get ready"
        found = re.search(r"API\s+(http://\S+)/v1", "".join(log))
        assert found, "".join(log)
        yield Served(process, found.group(1), log)
    finally:
        process.kill()
        process.wait()
        reader.join(10)
        assert process.stderr is not None
        process.stderr.close()
