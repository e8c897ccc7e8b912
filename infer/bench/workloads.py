"""The named workloads: decode, offline and prefill."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from infer.bench.figures import Figure, floor_of, random_prompts
from infer.llm import LLM
from infer.types import RequestStats, SamplingParams

DECODE_BATCHES = (1, 8, 32, 64, 128, 256)
PROMPT_LEN, OUTPUT_LEN, REPEATS = 128, 129, 3
TEMPERATURE = 0.6


def _timed(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> float:
    started = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return time.perf_counter() - started


def fixed_length(tokens: int) -> SamplingParams:
    """Parameters of an answer of exactly so many tokens."""
    return SamplingParams(temperature=TEMPERATURE, max_tokens=tokens, ignore_eos=True)


def bench_decode(llm: LLM, batches: Sequence[int] = DECODE_BATCHES) -> list[Figure]:
    """Milliseconds a decode step: (time for 129 tokens - time for 1) / 128, best of three each."""
    rng, floor, figures = random.Random(0), floor_of(llm), []
    for batch in batches:
        if batch > llm.state.limits.max_num_seqs:
            continue
        best = {}
        for tokens in (1, OUTPUT_LEN):
            runs = []
            for _ in range(REPEATS):
                prompts = random_prompts(rng, batch, PROMPT_LEN, llm.model.config.vocab_size)
                runs.append(_timed(llm, prompts, fixed_length(tokens)))
            best[tokens] = min(runs)
        step = (best[OUTPUT_LEN] - best[1]) / (OUTPUT_LEN - 1)
        context = PROMPT_LEN + OUTPUT_LEN / 2
        figures.append(
            Figure(
                workload="decode",
                name=f"batch {batch}",
                value=1e3 * step,
                unit="ms/step",
                floor=1e3 * floor.decode_s(batch, context) if floor else None,
            )
        )
    return figures


def bench_offline(llm: LLM) -> list[Figure]:
    """256 requests, prompts and outputs uniform in 100..1024 tokens: output tokens a second."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    vocab = llm.model.config.vocab_size
    prompts = [[token % vocab for token in prompt] for prompt in prompts]
    params = [fixed_length(rng.randint(100, 1024)) for _ in range(256)]
    llm.generate([[1, 2, 3]], fixed_length(2), progress=False)
    seconds = _timed(llm, prompts, params)
    outputs = sum(p.max_tokens or 0 for p in params)
    inputs = sum(map(len, prompts))
    floor = floor_of(llm)
    best = None
    if floor:
        contexts = [
            len(p) * o.max_tokens + o.max_tokens * (o.max_tokens + 1) / 2
            for p, o in zip(prompts, params, strict=True)
            if o.max_tokens
        ]
        longest = max(p.max_tokens or 0 for p in params)
        read = sum(contexts) * floor.kv_bytes + longest * floor.weight_bytes
        best = outputs / (read / floor.bandwidth + floor.prefill_s(inputs))
    return [
        Figure(
            workload="offline",
            name="output tokens",
            value=outputs / seconds,
            unit="tok/s",
            floor=best,
            detail={"prompt_tokens": inputs, "output_tokens": outputs, "seconds": seconds},
        )
    ]


def bench_prefill(llm: LLM) -> list[Figure]:
    """Time to the first token of one prompt of 128, and tokens a second of 8 prompts of 2,048."""
    rng, vocab = random.Random(1), llm.model.config.vocab_size
    floor = floor_of(llm)
    single = []
    for _ in range(10):
        stats: RequestStats = llm.generate(
            random_prompts(rng, 1, PROMPT_LEN, vocab), fixed_length(1), progress=False
        )[0].metrics
        assert stats.ttft_s is not None
        single.append(stats.ttft_s)
    figures = [
        Figure(
            workload="prefill",
            name="time to first token, 128",
            value=1e3 * min(single),
            unit="ms",
            floor=1e3 * floor.decode_s(1, PROMPT_LEN) if floor else None,
            detail={"median": 1e3 * sorted(single)[len(single) // 2]},
        )
    ]
    length = min(2048, llm.state.limits.max_model_len - 1)
    runs = [
        _timed(llm, random_prompts(rng, 8, length, vocab), fixed_length(1)) for _ in range(REPEATS)
    ]
    figures.append(
        Figure(
            workload="prefill",
            name=f"8 prompts of {length}",
            value=8 * length / min(runs),
            unit="tok/s",
            floor=8 * length / floor.prefill_s(8 * length) if floor else None,
        )
    )
    return figures
