"""The report of ``infer verify``, and its exit status."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from infer.cli import main
from infer.verify.html import as_html
from infer.verify.report import as_json, summary, table
from infer.verify.result import Outcome, not_run
from infer.verify.run import verify
from tests.verify.subjects import subject

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 151,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
ONLY = ("--only", "batched", "--only", "graphs")


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return verify(subject(), only=("transformers", "prefix", "graphs"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


VOID = {"meta", "line", "circle"}


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_html_stands_alone(outcome: Outcome) -> None:
    text = as_html(outcome)
    page = Page()
    page.feed(text)
    assert page.open == [] and page.links == []
    assert "http" not in text
    assert page.count["svg"] == 2, "one plot for every comparison that ran"
    assert page.count["circle"] >= 100
    for row in outcome.rows:
        assert row.title in text
    assert "CUDA Graphs need a GPU" in text


def test_html_escapes_what_it_is_given() -> None:
    row = not_run("x", "<script>", "a & b")
    text = as_html(Outcome(conditions={"model": "<b>"}, rows=(row,)))
    assert "<script>" not in text and "<b>" not in text
    assert "a &amp; b" in text


def test_json_has_everything(outcome: Outcome) -> None:
    found = json.loads(as_json(outcome))
    assert found["passed"] is True
    rows: dict[str, Any] = {row["name"]: row for row in found["rows"]}
    first = rows["transformers"]
    assert first["best_token_agreement"]["equal"] == first["counts"]["positions"] == 351
    assert len(first["relative_l2_by_position"]) == 351
    assert max(first["relative_l2_by_position"]) == first["relative_l2"] <= first["tolerance"]
    assert rows["graphs"]["status"] == "not run" and rows["graphs"]["reasons"]
    for key in ("model", "torch", "transformers", "paths", "device"):
        assert found["conditions"][key]


def test_table_lines_up(outcome: Outcome) -> None:
    lines = table(outcome.rows).splitlines()
    verdict = lines[0].index("verdict")
    assert all(line[verdict:].strip() in ("pass", "fail", "not run") for line in lines[2:]
               if not line.startswith("    "))  # fmt: skip
    assert summary(outcome) == "2 passed, 0 failed, 1 not run"


def test_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = tmp_path / "report.html"
    arguments = ["verify", "--model", str(folder), "--load-format", "random", "--device", "cpu"]
    assert main([*arguments, *ONLY, "--html", str(html)]) == 0
    said = capsys.readouterr()
    assert "1 passed, 0 failed, 1 not run" in said.out
    assert "alone and in a batch: pass" in said.err
    assert html.read_text().startswith("<!doctype html>")
    assert main([*arguments, *ONLY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


def test_command_fails_when_a_row_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("infer.verify.context.AGAINST_OURSELVES", -1.0)
    monkeypatch.setattr("infer.verify.checks.AGAINST_OURSELVES", -1.0)
    arguments = ["verify", "--model", str(folder), "--load-format", "random", "--device", "cpu"]
    assert main([*arguments, *ONLY]) == 1
    assert "exceeds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "nothing"], "there is no comparison 'nothing'"),
        (["--tp", "0"], "tp is 0"),
        (["--model", "no such model"], "there is no model"),
        (["--html", "/nonexistent/report.html"], "cannot write"),
    ],
)
def test_mistakes(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", "qwen3-0.6b", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names[0] == "transformers" and len(names) == len(set(names)) >= 15


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu", "--threads", "1", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["kv-cache"]["counts"] == {"positions with": 71, "positions without": 540}
    assert all(rows[name]["status"] == "pass" for name in ("transformers", "tp", "bf16-torch"))
    assert rows["graphs"]["reasons"] == ["CUDA Graphs need a GPU"]
