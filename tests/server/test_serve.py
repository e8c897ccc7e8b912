"""``infer serve`` as people run it: a process, its banner, its signals, and load from outside."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import httpx
import pytest

from infer import loadgen, loadreport
from infer.app import LoadOptions, ServePlan, add_serve_arguments, run_serve, serve_plan
from infer.config import EngineConfig
from infer.server.config import ServerConfig
from tests.server import harness
from tests.server.tiny import write_tiny

ROOT = Path(__file__).resolve().parents[2]
MAIN = (
    "import argparse, sys\n"
    "from infer.app import add_serve_arguments, run_serve\n"
    "parser = argparse.ArgumentParser()\n"
    "add_serve_arguments(parser)\n"
    "sys.exit(run_serve(parser.parse_args()))\n"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


def start(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    banner: str

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Signal the server; its exit status and what else it wrote."""
        self.process.send_signal(number)
        _, rest = self.process.communicate(timeout=60)
        return self.process.returncode, rest


@contextmanager
def serving(*options: str) -> Iterator[Server]:
    process = start("--port", "0", *options)
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if "metrics" in line:
                break
        banner = "".join(lines)
        found = re.search(r"API\s+(http://\S+)/v1", banner)
        assert found, banner
        yield Server(process, found.group(1), banner)
    finally:
        process.kill()
        process.communicate()


def small(tiny: Path) -> tuple[str, ...]:
    return (
        *("--model", str(tiny), "--load-format", "random", "--dtype", "float32"),
        *("--device", "cpu", "--threads", "1", "--num-blocks", "64", "--no-dashboard"),
    )


@pytest.mark.parametrize("engine", ["--no-engine-process", "--engine-process"])
def test_serve_answers_and_stops(tiny: Path, engine: str) -> None:
    with serving(*small(tiny), engine, "--served-model-name", "tiny") as server:
        assert "64 blocks of 16, 1024 tokens" in server.banner
        assert "no key needed" in server.banner
        body = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        with httpx.Client(base_url=server.url, trust_env=False) as http:
            assert http.get("/health").json() == {"status": "ok"}
            first = http.post("/v1/completions", json={"model": "tiny", **body}).json()
            assert first["usage"]["completion_tokens"] == 8
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            assert http.post("/v1/chat/completions", json=chat).status_code == 200
            too_long = http.post("/v1/completions", json={**body, "max_tokens": 4000})
            assert too_long.status_code == 400
            assert "max_model_len" in too_long.json()["error"]["message"]
            metrics = http.get("/metrics").text
            assert "infer_request_success_total" in metrics
            assert 'handler="/v1/completions"' in metrics
        # A stop lets the running request finish.
        long = {**body, "max_tokens": 200, "stream": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=long, trust_env=False, timeout=60) as answer:
            events = answer.iter_lines()
            next(events)
            server.process.send_signal(signal.SIGTERM)
            *_, last = [line for line in events if line]
            assert last == "data: [DONE]"
        code, log = server.stop()
        assert code == 0, log
        assert log.count("path=/v1/completions") == 3
        assert "hello" not in log


def plan(*options: str) -> ServePlan:
    return serve_plan(arguments(*options))


def arguments(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return parser.parse_args(options)


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURESTEP_API_KEY", "a-key-from-the-environment")
    assert plan().server.api_key == "a-key-from-the-environment"
    assert plan("--api-key", "another-key").server.api_key == "another-key"
    monkeypatch.delenv("PURESTEP_API_KEY")
    assert plan().server.api_key is None


def test_options_from_a_file_give_way_to_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        '[load]\nmodel = "qwen3-0.6b"\ndtype = "float32"\n'
        "[engine]\nnum_blocks = 32\nmax_num_seqs = 4\ncuda_graphs = false\n"
        '[server]\nserved_model_name = ["from-file"]\nrequest_timeout = 5\n'
    )
    made = plan("--config", str(file), "--num-blocks", "48", "--dtype", "auto", "--no-compile")
    assert made.load.model == "qwen3-0.6b"
    assert made.load.dtype == "auto"
    assert made.engine == {
        "num_blocks": 48,
        "max_num_seqs": 4,
        "cuda_graphs": False,
        "compile": False,
    }
    assert made.server.served_model_name == ("from-file",)
    assert made.server.request_timeout == 5


def test_every_option_can_be_given() -> None:
    """Each field of the three option classes has its flag, and its default is the class's own."""
    made = plan()
    assert made.server == ServerConfig()
    assert made.load == LoadOptions()
    assert made.engine == {}
    flags = set(vars(arguments("--config", "x"))) | {
        name for name, action in _actions().items() if action.help
    }
    for kind in (EngineConfig, ServerConfig, LoadOptions):
        assert {f.name for f in fields(kind)} <= flags


def _actions() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return {action.dest: action for action in parser._actions}


def test_mistakes_end_in_one_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[engine]\nmax_num_sequences = 5\n")
    typed = tmp_path / "typed.toml"
    typed.write_text('[server]\nport = "80"\n')
    table = tmp_path / "table.toml"
    table.write_text("port = 80\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (("--host", "0.0.0.0"), "API key"),
            (("--port", "70000"), "65535"),
            (("--max-queue", "-1"), "max_queue"),
            (("--num-blocks", "0"), "num_blocks"),
            ((*small(tiny), "--port", port), "cannot listen"),
            (("--model", str(tmp_path / "none"), "--port", "0"), "there is no model"),
            ((*small(tiny), "--port", "0", "--max-model-len", "9999"), "max_model_len"),
            (("--config", str(wrong)), "max_num_sequences"),
            (("--config", str(typed)), "port is '80'"),
            (("--config", str(table)), "'port' is not one of the tables"),
            (("--config", str(tmp_path / "no.toml")), "cannot read"),
        ]
        for options, message in cases:
            assert run_serve(arguments(*options)) in (1, 2)
            text = capsys.readouterr().err
            assert message in text
            assert text.startswith("error: ")
            assert len(text.strip().splitlines()) == 1, text


def load(url: str, *options: str) -> int:
    parser = argparse.ArgumentParser()
    loadgen.add_load_arguments(parser)
    given = ("--url", url, "--vocab", "200", "--input-tokens", "20", *options)
    return loadgen.run_load(parser.parse_args(given))


def test_load_generator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"at": 0.02 * i, "input_tokens": 5 + i, "output_tokens": 3} for i in range(6)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    common = ("--output-tokens", "6", "--requests", "9", "--slo", "ttft=60,tpot=60")
    with harness.serving() as server:
        for options, requests, tokens in (
            (("--concurrency", "3"), 9, 54),
            (("--rate", "200"), 9, 54),
            (("--trace", str(trace)), 6, 18),
        ):
            capsys.readouterr()
            status = load(server.url, *common, *options, "--json", "-")
            report = json.loads(capsys.readouterr().out)
            assert status == 0
            assert report["requests"] == requests
            assert report["failed"] == 0
            assert report["output_tokens"] == tokens
            assert report["slo_kept"] == 1
            for name in ("ttft_ms", "e2e_ms"):
                values = report[name]
                assert 0 < values["p50"] <= values["p90"] <= values["p99"] <= values["max"]
            assert report["e2e_ms"]["p50"] >= report["ttft_ms"]["p50"]
        assert load(server.url, *common, "--input-tokens", "5000") == 1
        assert "the prompt is longer" in capsys.readouterr().out
        assert load(server.url, *common, "--slo", "ttft=0") == 0
        assert "goodput 0.00" in capsys.readouterr().out


def test_the_load_generator_stays_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("http://example.com", "ftp://127.0.0.1", "http://10.0.0.1:8000"):
        assert load(url) == 2
    assert "--allow-remote" in capsys.readouterr().err


def test_percentiles_are_those_of_numpy() -> None:
    import numpy as np

    values = [0.5, 0.1, 0.9, 0.3, 0.2, 0.7, 1.5]
    shown = loadreport.percentiles(values)
    for p in loadreport.PERCENTILES:
        assert shown[f"p{p}"] == pytest.approx(float(np.percentile(values, p)) * 1e3, abs=1e-3)
    assert loadreport.percentiles([]) == {}
