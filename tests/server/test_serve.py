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
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from infer import loadgen
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


def start(*options: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
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
def serving(*options: str, **environment: str) -> Iterator[Server]:
    process = start("--port", "0", *options, **environment)
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
        *("--device", "cpu", "--threads", "1", "--num-blocks", "64"),
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
        code, log = server.stop()
        assert code == 0, log
        assert log.count("path=/v1/completions") == 2
        assert "hello" not in log


def test_a_stop_lets_the_running_request_finish(tiny: Path) -> None:
    with serving(*small(tiny)) as server:
        body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, trust_env=False, timeout=60) as answer:
            events = answer.iter_lines()
            next(events)
            server.process.send_signal(signal.SIGTERM)
            *_, last = [line for line in events if line]
            assert last == "data: [DONE]"
        assert server.stop()[0] == 0


def test_the_key_comes_from_the_environment(tiny: Path) -> None:
    with serving(*small(tiny), PURESTEP_API_KEY="a-key-from-the-environment") as server:
        assert "with the API key" in server.banner
        assert "a-key-from" not in server.banner
        url = f"{server.url}/v1/models"
        assert httpx.get(url, trust_env=False).status_code == 401
        headers = {"authorization": "Bearer a-key-from-the-environment"}
        assert httpx.get(url, headers=headers, trust_env=False).status_code == 200


def test_options_from_a_file_give_way_to_the_command_line(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        f'[load]\nmodel = "{tiny}"\nload_format = "random"\ndtype = "float32"\n'
        "[engine]\nnum_blocks = 32\nmax_num_seqs = 4\n"
        '[server]\nserved_model_name = ["from-file"]\n'
    )
    with serving("--config", str(file), "--num-blocks", "48", "--device", "cpu") as server:
        assert "48 blocks" in server.banner
        assert "4 sequences at once" in server.banner
        models = httpx.get(f"{server.url}/v1/models", trust_env=False).json()
        assert [m["id"] for m in models["data"]] == ["from-file"]


def bad(*options: str) -> tuple[int, str]:
    process = start(*options)
    _, text = process.communicate(timeout=60)
    return process.returncode, text


def test_mistakes_end_in_one_line(tiny: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[engine]\nmax_num_sequences = 5\n")
    typed = tmp_path / "typed.toml"
    typed.write_text('[server]\nport = "80"\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (("--host", "0.0.0.0"), "API key"),
            (("--port", "70000"), "65535"),
            ((*small(tiny), "--port", port), "cannot listen"),
            (("--model", str(tmp_path / "none"), "--port", "0"), "there is no model"),
            (("--config", str(wrong)), "max_num_sequences"),
            (("--config", str(typed)), "port is '80'"),
            (("--config", str(tmp_path / "no.toml")), "cannot read"),
        ]
        for options, message in cases:
            code, text = bad(*options)
            assert code in (1, 2), text
            assert message in text
            assert "Traceback" not in text
            assert len(text.strip().splitlines()) == 1, text


def load(server: Server, *options: str) -> tuple[int, argparse.Namespace]:
    parser = argparse.ArgumentParser()
    loadgen.add_load_arguments(parser)
    args = parser.parse_args(
        ["--url", server.url, "--vocab", "200", "--input-tokens", "20", *options]
    )
    return loadgen.run_load(args), args


def test_load_generator(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"at": 0.02 * i, "input_tokens": 5 + i, "output_tokens": 3} for i in range(6)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    common = ("--output-tokens", "6", "--requests", "9", "--slo", "ttft=60,tpot=60")
    with serving(*small(tiny)) as server:
        for options, requests, tokens in (
            (("--concurrency", "3"), 9, 54),
            (("--rate", "200"), 9, 54),
            (("--trace", str(trace)), 6, 18),
        ):
            capsys.readouterr()
            status, _ = load(server, *common, *options, "--json", "-")
            report = json.loads(capsys.readouterr().out)
            assert status == 0
            assert report["requests"] == requests
            assert report["failed"] == 0
            assert report["output_tokens"] == tokens
            assert report["slo_kept"] == 1
            for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
                values = report[name]
                assert 0 < values["p50"] <= values["p90"] <= values["p99"] <= values["max"]
            assert report["e2e_ms"]["p50"] >= report["ttft_ms"]["p50"]
        status, _ = load(server, *common, "--output-tokens", "5000")
        assert status == 1
        assert "max_model_len" in capsys.readouterr().out


def test_the_load_generator_stays_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server.__new__(Server)
    for url in ("http://example.com", "ftp://127.0.0.1", "http://10.0.0.1:8000"):
        server.url = url
        assert load(server)[0] == 2
    assert "--allow-remote" in capsys.readouterr().err


def test_percentiles_are_those_of_numpy() -> None:
    import numpy as np

    values = [0.5, 0.1, 0.9, 0.3, 0.2, 0.7, 1.5]
    shown = loadgen.percentiles(values)
    for p in loadgen.PERCENTILES:
        assert shown[f"p{p}"] == pytest.approx(float(np.percentile(values, p)) * 1e3, abs=1e-3)
    assert loadgen.percentiles([]) == {}
