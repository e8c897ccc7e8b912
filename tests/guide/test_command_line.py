"""Mistakes on the command line end in one line that names them, before anything is loaded."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest
from fastapi import FastAPI

from infer.app import _answer
from infer.cli import main
from infer.server.config import ServerConfig


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on standard error of a command that ends with status 2."""
    try:
        status = main(arguments)
    except SystemExit as end:
        status = int(str(end.code))
    out, line = capsys.readouterr()
    assert status == 2 and not out
    assert line.startswith("error: ") and line.count("\n") == 1, line
    return line


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ("COMMAND", "infer --help")),
        (("nosuch",), ("'nosuch'", "'generate'")),
        (("generate", "--max-tokens", "x"), ("'x'", "infer generate --help")),
        (("generate", "--nosuch"), ("--nosuch", "infer generate --help")),
        (("bench", "decode", "nosuch"), ("'nosuch'", "choose start, decode")),
        (("bench", "--profile-batch", "4"), ("profile_batch", "--profile DIR")),
        (("bench", "--profile", "x", "--profile-batch", "0"), ("profile_batch is 0", "1")),
        (("bench", "serve", "--slo", "fast"), ("'fast'", "ttft=0.5")),
        (("bench", "serve", "--concurrency", "0"), ("concurrency is 0", "at least 1")),
        (("bench", "serve", "--warmup", "-1"), ("warmup is -1", "at least 0")),
        (("bench", "serve", "--timeout", "0"), ("timeout is 0", "above 0")),
        (("bench", "serve", "--trace", "nosuch"), ("cannot read nosuch", "No such file")),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...],
    parts: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loads(*_: object) -> None:
        pytest.fail("a model was loaded before the mistake was told")

    monkeypatch.setattr("infer.llm.LLM", loads)
    line = complaint(capsys, *arguments)
    assert all(part in line for part in parts), line


def test_one_command_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert "bench-serve" not in complaint(capsys, "nosuch")
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "serve", "--help"])
    assert "--concurrency" in capsys.readouterr().out


def test_more_threads_than_processors(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    most = os.cpu_count()
    assert most is not None
    arguments = ("generate", "--model", str(tiny), "--prompt", "a", "--threads", str(most + 1))
    line = complaint(capsys, *arguments)
    assert f"threads is {most + 1}" in line and f"at most {most}" in line


def test_a_conversation_has_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Several would be written into each other."""
    for option in ("--n", "--logprobs", "--prompt-logprobs"):
        assert option in complaint(capsys, "chat", option, "2")


def test_ctrl_c_while_a_command_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("infer.cli.import_module", interrupted)
    assert main(["serve"]) == 130
    assert capsys.readouterr() == ("", "")


TRACE = {"event": "trace", "format": 1, "model": "tiny"}
ENGINE = {"num_blocks": 4, "block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 4}
HEAD = {**TRACE, "load": {"dtype": "float32", "device": "cpu"}, "engine": ENGINE}


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (["{}"], ("line 1", "not an event")),
        ([json.dumps(HEAD), '{"event": "sub'], ("line 2", "not JSON", "cut off")),
        ([json.dumps(TRACE)], ("damaged", "load")),
        ([json.dumps(HEAD), '{"event": "scheduled", "step": 0}'], ("damaged", "sequences")),
    ],
)
def test_damaged_traces(
    lines: list[str], parts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    line = complaint(capsys, "trace", "view", str(path))
    assert str(path) in line
    assert all(part in line for part in parts), line


def test_a_step_that_a_trace_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    assert main(["trace", "--case", "walk-a", "--out", str(path)]) == 0
    line = complaint(capsys, "trace", "view", str(path), "--step", "99")
    assert "step is 99" in line and "0 to 2" in line


def test_comparisons_are_listed_with_their_titles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--list"]) == 0
    for line in capsys.readouterr().out.splitlines():
        name, _, title = line.partition("  ")
        assert " " not in name and title.strip(), line


def test_ctrl_c_while_the_pages_are_mounted(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio cancels the task then; the server's start must not be what finds out."""
    config = ServerConfig(port=0)

    async def answer() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await _answer(FastAPI(), None, config, listener, "")  # type: ignore[arg-type]

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(answer())
    assert "Traceback" not in caplog.text
