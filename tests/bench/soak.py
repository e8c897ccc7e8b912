"""Thousands of short requests over HTTP, cut and broken at random: does anything stay behind?

    python -m tests.bench.soak --requests 20000 --minutes 60

Bounded in count and in time. The server runs a tiny random model in a process of its own. At the
end its memory, file descriptors, threads and KV blocks must be those of the start, and every whole
answer to a prompt must have been the same. Prints figures as JSON; the status is 1 if a promise
was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.reliability.process import Served, served
from tests.server.tiny import write_tiny

NUM_BLOCKS = 128
OPTIONS = (
    *("--num-blocks", str(NUM_BLOCKS), "--max-num-seqs", "16", "--max-num-batched-tokens", "64"),
    *("--max-queue", "64", "--body-timeout", "2"),
)
# Resident memory grows by about 40 MiB in the first thousands of requests (arenas, kernels prepared
# a shape) and then by nothing: a run that is long enough is warm before it is measured.
WARM = 4000
WARM_SLACK_KIB = 16 << 10
COLD_SLACK_KIB = 96 << 10
NUM_PROMPTS = 40
SETTLE_S = 30.0


@dataclass
class Tally:
    """What the clients saw."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    answers: dict[str, str] = field(default_factory=dict)  # of each prompt, the first one seen
    wrong: list[str] = field(default_factory=list)

    def check(self, ok: bool, what: str) -> None:
        if not ok:
            self.wrong.append(what[:4000])

    def same(self, key: str, text: str) -> None:
        """A whole greedy answer: equal to every other one of its prompt."""
        self.check(self.answers.setdefault(key, text) == text, f"another answer to {key}")


class Client:
    """Sends one random request after the other."""

    def __init__(self, server: Served, seed: int, tally: Tally) -> None:
        self._server = server
        self._rng = random.Random(seed)
        self._tally = tally
        prompts = random.Random(0)
        head = [prompts.randrange(256) for _ in range(40)]
        self._prompts = [
            head[: prompts.choice((0, 16, 40))]
            + [prompts.randrange(256) for _ in range(prompts.choice((1, 2, 15, 16, 17, 33, 60)))]
            for _ in range(NUM_PROMPTS)
        ]

    async def one(self, http: httpx.AsyncClient) -> None:
        kinds: dict[Any, int] = {
            self.whole: 6,
            self.streamed: 6,
            self.sampled: 4,
            self.left: 5,
            self.abandoned: 3,
            self.bad: 5,
            self.torn: 2,
            self.late: 1,
            self.tokenized: 1,
        }
        kind = self._rng.choices(list(kinds), list(kinds.values()))[0]
        self._tally.kinds[kind.__name__] += 1
        await kind(http)

    def body(self) -> tuple[str, dict[str, Any]]:
        """A greedy request, and the name under which its answer is known."""
        number = self._rng.randrange(NUM_PROMPTS)
        length = self._rng.choice((1, 4, 9, 24))
        body = {"prompt": self._prompts[number], "max_tokens": length, "temperature": 0}
        return f"{number}/{length}", {**body, "ignore_eos": True}

    async def post(self, http: httpx.AsyncClient, body: Any, *allowed: int) -> httpx.Response:
        answer = await http.post("/v1/completions", json=body)
        self.answered(answer, *allowed)
        return answer

    def answered(self, answer: httpx.Response, *allowed: int) -> None:
        self._tally.statuses[str(answer.status_code)] += 1
        ok = answer.status_code in (*allowed, 429)
        self._tally.check(ok, f"status {answer.status_code}: {answer.text}")
        if answer.status_code == 429:
            self._tally.check("retry-after" in answer.headers, "429 without Retry-After")

    async def whole(self, http: httpx.AsyncClient) -> None:
        key, body = self.body()
        answer = await self.post(http, body, 200)
        if answer.status_code == 200:
            choice = answer.json()["choices"][0]
            self._tally.check(choice["finish_reason"] == "length", "it ended early")
            self._tally.same(key, choice["text"])

    async def streamed(self, http: httpx.AsyncClient, cut: int | None = None) -> None:
        key, body = self.body()
        text, seen, done = "", 0, False
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self.answered(answer, 200)
                return
            self._tally.statuses["200"] += 1
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    seen += 1
                    if seen == cut:
                        return
        self._tally.check(done, "a stream without its end")
        self._tally.same(key, text)

    async def left(self, http: httpx.AsyncClient) -> None:
        """A stream whose reader leaves after some events."""
        await self.streamed(http, cut=self._rng.randrange(1, 6))

    async def abandoned(self, http: httpx.AsyncClient) -> None:
        """A whole answer that nobody waits for."""
        _, body = self.body()
        try:
            async with asyncio.timeout(self._rng.random() * 0.03):
                await self.post(http, {**body, "max_tokens": 200, "n": 2}, 200)
        except TimeoutError:
            self._tally.statuses["abandoned"] += 1

    async def sampled(self, http: httpx.AsyncClient) -> None:
        _, body = self.body()
        rng = self._rng
        body |= {
            "temperature": rng.choice((0.5, 1.3)),
            "top_p": rng.choice((1.0, 0.8)),
            "top_k": rng.choice((0, 20)),
            "n": rng.choice((1, 2, 3)),
            "presence_penalty": rng.choice((0.0, 0.5)),
            "logprobs": rng.choice((None, 2)),
            "stop": rng.choice((None, "a", ["\n", "zz"])),
            "ignore_eos": rng.choice((True, False)),
        }
        answer = await self.post(http, body, 200)
        if answer.status_code == 200:
            self._tally.check(len(answer.json()["choices"]) == body["n"], "a choice is missing")

    async def bad(self, http: httpx.AsyncClient) -> None:
        _, body = self.body()
        wrong: dict[str, Any] = self._rng.choice(
            (
                {"prompt": []},
                {"prompt": [99_999]},
                {"max_tokens": 0},
                {"max_tokens": 10**6},
                {"temperature": -1},
                {"top_p": 0},
                {"n": 1000},
                {"prompt": list(range(200)) * 40},
                {"stop": ["x"] * 99},
                {"logit_bias": {"7": 1e9}},
                {"prompt": {"a": 1}},
            )
        )
        await self.post(http, {**body, **wrong}, 400)

    async def torn(self, http: httpx.AsyncClient) -> None:
        """Half a request, or bytes that are none, on a connection of its own."""
        _, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        data = json.dumps(self.body()[1]).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(data)
        )
        everything = head + data
        pieces = (b"\0\xff" * 50, everything[: self._rng.randrange(len(everything))], everything)
        writer.write(self._rng.choice(pieces))
        await writer.drain()
        writer.transport.abort()

    async def late(self, http: httpx.AsyncClient) -> None:
        """A request with less time than it needs."""
        _, body = self.body()
        await self.post(http, {**body, "max_tokens": 200, "timeout": 0.001}, 408)

    async def tokenized(self, http: httpx.AsyncClient) -> None:
        text = "".join(self._rng.choice("aé\U0001f600\0 <|im_end|>") for _ in range(20))
        answer = await http.post("/tokenize", json={"prompt": text})
        self.answered(answer, 200)
        back = await http.post("/detokenize", json={"tokens": answer.json()["tokens"]})
        self._tally.check(back.json()["prompt"] == text, f"not the same text: {text!r}")


async def load(
    server: Served, seed: int, requests: int, concurrency: int, until: float, tally: Tally
) -> int:
    """Send requests until enough are sent or the time is up; how many were sent."""
    left = requests

    async def worker(number: int, http: httpx.AsyncClient) -> None:
        nonlocal left
        client = Client(server, seed * 1000 + number, tally)
        while left > 0 and time.monotonic() < until:
            left -= 1
            try:
                await client.one(http)
            except httpx.HTTPError as error:
                tally.check(False, f"a connection failed: {error!r}")

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(
        base_url=server.url, limits=limits, timeout=120, trust_env=False
    ) as http:
        await asyncio.gather(*(worker(i, http) for i in range(concurrency)))
    return requests - left


def settle(server: Served) -> dict[str, float]:
    """Wait until nothing runs and no connection is open; what the engine holds then."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        held = {
            "running": server.gauge("infer_num_requests_running"),
            "waiting": server.gauge("infer_num_requests_waiting"),
            "blocks_used": server.gauge('infer_kv_cache_blocks{state="used"'),
            "blocks": server.gauge('infer_kv_cache_blocks{state="free"')
            + server.gauge('infer_kv_cache_blocks{state="cached"'),
        }
        nothing = {"running": 0, "waiting": 0, "blocks_used": 0, "blocks": NUM_BLOCKS}
        if held == nothing or time.monotonic() > deadline:
            return held
        time.sleep(0.1)  # another process: nothing here tells when it is done


def soak(
    folder: Path, *, requests: int, seconds: float, concurrency: int = 24, seed: int = 1
) -> dict[str, Any]:
    """Run a soak; its figures, with ``wrong`` naming every promise that was broken."""
    began = time.monotonic()
    tally = Tally()
    with served(write_tiny(folder / "tiny"), *OPTIONS) as server:
        warm = min(WARM, requests // 2)
        warmed = asyncio.run(load(server, seed, warm, concurrency, began + seconds / 2, tally))
        settle(server)
        before = server.resources()
        start = time.monotonic()
        sent = asyncio.run(load(server, seed + 1, requests, concurrency, began + seconds, tally))
        took = time.monotonic() - start
        held = settle(server)
        after = server.resources()
        while after.descriptors > before.descriptors and time.monotonic() < start + took + SETTLE_S:
            after = server.resources()  # the connection that asked last is just closing
        status = server.stop()
        failures = [line for line in server.log if "Traceback" in line or " ERROR " in line]
    slack = WARM_SLACK_KIB if warmed == WARM else COLD_SLACK_KIB
    grown = after.memory_kib - before.memory_kib
    tally.check(grown <= slack, f"memory grew by {grown} KiB, {slack} are allowed")
    for name in ("descriptors", "threads", "children"):
        now, then = getattr(after, name), getattr(before, name)
        tally.check(now <= then, f"{name}: {then} before, {now} after")
    nothing = {"running": 0, "waiting": 0, "blocks_used": 0, "blocks": NUM_BLOCKS}
    tally.check(held == nothing, f"something is still held: {held}")
    tally.check(status == 0, f"the server ended with status {status}")
    if failures:
        first = server.log.index(failures[0])
        tally.check(False, "the server's log: " + "".join(server.log[first : first + 40]))
    return {
        "requests": sent,
        "requests_to_warm_up": warmed,
        "seconds": round(took, 1),
        "requests_per_s": round(sent / took, 1),
        "kinds": dict(tally.kinds),
        "statuses": dict(tally.statuses),
        "answers_compared": len(tally.answers),
        "before": asdict(before),
        "after": asdict(after),
        "held": held,
        "wrong": tally.wrong,
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000, metavar="N")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="X", help="time limit")
    parser.add_argument("--concurrency", type=int, default=24, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = soak(
            Path(folder),
            requests=args.requests,
            seconds=args.minutes * 60,
            concurrency=args.concurrency,
            seed=args.seed,
        )
    print(json.dumps(figures, indent=2))
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
