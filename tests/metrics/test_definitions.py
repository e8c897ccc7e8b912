"""What each metric means, on examples that can be checked by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from infer.types import (
    Event,
    FailureKind,
    FinishEvent,
    FinishReason,
    RejectionKind,
    Request,
    SamplingParams,
    StepStats,
    TokenEvent,
)
from metrics import Metrics
from tests.metrics.samples import INFO, REQUEST, STEP, Clock, replace, values


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.5)


@pytest.fixture
def metrics(clock: Clock) -> Iterator[Metrics]:
    with Metrics(INFO, clock=clock) as made:
        yield made


@dataclass(frozen=True)
class Report:
    events: tuple[Event, ...]
    stats: StepStats


def report(time: float, *events: Event, started: tuple[str, ...] = ()) -> Report:
    return Report(events, replace(STEP, time=time, first_token_ids=started))


def token(index: int = 0, request_id: str = "r") -> TokenEvent:
    return TokenEvent(request_id, index, 7)


def finish(reason: str, tokens: int, index: int = 0, request_id: str = "r") -> FinishEvent:
    return FinishEvent(
        request_id, index, FinishReason(reason), num_prompt_tokens=5, num_generated_tokens=tokens
    )


def check_timeline(metrics: Metrics, clock: Clock) -> None:
    """Sent at 0 s, tokens at 0.12, 0.16, 0.21 and 0.25 s: TTFT 120 ms, ITL 40, 50 and 40 ms,
    TPOT (250 - 120) / 3 = 43.33 ms."""
    value = values(metrics)
    assert value("infer_time_to_first_token_seconds_count") == 1
    assert value("infer_time_to_first_token_seconds_sum") == pytest.approx(0.12)
    assert value("infer_inter_token_latency_seconds_count") == 3
    assert value("infer_inter_token_latency_seconds_sum") == pytest.approx(0.13)
    assert value("infer_inter_token_latency_seconds_bucket", le="0.03") == 0
    assert value("infer_inter_token_latency_seconds_bucket", le="0.06") == 3
    assert value("infer_request_time_per_output_token_seconds_count") == 1
    assert value("infer_request_time_per_output_token_seconds_sum") == pytest.approx(0.0433333333)
    clock.now += 1  # the reader shows complete seconds
    latencies = metrics.read().latencies
    assert {name: latencies[name].count for name in latencies} == {
        "ttft": 1, "tpot": 1, "itl": 3, "e2e": 1,
    }  # fmt: skip
    assert latencies["ttft"].p50 == pytest.approx(0.12, rel=0.026)
    assert latencies["tpot"].p95 == pytest.approx(0.04333, rel=0.026)
    assert latencies["itl"].p50 == pytest.approx(0.04, rel=0.026)
    assert latencies["itl"].p99 == pytest.approx(0.05, rel=0.026)


def test_timeline_of_a_finished_request(metrics: Metrics, clock: Clock) -> None:
    metrics.on_request(REQUEST)
    check_timeline(metrics, clock)


def test_timeline_from_step_reports(metrics: Metrics, clock: Clock) -> None:
    clock.now = 0.0
    metrics.on_submit(Request(request_id="r", prompt_token_ids=(1, 2, 3)))
    clock.now = 1000.5
    metrics.on_report(report(0.12, token(), started=("r",)))
    metrics.on_report(report(0.16, token()))
    metrics.on_report(report(0.21, token()))
    metrics.on_report(report(0.25, token(), finish("length", 4)))
    check_timeline(metrics, clock)
    value = values(metrics)
    assert value("infer_request_success_total", finished_reason="length") == 1
    assert value("infer_e2e_request_latency_seconds_sum") == pytest.approx(0.25)
    # The first step took 5 ms and ended at 0.12.
    assert value("infer_request_queue_time_seconds_sum") == pytest.approx(0.115)
    assert value("infer_request_prefill_time_seconds_sum") == pytest.approx(0.005)


def test_early_first_token_is_counted_once(metrics: Metrics, clock: Clock) -> None:
    metrics.on_first_token("r", 0.12)
    assert values(metrics)("infer_time_to_first_token_seconds_count") == 1
    metrics.on_request(REQUEST)
    check_timeline(metrics, clock)
    metrics.on_request(REQUEST)  # another request that happens to have the same id
    assert values(metrics)("infer_time_to_first_token_seconds_count") == 2


def test_one_token_has_no_time_per_output_token(metrics: Metrics) -> None:
    metrics.on_request(replace(REQUEST, num_generated_tokens=1, last_token=0.12, inter_token_s=()))
    value = values(metrics)
    assert value("infer_request_time_per_output_token_seconds_count") == 0
    assert value("infer_inter_token_latency_seconds_count") == 0
    assert value("infer_time_to_first_token_seconds_count") == 1
    assert value("infer_e2e_request_latency_seconds_count") == 1
    assert value("infer_request_generation_tokens_count") == 1


@pytest.mark.parametrize(
    ("stage", "scheduled", "first", "prompt_tokens"),
    [("queued", None, None, 0), ("prefill", 0.05, None, 20), ("decode", 0.05, 0.12, 20)],
)
def test_aborts_say_how_far_the_request_was(
    metrics: Metrics, stage: str, scheduled: float | None, first: float | None, prompt_tokens: int
) -> None:
    metrics.on_request(
        replace(
            REQUEST,
            finish_reason=FinishReason.ABORT,
            scheduled=scheduled,
            first_token=first,
            last_token=first,
            num_generated_tokens=0 if first is None else 1,
            inter_token_s=(),
        )
    )
    value = values(metrics)
    assert value("infer_request_success_total", finished_reason="abort") == 1
    stages = {name: value("infer_aborted_requests_total", stage=name) for name in STAGES}
    assert stages == {name: float(name == stage) for name in STAGES}
    assert value("infer_prompt_tokens_total") == prompt_tokens
    assert value("infer_e2e_request_latency_seconds_count") == 1
    assert value("infer_time_to_first_token_seconds_count") == (0 if first is None else 1)


STAGES = ("queued", "prefill", "decode")


def test_a_step(metrics: Metrics) -> None:
    metrics.on_step(replace(STEP, num_preempted=2, num_recompiles=1, graph_hit=True))
    metrics.on_step(replace(STEP, num_sequences=0, num_prefill_tokens=0, num_decode_tokens=0,
                            num_generated_tokens=0, num_running=0, num_waiting=0,
                            num_free_blocks=350, prefix_queries=0, prefix_hits=0))  # fmt: skip
    value = values(metrics)
    assert value("infer_num_requests_running") == 0
    assert value("infer_kv_cache_usage_perc") == 0
    assert value("infer_kv_cache_blocks", state="free") == 350
    assert value("infer_kv_cache_blocks", state="cached") == 50
    assert value("infer_generation_tokens_total") == 2
    assert value("infer_computed_tokens_total", phase="prefill") == 10
    assert value("infer_computed_tokens_total", phase="decode") == 2
    assert value("infer_prefix_cache_queries_total") == 20
    assert value("infer_prefix_cache_hits_total") == 10
    assert value("infer_num_preemptions_total") == 2
    assert value("infer_recompiles_total") == 1
    assert value("infer_graph_steps_total", result="hit") == 1
    assert value("infer_graph_steps_total", result="miss") == 0
    # A turn without sequences is no batch.
    assert value("infer_batch_size_count") == 1
    assert value("infer_batch_size_sum") == 3
    assert value("infer_iteration_tokens_sum") == 12
    assert value("infer_step_duration_seconds_sum", phase="host") == pytest.approx(0.001)
    assert value("infer_step_duration_seconds_sum", phase="device") == pytest.approx(0.004)


def test_usage_of_the_cache_is_a_ratio_of_held_blocks(metrics: Metrics) -> None:
    metrics.on_step(STEP)  # 400 blocks: 250 free, 50 cached, so 100 held
    value = values(metrics)
    assert value("infer_kv_cache_usage_perc") == 0.25
    assert value("infer_kv_cache_blocks", state="used") == 100


def test_refusals_and_failures(metrics: Metrics) -> None:
    metrics.on_rejection(RejectionKind.CAPACITY)
    metrics.on_failure(FailureKind.ENGINE)
    metrics.on_failure(FailureKind.ENGINE)
    value = values(metrics)
    assert value("infer_admission_rejections_total", reason="capacity") == 1
    assert value("infer_admission_rejections_total", reason="invalid") == 0
    assert value("infer_request_failures_total", error_type="engine") == 2


def test_choices_of_one_request_are_one_request(metrics: Metrics) -> None:
    metrics.on_submit(Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(n=2)))
    metrics.on_report(report(1.5, token(0), token(1), finish("stop", 1, 1), started=("r",)))
    assert values(metrics)("infer_request_generation_tokens_count") == 0
    metrics.on_report(report(1.7, token(0)))
    metrics.on_report(report(1.8, token(0), finish("length", 3, 0)))
    value = values(metrics)
    assert value("infer_request_success_total", finished_reason="length") == 1
    assert value("infer_request_success_total", finished_reason="stop") == 0
    assert value("infer_request_generation_tokens_sum") == 4
    assert value("infer_request_max_num_generation_tokens_sum") == 3
    assert value("infer_request_params_n_sum") == 2
    assert value("infer_inter_token_latency_seconds_count") == 2
    assert value("infer_inter_token_latency_seconds_sum") == pytest.approx(0.3)


def test_reports_of_requests_that_were_not_told(metrics: Metrics) -> None:
    """Their times start with their first step."""
    metrics.on_report(report(2.0, token(), started=("r",)))
    metrics.on_report(report(2.1, finish("abort", 1)))
    metrics.on_report(report(2.2, finish("error", 0, request_id="never-ran")))
    value = values(metrics)
    assert value("infer_time_to_first_token_seconds_sum") == pytest.approx(0.005)
    assert value("infer_request_queue_time_seconds_sum") == 0
    assert value("infer_aborted_requests_total", stage="decode") == 1
    assert value("infer_request_success_total", finished_reason="error") == 1
    assert value("infer_request_failures_total", error_type="engine") == 1
