"""The guide is true: its snippets and commands run, its links and names exist.

The quick tests run them in this process, with a tiny checkpoint in place of the embedded model.
What needs a clone, a server or Docker is in ``test_server_commands``.
"""

from __future__ import annotations

import argparse
import ast
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from infer.app import add_serve_arguments, serve_plan
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


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_option_files(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(block.text)
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    plan = serve_plan(parser.parse_args(["--config", str(file), "--port", "1234"]))
    assert plan.engine["max_num_seqs"] == 64
    assert plan.server.port == 1234, "the command line wins"


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


# The row of the guide's comparison: that of the measurements.
MEASURED = {
    "a decode step, 1 sequence": "decode ms/step, batch 1",
    "32 sequences": "batch 32",
    "256 sequences": "batch 256",
    "first token of a prompt of 128": "time to first token, 128 tokens, ms",
    "256 requests of 100 to 1,024 tokens in and out": "256 requests offline, output tok/s",
    "from the command to ready, nothing cached": "cold start to ready, s",
}


def _rows(text: str) -> dict[str, list[str]]:
    """Every table row by its first cell; of rows with the same one, the first."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("| "):
            name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows.setdefault(name, cells)
    return rows


def _number(cell: str) -> str:
    return cell.split()[0].strip("*").replace(",", "")


def _rounded(measured: str, shown: str) -> str:
    """``measured`` with as many decimals as ``shown``."""
    return f"{float(measured):.{len(shown.partition('.')[2])}f}"


def test_figures_are_those_that_were_measured() -> None:
    """The newest column of a run on a GPU is in bold; those of the peers come last."""
    guide = _rows((ROOT / "README.md").read_text())
    results = _rows((ROOT / "tests" / "bench" / "RESULTS.md").read_text())
    for row, source in MEASURED.items():
        shown = [_number(cell) for cell in guide[row]]
        cells = results[source]
        newest = next(cell for cell in cells if cell.startswith("**"))
        measured = [_number(cell) for cell in (*cells[-2:], newest)]
        assert shown == [_rounded(m, s) for m, s in zip(measured, shown, strict=True)], row


def test_figures_of_the_cpu_are_those_that_were_measured() -> None:
    text = (ROOT / "README.md").read_text().replace("\n", " ")
    part = text[text.index("Two cores of a Xeon") : text.index("Conditions, misses")]
    shown = re.findall(r"(\d+) (?:tokens|for|ms)|makes (\d+)|of (\d+)\.", part)
    numbers = [next(filter(None, found)) for found in shown]
    results = _rows((ROOT / "tests" / "bench" / "RESULTS.md").read_text())
    rows = ("1 request, decode, tok/s", "16 requests, decode, tok/s", "first token, 1 request, ms")
    newest = slice(2, 4)  # ours, and that of transformers in the same run
    assert numbers == [f"{float(_number(c)):.0f}" for row in rows for c in results[row][newest]]
