"""The ``peer`` workload: this engine and transformers' ``generate`` in turn, in one process."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from infer.bench.figures import Figure, random_prompts
from infer.errors import ConfigError
from infer.llm import LLM
from infer.types import SamplingParams

BATCHES = (1, 16)
PROMPT_LEN, NUM_TOKENS, ROUNDS = 128, 64, 3
_NAMES = ("purestep", "transformers")


def bench_peer(llm: LLM) -> list[Figure]:
    """Speed and time to the first token beside transformers, at 1 and 16 requests.

    "decode" leaves the prompts out: the tokens after the first, in the time after the first;
    "with prompts" is all tokens in all the time. transformers runs a static batch of equal
    lengths, its best case; prompts are the same. The two take turns and the best round of each
    counts. ``detail`` holds the ratio.

    Raises:
        ConfigError: the model has no folder that transformers could load.
    """
    if llm.model.path is None:
        raise ConfigError("the peer workload needs a checkpoint folder; random weights have none")
    peer = _peer(llm)
    rng = random.Random(3)
    figures = []
    for batch in BATCHES:
        if batch > llm.state.limits.max_num_seqs:
            continue
        prompts = random_prompts(rng, 2 * ROUNDS * batch, PROMPT_LEN, 10_000)
        best: dict[tuple[str, int], float] = {}
        for _ in range(ROUNDS):
            for tokens in (1, NUM_TOKENS):
                chosen = [prompts.pop() for _ in range(batch)]
                for name, run in (("purestep", _ours), ("transformers", _theirs)):
                    seconds = run(llm, peer, chosen, tokens)
                    key = (name, tokens)
                    best[key] = min(seconds, best.get(key, seconds))
        figures += _figures(batch, best)
    return figures


def _figures(batch: int, best: dict[tuple[str, int], float]) -> list[Figure]:
    figures = []
    for name in _NAMES:
        first, whole = best[name, 1], best[name, NUM_TOKENS]
        their_first, their_whole = best["transformers", 1], best["transformers", NUM_TOKENS]
        later, their_later = whole - first, their_whole - their_first
        for what, value, unit, ratio in (
            ("decode", batch * (NUM_TOKENS - 1) / later, "tok/s", their_later / later),
            ("with prompts", batch * NUM_TOKENS / whole, "tok/s", their_whole / whole),
            ("first token", 1e3 * first, "ms", first / their_first),
        ):
            figures.append(
                Figure(
                    workload="peer",
                    name=f"{name}, {batch} requests, {what}",
                    value=value,
                    unit=unit,
                    detail={
                        "times_transformers" if unit == "tok/s" else "of_transformers": round(
                            ratio, 2
                        )
                    },
                )
            )
    return figures


def _peer(llm: LLM) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    assert llm.model.path is not None
    model = AutoModelForCausalLM.from_pretrained(llm.model.path, dtype=llm.model.dtype)
    return model.to(llm.model.device).eval()


def _ours(llm: LLM, peer: Any, prompts: list[list[int]], tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return time.perf_counter() - started


@torch.inference_mode()
def _theirs(llm: LLM, peer: Any, prompts: list[list[int]], tokens: int) -> float:
    ids = torch.tensor(prompts, device=llm.model.device)
    started = time.perf_counter()
    peer.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return time.perf_counter() - started
