"""An OpenAI-shaped engine with scripted answers, slow on demand, that knows what it still runs."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from dashboard.insight import Insight, insight_routes
from dashboard.lessons import Walk, tiny_model
from dashboard.recorder import StepRecorder
from dashboard.scenarios import PREEMPTION
from infer.types import EngineInfo
from metrics.reader import History, Latency, Reading

MAX_LEN = 2048
INFO = EngineInfo(
    model_name="fake-model",
    architecture="llama",
    device="cpu",
    dtype="float32",
    attention_backend="torch",
    max_model_len=MAX_LEN,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    block_size=16,
    num_blocks=512,
    kv_bytes_per_token=46_080,
    weight_bytes=269_000_000,
    vocab_size=49_152,
    tp_size=1,
    pipeline_depth=0,
    compiled=False,
    versions={"python": "3.11", "torch": "2.13"},
    config={"num_layers": 30, "hidden_size": 576, "num_heads": 9, "num_kv_heads": 3,
            "head_dim": 64, "intermediate_size": 1536, "tie_word_embeddings": True},
)  # fmt: skip

HOSTILE = (
    "Look: <script>window.hacked = true</script> "
    '<img src="http://198.51.100.7/leak.png" onerror="window.hacked = true"> '
    "![leak](http://198.51.100.7/leak2.png) "
    '<a href="javascript:window.hacked=true">click</a> done.'
)
WIDE = (
    f"| {' | '.join('abcdefgh')} |\n{'|---' * 8}|\n| {' | '.join(['x' * 20] * 8)} |\n\n"
    f"```\n{'code ' * 80}\n```\n\n$$a = {' + '.join(['b' * 30] * 5)}$$\n\n- [x] done\n"
)
TAGS = (
    "A <div style='position:fixed;inset:0'>, a vector<int>, <your name>, </p>.\n\n"
    "#include <stdio.h>\n\n<section>\n<Custom-Tag a='1'/>\n</section>\n\n"
    "Code `<b>` and:\n\n```html\n<p>one</p>\n```\n\nThe end."
)
RICH = (
    "# Heading\n\nSome **bold** text, `code`, and math: $$e^{i\\pi} + 1 = 0$$ and \\(a^2\\).\n\n"
    "```python\ndef step(model, state):\n    return state\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
)


@dataclass
class FakeEngine:
    """The application's state. ``running`` is the number of answers being streamed."""

    token_s: float = 0.01
    running: int = 0
    full: bool = False
    readings: int = 0  # of the metrics
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def reset(self) -> None:
        """As new, but for answers that still run."""
        self.token_s, self.full = 0.01, False
        self.bodies.clear()

    def app(self) -> FastAPI:
        app = FastAPI()
        recorder = recorded()

        async def steps(step: int | None) -> str:
            return recorder.to_json(step)

        app.include_router(insight_routes(
            Insight.of(
                INFO,
                defaults={"temperature": 0.2, "top_p": 0.9, "top_k": 0, "min_p": 0.0,
                          "repetition_penalty": 1.0},
                chat_template="{% if enable_thinking %}<think>{% endif %}",
            ),
            self.reading,
            steps,
        ))  # fmt: skip

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": INFO.model_name}]}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            if self.full:
                return _refusal(429, "16 running and 256 waiting requests, the limit is 256")
            return StreamingResponse(self._chat(body), media_type="text/event-stream")

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            return StreamingResponse(self._complete(body), media_type="text/event-stream")

        return app

    def reading(self, seconds: int, every: int) -> Reading:
        self.readings += 1
        count = seconds // every
        now = time.time()
        wave = [1 + math.sin(i / 9) for i in range(count)]
        series: dict[str, tuple[float | None, ...]] = {
            name: tuple(scale * w for w in wave)
            for name, scale in {
                "running": 6, "waiting": 2, "kv_usage": 0.4, "batch_size": 5, "step_tokens": 40,
                "host_s": 0.001, "device_s": 0.01, "prefill_tokens": 200, "decode_tokens": 90,
                "generated_tokens": 85, "preemptions": 0.1, "requests": 0.4,
                "prefix_hit_ratio": 0.4, "free_blocks": 200, "used_blocks": 150,
                "cached_blocks": 100,
                **{f"{n}_{p}": s * (1 if p == "p50" else 1.6)
                   for n, s in (("ttft", 0.2), ("tpot", 0.03), ("itl", 0.03), ("e2e", 2.0))
                   for p in ("p50", "p95")},
            }.items()
        }  # fmt: skip
        times = tuple(now - (count - i) * every for i in range(count))
        latency = Latency(count=10, p50=0.2, p95=0.31, p99=0.4)
        return Reading(
            model_name=INFO.model_name, engine="0", time=now, running=self.running, waiting=0,
            kv_usage=0.3, free_blocks=300, used_blocks=150, cached_blocks=62,
            totals={"infer_generation_tokens_total": 1234.0},
            latencies=dict.fromkeys(("ttft", "tpot", "itl", "e2e"), latency),
            history=History(every=every, times=times, series=series),
        )  # fmt: skip

    def _answer(self, body: dict[str, Any]) -> tuple[str, list[str]]:
        *_, said = body["messages"]
        going_on = body.get("continue_final_message", False)
        question = body["messages"][-2 if going_on else -1]["content"]
        thinking = body.get("chat_template_kwargs", {}).get("enable_thinking", True)
        reasoning = "Let me think about it." if thinking and "think" in question else ""
        if "wide" in question:
            return reasoning, [WIDE]
        if "tags" in question:
            return reasoning, [TAGS[i : i + 5] for i in range(0, len(TAGS), 5)]
        if "hostile" in question:
            return reasoning, [HOSTILE]
        if "rich" in question:
            return reasoning, [RICH[i : i + 6] for i in range(0, len(RICH), 6)]
        words = [f"word{i} " for i in range(2000 if "long" in question else 12)]
        if going_on == "reasoning_content":
            reasoning = reasoning[len(said["reasoning_content"]) :].strip()
        elif going_on:
            reasoning, words = "", words[len(said["content"].split()) :]
        return reasoning, words

    async def _chat(self, body: dict[str, Any]) -> AsyncIterator[str]:
        reasoning, words = self._answer(body)
        whole, words = words, words[: body.get("max_tokens") or len(words)]
        self.running += 1
        try:
            for piece in reasoning.split(" ") if reasoning else ():
                yield _event([{"index": 0, "delta": {"reasoning_content": piece + " "}}])
                await asyncio.sleep(self.token_s)
            for word in words:
                yield _event([{"index": 0, "delta": {"content": word}}])
                await asyncio.sleep(self.token_s)
            reason = "stop" if words == whole else "length"
            yield _event([{"index": 0, "delta": {}, "finish_reason": reason}])
            known = body["messages"][-1]["content"] if body.get("continue_final_message") else ""
            yield _event([], usage=_usage(32 + len(known.split()), len(words)))
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1

    async def _complete(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.running += 1
        words = [f" token{i}" for i in range(min(body.get("max_tokens") or 16, 24))]
        try:
            for i, word in enumerate(words):
                top = {word: -0.1 * (i % 12) - 0.01, " other": -2.5, " <b>third</b>": -4.0}
                logprobs = {"tokens": [word], "token_logprobs": [top[word]],
                            "top_logprobs": [top], "text_offset": [0]}  # fmt: skip
                yield _event([{"index": 0, "text": word, "logprobs": logprobs}])
                await asyncio.sleep(self.token_s)
            yield _event([{"index": 0, "text": "", "finish_reason": "length"}])
            yield _event([], usage=_usage(20, len(words), 16))
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1


def recorded() -> StepRecorder:
    """A recorder that has seen the preemption lesson on a real engine."""
    recorder = StepRecorder()
    walk = Walk.begin(PREEMPTION, tiny_model())
    while not walk.ended:
        walk.forward(recorder.record)
    return recorder


def _usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": cached}}  # fmt: skip


def _event(choices: list[dict[str, Any]], **more: Any) -> str:
    return f"data: {json.dumps({'choices': choices, **more})}\n\n"


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "rate_limit_error"}}, status)
