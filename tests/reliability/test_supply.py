"""What the code may load, what it is built from, and whom it talks to."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.reliability.process import ROOT

PACKAGES = ("infer", "metrics", "dashboard")
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal"}
FORBIDDEN_IMPORTS |= {"shelve", "telnetlib", "ftplib", "smtplib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "torch.package",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "numpy.fromregex",
}
# These send or take pickles between ranks.
FORBIDDEN_ENDINGS = (
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
LOOPBACK = {"'127.0.0.1'", "'::1'", "'localhost'", "b'127.0.0.1'", "'unix'", "''", "None"}


def findings(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of everything in ``source`` that could run what a file or a peer brought."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.split(".")[0] in FORBIDDEN_IMPORTS:
                        yield node.lineno, alias.name
            case ast.ImportFrom(module=str(module)):
                if module.split(".")[0] in FORBIDDEN_IMPORTS:
                    yield node.lineno, module
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                yield node.lineno, name
            case ast.Call(func=ast.Attribute() as called):
                text = ast.unparse(called)
                if text in FORBIDDEN_METHODS or text.endswith(FORBIDDEN_ENDINGS):
                    yield node.lineno, text
            case ast.keyword(arg="allow_pickle" | "trust_remote_code" | "shell" as name, value=v):
                if not (isinstance(v, ast.Constant) and v.value is False):
                    yield v.lineno, f"{name}={ast.unparse(v)}"
            case ast.Constant(value="auto_map"):
                yield node.lineno, "auto_map"


def test_nothing_is_unpickled_evaluated_or_taken_from_a_checkpoints_code() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {what}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, what in findings(path.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "np.load(f, allow_pickle=True)",
        "load(f, trust_remote_code=given)",
        "config.get('auto_map')",
        "dist.broadcast_object_list(x)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(findings(source))


def pins() -> dict[str, str]:
    lines = (ROOT / "configs/constraints.txt").read_text().splitlines()
    found = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        name, exact, number = line.partition("==")
        assert exact and re.fullmatch(r"[0-9][\w.]*", number), f"not an exact version: {line}"
        found[name.lower()] = number
    return found


def test_every_direct_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[<>=!~;\[ ]", text)[0].lower() for text in asked}
    assert len(names) > 20
    assert not names - pins().keys()
    makefile = (ROOT / "Makefile").read_text()
    assert "-c $(VENV)/constraints.txt" in makefile
    assert re.search(r"^audit:.*\n\t.*pip_audit", makefile, re.MULTILINE)


@pytest.mark.skipif(
    not Path(sys.prefix, ".purestep-setup").exists(), reason="an environment of one's own"
)
def test_the_pinned_versions_are_those_that_run() -> None:
    assert {n: v for n, v in pins().items() if version(n).partition("+")[0] != v} == {}


def audited(file: Path) -> dict[str, str]:
    """An environment that notes every address, and that does not forbid the network."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HF_HUB_OFFLINE", "GRADIO_ANALYTICS_ENABLED")
    }
    path = os.pathsep.join((str(ROOT / "tests/reliability/audited"), str(ROOT)))
    return {**kept, "PYTHONPATH": path, "AUDIT_FILE": str(file)}


def addresses(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def foreign(noted: list[str]) -> list[str]:
    return [line for line in noted if line.partition(" ")[2] not in LOOPBACK]


def test_generate_talks_to_nobody(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "addresses"
    command = [
        *(sys.executable, "-m", "infer.cli", "generate", "--prompt", "hello", "--model", str(tiny)),
        *("--load-format", "random", "--device", "cpu", "--threads", "1", "--max-tokens", "3"),
    ]
    done = subprocess.run(
        command, env=audited(file), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert foreign(addresses(file)) == []


def test_the_hook_sees_what_it_looks_for(tmp_path: Path) -> None:
    file = tmp_path / "addresses"
    code = (
        "import socket\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "s.connect(('127.0.0.1', 9)); s.connect(('192.0.2.1', 9))\n"  # no packet is sent
    )
    subprocess.run([sys.executable, "-c", code], env=audited(file), check=False)
    assert foreign(addresses(file)) == ["socket.connect '192.0.2.1'"]
