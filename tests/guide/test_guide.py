"""The guide is true: its snippets and commands run, its links and names exist.

The quick tests run them in this process, with a tiny checkpoint in place of the embedded model.
What needs a clone, a server or Docker is in ``test_server_commands``.
"""

from __future__ import annotations

import ast
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from infer.cli import COMMANDS, main
from tests.guide.snippets import GUIDE, ROOT, Block, blocks, links

ELSEWHERE = (
    "git ",
    "cd ",
    "curl ",
    "docker ",
    "infer serve",
    "infer dashboard",
    "infer verify --html",
)
PICTURES = (".png",)


@pytest.fixture(autouse=True)
def _on_the_tiny_model(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("infer.loading.DEFAULT", str(tiny))
    monkeypatch.chdir(tmp_path)


def command_blocks() -> list[Block]:
    return [b for b in blocks("sh") if not all(c.startswith(ELSEWHERE) for c in b.commands)]


def run(command: str) -> None:
    """An ``infer`` command or an example, in this process."""
    name, *arguments = shlex.split(command)
    if name == "infer":
        assert main(arguments) == 0, command
        return
    assert name == "python", command
    script = ROOT / arguments[0]
    before = sys.argv
    sys.argv = [str(script), *arguments[1:]]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before


@pytest.mark.parametrize("block", command_blocks(), ids=str)
def test_commands(block: Block) -> None:
    for command in block.commands:
        if not command.startswith(ELSEWHERE):
            run(command)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_snippets(block: Block) -> None:
    code = compile(block.text, str(block), "exec")
    exec(code, {"__name__": "__main__"})  # noqa: S102


def test_nothing_is_left_out() -> None:
    """Every shell block is run by a test: here, or by name in ``test_server_commands``."""
    from tests.guide.test_server_commands import TESTED

    missing = [
        command
        for block in blocks("sh")
        for command in block.commands
        if command.startswith(ELSEWHERE) and not command.startswith(TESTED)
    ]
    assert not missing


def test_every_command_is_named() -> None:
    text = "".join(page.read_text() for page in GUIDE)
    left_out = {"bench", "bench-serve"}  # measurements, which `make help` names
    assert {name for name in COMMANDS if f"infer {name}" not in text} <= left_out


def test_links_lead_somewhere() -> None:
    for page, text, target in links():
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if found.suffix in PICTURES:
            continue
        assert found.exists(), f"{page.relative_to(ROOT)}: {target}"
        if anchor:
            titles = [
                line.lstrip("# ").strip().lower().replace(" ", "-").replace(",", "")
                for line in found.read_text().splitlines()
                if line.startswith("#")
            ]
            assert anchor in titles, f"{target}: {titles}"
        if text.startswith("`") and found.suffix == ".py":
            assert _defines(found, text.strip("`")), f"{found} does not define {text}"


def test_pictures_are_there() -> None:
    missing = [
        str(target)
        for page, _, target in links()
        if target.endswith(PICTURES) and not (page.parent / target).exists()
    ]
    if missing:
        pytest.skip(f"not taken yet (make screenshots): {', '.join(missing)}")


def _defines(path: Path, name: str) -> bool:
    """Whether a module defines ``name``, which may be ``Class.method``."""
    body = ast.parse(path.read_text()).body
    for part in name.split("."):
        found = None
        for node in body:
            names = [getattr(node, "name", None)]
            names += [getattr(t, "id", None) for t in getattr(node, "targets", [])]
            if part in names:
                found = node
        if found is None:
            return False
        body = getattr(found, "body", [])
    return True


def test_the_eight_steps_are_eight() -> None:
    text = (ROOT / "infer" / "README.md").read_text()
    part = text[text.index("in eight steps") : text.index("## Adding an architecture")]
    numbers = [line.split(".")[0] for line in part.splitlines() if line[:1].isdigit()]
    assert numbers == [str(i) for i in range(1, 9)]
