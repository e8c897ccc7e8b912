"""Two ranks on two GPUs: graphs with collectives inside, and what ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infer
from infer import LLM, SamplingParams
from tests.tp.test_faults import LIMIT_S, children, gone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

# Long enough to fill graphs of several shapes; heads as the kernels want them.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 5001,  # does not divide
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
ENGINE: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 16, "num_blocks": 512}


def generated(tp: int, **options: Any) -> tuple[list[list[int]], list[float], float]:
    """Tokens and log-probabilities of one workload, and the share of steps that were graphs."""
    model = infer.load(
        config=CONFIG, load_format="random", device="cuda", dtype="bfloat16", tp=tp, progress=False
    )
    llm = LLM(model, **{**ENGINE, **options})
    prompts = [[(7 * i + j * j) % 5000 for j in range(5 + 23 * i)] for i in range(12)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 0, "logprobs": 5, "repetition_penalty": 1.1},
    ]
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=i, **kinds[i % 4]) for i in range(12)
    ]
    outputs = llm.generate(prompts, params, progress=False)
    plain = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0)
    state = llm.state
    for i in range(4):
        request = infer.Request(request_id=f"g{i}", prompt_token_ids=(5, i), params=plain)
        state = infer.submit(state, request)
    hits = []
    while infer.has_work(state):
        state, report = infer.step(model, state)
        hits.append(report.stats.graph_hit)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    logprobs = [
        entry.logprob for own, top in outputs[3].outputs[0].logprobs or () for entry in (own, *top)
    ]
    llm.close()
    return tokens, logprobs, float(np.mean(hits))


def test_graphs_and_eager_steps_agree() -> None:
    """Eager and replayed, the same kernels run on the same shapes, or nearly so."""
    graphed, values, share = generated(2)
    eager, plain_values, none = generated(2, cuda_graphs=False)
    assert share > 0.9
    assert none == 0
    alike = [sum(map(int.__eq__, a, b)) / len(a) for a, b in zip(graphed, eager, strict=True)]
    assert float(np.mean(alike)) > 0.5
    np.testing.assert_allclose(values[:6], plain_values[:6], atol=0.05)


def test_two_gpus_say_what_one_says() -> None:
    """bfloat16 rounds differently on two ranks: the first tokens and values agree."""
    one, values, _ = generated(1)
    two, others, _ = generated(2)
    assert [tokens[0] for tokens in one[::4]] == [tokens[0] for tokens in two[::4]]
    np.testing.assert_allclose(values[:6], others[:6], atol=0.05)


PROGRAM = """
import sys, time, torch, infer
from infer import LLM, SamplingParams
from infer.errors import EngineError
sys.path.insert(0, ".")
from tests.tp.test_gpu import CONFIG, ENGINE
model = infer.load(config=CONFIG, load_format="random", device="cuda", dtype="bfloat16", tp=2)
llm = LLM(model, **ENGINE)
params = SamplingParams(max_tokens=900, ignore_eos=True, temperature=0)
stream = llm.stream([1, 2, 3], params)
next(stream)
print("running", flush=True)
while True:
    try:
        for _ in stream:
            pass
        stream = llm.stream([1, 2, 3], params)
    except EngineError as error:
        print(error, flush=True)
        sys.exit(7)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_death_of_a_rank_ends_the_program(number: signal.Signals) -> None:
    """The leading rank's stream waits for flags that never come; it must end all the same."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment
    ) as leader:
        assert leader.stdout is not None
        try:
            assert leader.stdout.readline() == "running\n"
            (rank,) = [
                child
                for child in children(leader.pid)
                if b"infer.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
            ]
            os.kill(rank, number)
            began = time.monotonic()
            cause = leader.stdout.readline()
            assert time.monotonic() - began < LIMIT_S
            assert "rank 1" in cause
            assert leader.wait(30) == 7
            assert gone(rank)
        finally:
            leader.kill()


def test_memory_is_free_again() -> None:
    """After an engine of two ranks, another finds the GPUs as the first found them."""
    before = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
    for _ in range(2):
        generated(2)
    torch.cuda.empty_cache()
    after = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
    assert before[1] - after[1] < 64 << 20
    assert before[0] - after[0] < 2 << 30  # contexts and communicators of this process
