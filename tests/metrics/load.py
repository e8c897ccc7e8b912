"""A load on the real server, tiny random model and all, and what its clients counted themselves."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[2]
START_S = 90.0
SERVE = (
    "import argparse, sys; from infer.app import add_serve_arguments, run_serve; "
    "parser = argparse.ArgumentParser(); add_serve_arguments(parser); "
    "sys.exit(run_serve(parser.parse_args()))"
)
LETTERS = [chr(code) for code in range(33, 127)]  # one token each: every token is text at once


def checkpoint(folder: Path) -> Path:
    """A configuration and a tokenizer; the server makes the weights up."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(LETTERS) + 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": len(LETTERS),
        "torch_dtype": "float32",
    }
    vocabulary = {letter: place for place, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return folder


@dataclass
class ClientCount:
    """Counted from what arrived at the clients, by their own clock."""

    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    finishes: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)


class Load:
    """``infer serve`` in a process of its own, and clients in threads of this one."""

    def __init__(self, folder: Path, clients: int = 4) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._base = f"http://127.0.0.1:{port}"
        self.url = f"{self._base}/metrics"
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVE, f"--model={checkpoint(folder / 'tiny')}",
                 "--load-format=random", "--device=cpu", "--dtype=float32", f"--port={port}",
                 "--num-blocks=200", "--max-num-seqs=3", "--served-model-name=tiny"],
                stdout=log, stderr=log, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        try:
            self._wait_until_healthy()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self._count = ClientCount()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._client, args=(seed,)) for seed in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> ClientCount:
        """Send no more, wait for the running requests, and say what was counted."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            self._failures[0].add_note(self._log.read_text()[-2000:])
            raise self._failures[0]
        return self._count

    def abort(self, count: int) -> None:
        """Begin ``count`` requests and leave each after its first token."""
        for _ in range(count):
            body = {**_body("abc", 500), "stream": True}
            with httpx.stream("POST", f"{self._base}/v1/completions", json=body) as answer:
                next(line for line in answer.iter_lines() if line.startswith("data: "))

    def refuse(self, count: int) -> None:
        """Send ``count`` requests that can never run."""
        for _ in range(count):
            answer = httpx.post(f"{self._base}/v1/completions", json=_body("abc", -1))
            assert answer.status_code == 400

    def close(self) -> None:
        try:
            self.stop()
        finally:
            self._process.terminate()
            self._process.wait(30)

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            try:
                if httpx.get(f"{self._base}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)

    def _client(self, seed: int) -> None:
        draw = random.Random(seed)
        shared = "".join(draw.choices(LETTERS, k=64))
        try:
            with httpx.Client(base_url=self._base, timeout=30) as client:
                while not self._stopping.is_set():
                    prompt = shared + "".join(draw.choices(LETTERS, k=draw.randint(1, 100)))
                    self._request(client, prompt, draw.choice([1, 2, 8, 40]))
        except BaseException as error:
            self._failures.append(error)

    def _request(self, client: httpx.Client, prompt: str, tokens: int) -> None:
        body = {**_body(prompt, tokens), "stream": True, "stream_options": {"include_usage": True}}
        times = [time.monotonic()]
        finish, usage = None, {"prompt_tokens": 0, "completion_tokens": 0}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    if choice["text"]:
                        times.append(time.monotonic())
                    finish = choice["finish_reason"] or finish
        gaps = [after - before for before, after in pairwise(times)]
        with self._lock:
            self._count.requests += 1
            self._count.prompt_tokens += usage["prompt_tokens"]
            self._count.tokens += usage["completion_tokens"]
            self._count.finishes[str(finish)] += 1
            self._count.ttft_s.append(gaps[0])
            self._count.inter_token_s += gaps[1:]


def _body(prompt: str, tokens: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "logit_bias": {str(len(LETTERS)): -100},  # no end token: it has no text
    }
