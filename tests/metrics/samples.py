"""Values that the metrics tests share."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from infer.types import EngineInfo, FinishReason, RequestStats, StepStats
from metrics import Metrics

INFO = EngineInfo(
    model_name="tiny",
    architecture="llama",
    device="cpu",
    dtype="float32",
    attention_backend="torch",
    max_model_len=4096,
    max_num_seqs=24,
    max_num_batched_tokens=2048,
    block_size=16,
    num_blocks=400,
    kv_bytes_per_token=512,
    weight_bytes=1000,
    vocab_size=256,
    tp_size=1,
    pipeline_depth=1,
    compiled=False,
    versions={"purestep": "0.1.0", "torch": "2.13.0"},
)
STEP = StepStats(
    step=1,
    time=0.0,
    num_running=3,
    num_waiting=2,
    num_prefill_tokens=10,
    num_decode_tokens=2,
    num_sequences=3,
    num_generated_tokens=2,
    num_preempted=0,
    num_blocks=400,
    num_free_blocks=250,
    num_cached_blocks=50,
    prefix_queries=20,
    prefix_hits=10,
    host_s=0.001,
    device_s=0.004,
)
REQUEST = RequestStats(
    request_id="r",
    finish_reason=FinishReason.STOP,
    num_prompt_tokens=20,
    num_cached_tokens=8,
    num_generated_tokens=4,
    num_preemptions=0,
    n=1,
    max_tokens=16,
    arrival=0.0,
    scheduled=0.05,
    first_token=0.12,
    last_token=0.25,
    finished=0.26,
    inter_token_s=(0.04, 0.05, 0.04),
)

__all__ = ["INFO", "REQUEST", "STEP", "Clock", "replace", "samples", "values"]


class Clock:
    """A clock that the test moves."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(body: bytes) -> Values:
    """Every sample of a plain exposition by name and labels, but those common to all."""
    found: Values = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


class values:
    """Samples of what ``metrics`` exposes now: ``values(metrics)("name", label="value")``."""

    def __init__(self, metrics: Metrics) -> None:
        self._found = samples(metrics.render()[1])

    def __call__(self, name: str, **labels: str) -> float:
        return self._found[name, frozenset(labels.items())]
