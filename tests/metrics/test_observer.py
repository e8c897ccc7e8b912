"""Observing from many threads, without a folder, with a broken observation: nothing gets lost."""

from __future__ import annotations

import logging
import threading

import pytest

from infer.errors import RequestError
from metrics import Metrics, Reading
from tests.metrics.samples import INFO, REQUEST, STEP, Clock, replace, values


def test_threads_that_observe_and_scrape_at_once() -> None:
    threads, rounds = 4, 500
    with Metrics(INFO) as metrics:

        def observe(name: int) -> None:
            for number in range(rounds):
                metrics.on_step(STEP)
                metrics.on_first_token(f"{name}-{number}", 0.1)
                metrics.on_request(replace(REQUEST, request_id=f"{name}-{number}"))
                if number % 100 == 0:
                    metrics.render()
                    metrics.read(60)

        workers = [threading.Thread(target=observe, args=(name,)) for name in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        value = values(metrics)
        total = threads * rounds
        assert value("infer_generation_tokens_total") == total * STEP.num_generated_tokens
        assert value("infer_request_success_total", finished_reason="stop") == total
        assert value("infer_time_to_first_token_seconds_count") == total
        assert value("infer_inter_token_latency_seconds_count") == 3 * total
        assert value("infer_observation_errors_total") == 0


def test_background_thread_folds_without_a_scrape(caplog: pytest.LogCaptureFixture) -> None:
    with Metrics(INFO) as metrics:
        folded = threading.Event()
        metrics.on_step(Signal(folded))  # type: ignore[arg-type]
        assert folded.wait(10)


class Signal:
    """An observation of no known kind; sets an event as soon as anybody asks for its class."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    @property
    def __class__(self) -> type:
        self.event.set()
        return Signal


def test_queue_is_bounded_and_loses_nothing() -> None:
    metrics = Metrics(INFO, max_pending=100)
    metrics.close()  # nobody folds any more
    for _ in range(1050):
        metrics.on_step(STEP)
        assert len(metrics._pending) <= 100
    assert values(metrics)("infer_batch_size_count") == 1050
    metrics.close()


def test_a_broken_observation_is_counted_and_harms_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Metrics(INFO) as metrics, caplog.at_level(logging.ERROR):
        metrics.on_request(replace(REQUEST, finish_reason="melted"))  # type: ignore[arg-type]
        metrics.on_request(replace(REQUEST, inter_token_s=("soon",)))  # type: ignore[arg-type]
        values(metrics)
        metrics.on_request(REQUEST)
        value = values(metrics)
    assert value("infer_observation_errors_total") == 2
    assert value("infer_request_success_total", finished_reason="stop") == 2
    assert value("infer_inter_token_latency_seconds_count") == 3
    assert "melted" in caplog.text


def test_clocks_that_disagree_never_make_a_sum_fall() -> None:
    with Metrics(INFO) as metrics:
        metrics.on_request(replace(REQUEST, arrival=100.0, inter_token_s=(-0.5,)))
        metrics.on_first_token("x", -1.0)
        metrics.on_step(replace(STEP, host_s=-1.0, device_s=-1.0))
        body = metrics.render()[1].decode()
    sums = [line for line in body.splitlines() if line.startswith("infer_") and "_sum{" in line]
    assert len(sums) > 10
    assert all(float(line.rsplit(" ", 1)[1]) >= 0 for line in sums)


def test_reading_survives_json() -> None:
    clock = Clock(5000.2)
    with Metrics(INFO, clock=clock) as metrics:
        for _ in range(100):
            metrics.on_step(STEP)
            metrics.on_request(REQUEST)
            clock.now += 0.13
        reading = metrics.read(seconds=60, every=5)
    again = Reading.from_json(reading.to_json())
    assert again == reading
    assert reading.running == 3
    assert reading.waiting == 2
    assert reading.kv_usage == 0.25
    assert (reading.free_blocks, reading.used_blocks, reading.cached_blocks) == (250, 100, 50)
    assert reading.totals["infer_generation_tokens_total"] == 200
    assert reading.totals['infer_request_success_total{finished_reason="stop"}'] == 100
    assert reading.history.every == 5
    assert len(reading.history.times) == 12
    assert {len(numbers) for numbers in reading.history.series.values()} == {12}
    assert reading.history.series["ttft_p50"][-1] == pytest.approx(0.12, rel=0.026)
    assert reading.history.series["ttft_p50"][0] is None  # before the engine began


def test_counters_of_a_reading_are_those_of_the_exposition() -> None:
    with Metrics(INFO) as metrics:
        metrics.on_step(STEP)
        metrics.on_request(REQUEST)
        totals, body = metrics.read().totals, metrics.render()[1].decode()
    for name, number in totals.items():
        labels = name.partition("{")[2].rstrip("}")
        wanted = [part for part in labels.split(",") if part]
        lines = [
            line
            for line in body.splitlines()
            if line.startswith(name.partition("{")[0] + "{") and all(w in line for w in wanted)
        ]
        assert [float(line.rsplit(" ", 1)[1]) for line in lines] == [number], name


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"history": 3}', "\udcff", b"\xff"])
def test_what_is_no_reading_is_refused(text: str | bytes) -> None:
    with pytest.raises(RequestError, match="not a metrics reading"):
        Reading.from_json(text)


@pytest.mark.parametrize(("seconds", "every"), [(0, 1), (901, 1), (-5, 1), (60, 0), (60, 7)])
def test_history_that_is_not_kept_is_refused(seconds: int, every: int) -> None:
    with Metrics(INFO) as metrics, pytest.raises(RequestError):
        metrics.read(seconds, every)
