"""What metrics cost a step at 256 sequences: ``python -m tests.bench.metrics_cost``.

Two costs are told apart. *Caller*: the time that observing adds to the thread that steps. *Total*:
that and the folding in the background, which takes the interpreter from the engine when both share
a process. Both are processor time of one thread, the best of several rounds, so that a busy machine
does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

from infer.types import EngineInfo, FinishReason, RequestStats, StepStats
from metrics import Metrics

SEQUENCES = 256
STEPS = 200  # a round
ROUNDS = 15
STEP_MS = 4.0  # Qwen3-0.6B at 256 sequences on an H200: the shortest step there is to compare with


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Microseconds a step."""

    caller_us: float
    total_us: float

    def share(self, step_ms: float) -> tuple[float, float]:
        """Of a step of ``step_ms`` milliseconds: (caller, total)."""
        return self.caller_us / step_ms / 1e3, self.total_us / step_ms / 1e3


def measure(tokens: int) -> Cost:
    """Every step generates 256 tokens; requests end and begin as those of ``tokens`` tokens do."""
    metrics = Metrics(_info(), max_pending=1 << 20)
    metrics.close()  # the rounds fold by themselves
    step, request = _step(), _request(tokens)
    ends = [0] * STEPS
    for sequence in range(SEQUENCES * STEPS // tokens):
        ends[sequence * tokens // SEQUENCES] += 1

    def observe() -> None:
        for count in ends:
            metrics.on_step(step)
            for _ in range(count):
                metrics.on_first_token(request.request_id, 0.1)
                metrics.on_request(request)

    def fold() -> None:
        metrics.read(seconds=1)

    idle = _best([fold])
    caller = _best([observe], after=fold)
    total = _best([observe, fold]) - idle  # reading is the dashboard's, not the step's
    return Cost(caller_us=caller / STEPS * 1e6, total_us=total / STEPS * 1e6)


def _best(calls: list[Callable[[], None]], after: Callable[[], None] | None = None) -> float:
    """Seconds of this thread's processor time for all ``calls``, the best round's."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for call in calls:
            call()
        rounds.append(time.thread_time() - start)
        if after is not None:
            after()
    return min(rounds)


def _step() -> StepStats:
    return StepStats(
        step=1,
        time=0.0,
        num_running=SEQUENCES,
        num_waiting=10,
        num_prefill_tokens=100,
        num_decode_tokens=SEQUENCES,
        num_sequences=SEQUENCES,
        num_generated_tokens=SEQUENCES,
        num_preempted=0,
        num_blocks=10_000,
        num_free_blocks=2_000,
        num_cached_blocks=1_000,
        prefix_queries=100,
        prefix_hits=30,
        host_s=0.0005,
        device_s=0.004,
        graph_hit=True,
    )


def _request(tokens: int) -> RequestStats:
    gaps = tuple(0.004 + 0.00001 * (place % 97) for place in range(tokens - 1))
    return RequestStats(
        request_id="r",
        finish_reason=FinishReason.LENGTH,
        num_prompt_tokens=100,
        num_cached_tokens=30,
        num_generated_tokens=tokens,
        num_preemptions=0,
        n=1,
        max_tokens=tokens,
        arrival=0.0,
        scheduled=0.01,
        first_token=0.1,
        last_token=0.1 + sum(gaps),
        finished=0.2 + sum(gaps),
        inter_token_s=gaps,
    )


def _info() -> EngineInfo:
    return EngineInfo(
        model_name="m",
        architecture="qwen3",
        device="cuda",
        dtype="bfloat16",
        attention_backend="triton",
        max_model_len=40_960,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=8_192,
        block_size=16,
        num_blocks=10_000,
        kv_bytes_per_token=114_688,
        weight_bytes=1_192_000_000,
        vocab_size=151_936,
        tp_size=1,
        pipeline_depth=1,
        compiled=True,
        versions={},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=STEP_MS, help="compare with such a step")
    step_ms = parser.parse_args().step_ms
    print(f"metrics at {SEQUENCES} sequences, beside a step of {step_ms} ms")
    for tokens in (64, 256, 1024):
        cost = measure(tokens)
        caller, total = cost.share(step_ms)
        print(
            f"answers of {tokens:4d} tokens: caller {cost.caller_us:5.2f} us ({caller:.3%}), "
            f"with folding {cost.total_us:5.1f} us ({total:.2%})"
        )


if __name__ == "__main__":
    main()
