"""Every metric this package exports: one table of names, types, labels, buckets and definitions.

The suffixes are vLLM's, so that its dashboards work after two relabel rules
(``configs/prometheus``). Colons, vLLM's habit, are left out: they are reserved for recording rules,
and client libraries rewrite them for some scrapers and not for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from infer.types import EngineInfo, FailureKind, FinishReason, RejectionKind
from metrics import buckets

PREFIX = "infer_"
COMMON_LABELS = ("model_name", "engine")


class Kind(StrEnum):
    """Prometheus' metric types, as far as they are used here."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One family. ``label_values`` are the combinations that exist, at zero, from the start."""

    name: str  # without the prefix; counters without their ending "_total"
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()  # beside COMMON_LABELS
    label_values: tuple[tuple[str, ...], ...] = ((),)
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, ascending, without +Inf


def table(info: EngineInfo) -> Mapping[str, Metric]:
    """Metrics by name, with buckets that fit the limits of this engine."""
    families = (*_requests(info), *_tokens(), *_steps(info), *_cache(), *_troubles())
    return MappingProxyType({family.name: family for family in families})


def _counter(name: str, text: str, **labels: tuple[str, ...]) -> Metric:
    return _labelled(Kind.COUNTER, name, text, labels)


def _gauge(name: str, text: str, **labels: tuple[str, ...]) -> Metric:
    return _labelled(Kind.GAUGE, name, text, labels)


def _labelled(kind: Kind, name: str, text: str, labels: dict[str, tuple[str, ...]]) -> Metric:
    if not labels:
        return Metric(name=name, kind=kind, help=text)
    ((label, values),) = labels.items()
    combinations = tuple((value,) for value in values)
    return Metric(name=name, kind=kind, help=text, labels=(label,), label_values=combinations)


def _histogram(name: str, bounds: tuple[float, ...], text: str) -> Metric:
    return Metric(name=name, kind=Kind.HISTOGRAM, help=text, buckets=bounds)


def _requests(info: EngineInfo) -> tuple[Metric, ...]:
    lengths = buckets.one_two_five(info.max_model_len)
    return (
        _histogram(
            "time_to_first_token_seconds",
            buckets.TTFT,
            "Arrival of a request (before tokenization) to its first token.",
        ),
        _histogram(
            "inter_token_latency_seconds",
            buckets.TOKEN,
            "Time between two successive token events of one choice.",
        ),
        _histogram(
            "request_time_per_output_token_seconds",
            buckets.TOKEN,
            "(last token - first token) / (tokens - 1) of a request; "
            "not observed when a choice has fewer than two tokens.",
        ),
        _histogram(
            "e2e_request_latency_seconds",
            buckets.REQUEST,
            "Arrival of a request to its end, whatever the finish reason.",
        ),
        _histogram(
            "request_queue_time_seconds",
            buckets.REQUEST,
            "Arrival of a request to the first step that ran it.",
        ),
        _histogram(
            "request_prefill_time_seconds",
            buckets.REQUEST,
            "First step that ran a request to its first token.",
        ),
        _histogram(
            "request_decode_time_seconds",
            buckets.REQUEST,
            "First token to last token of a request; preemption in between counts.",
        ),
        _histogram(
            "request_inference_time_seconds",
            buckets.REQUEST,
            "First step that ran a request to its last token.",
        ),
        _histogram("request_prompt_tokens", lengths, "Prompt tokens of a request."),
        _histogram(
            "request_generation_tokens", lengths, "Tokens generated for a request, all choices."
        ),
        _histogram(
            "request_max_num_generation_tokens",
            lengths,
            "Tokens of the longest choice of a request.",
        ),
        _histogram(
            "request_prefill_kv_computed_tokens",
            lengths,
            "Prompt tokens of a request that the prefix cache did not hold.",
        ),
        _histogram("request_params_n", buckets.CHOICES, "The parameter n of a request."),
        _histogram(
            "request_params_max_tokens",
            lengths,
            "The parameter max_tokens of a request; not observed when it was left out.",
        ),
        _histogram(
            "request_num_preemptions", buckets.PREEMPTIONS, "How often a request was preempted."
        ),
        _counter(
            "request_success",
            "Requests that ended, by finish reason.",
            finished_reason=tuple(FinishReason),
        ),
    )


def _tokens() -> tuple[Metric, ...]:
    return (
        _counter("prompt_tokens", "Prompt tokens of ended requests that a step had run."),
        _counter("prompt_tokens_cached", "Of the prompt tokens: taken from the prefix cache."),
        _counter("generation_tokens", "Tokens generated and accepted, counted as they come."),
        _counter(
            "computed_tokens",
            "Positions computed in steps: prompts and recomputation, or generation.",
            phase=("prefill", "decode"),
        ),
        _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
        _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    )


def _steps(info: EngineInfo) -> tuple[Metric, ...]:
    phases = ("host", "device")
    return (
        _gauge("num_requests_running", "Sequences admitted: they hold KV blocks."),
        _gauge("num_requests_waiting", "Requests not admitted yet, and preempted sequences."),
        _histogram(
            "iteration_tokens",
            buckets.step_tokens(info.max_num_batched_tokens),
            "Positions computed in one step.",
        ),
        _histogram(
            "batch_size",
            buckets.powers_of_two(info.max_num_seqs),
            "Sequences in one step's batch.",
        ),
        Metric(
            name="step_duration_seconds",
            kind=Kind.HISTOGRAM,
            help="Time of one step: host (schedule, build, collect) and device (the rest).",
            labels=("phase",),
            label_values=tuple((phase,) for phase in phases),
            buckets=buckets.STEP,
        ),
        _counter(
            "graph_steps",
            "Steps that replayed a CUDA graph (hit) and steps that did not (miss).",
            result=("hit", "miss"),
        ),
        _counter("recompiles", "Compilations after warm-up; each one stalls a step."),
    )


def _cache() -> tuple[Metric, ...]:
    return (
        _gauge("kv_cache_usage_perc", "Share of KV blocks held by sequences, 0 to 1."),
        _gauge(
            "kv_cache_blocks",
            "KV blocks: free, used by sequences, or cached (reusable prefixes nobody holds).",
            state=("free", "used", "cached"),
        ),
        _counter("num_preemptions", "Preemptions: a sequence gave up its blocks."),
    )


def _troubles() -> tuple[Metric, ...]:
    return (
        _counter(
            "aborted_requests",
            "Requests aborted by their caller, by how far they had come.",
            stage=("queued", "prefill", "decode"),
        ),
        _counter(
            "admission_rejections",
            "Requests refused before the engine saw them.",
            reason=tuple(RejectionKind),
        ),
        _counter(
            "request_failures",
            "Accepted requests that ended without their answer.",
            error_type=tuple(FailureKind),
        ),
        _counter(
            "observation_errors", "Observations that could not be counted; see the log. A fault."
        ),
    )
