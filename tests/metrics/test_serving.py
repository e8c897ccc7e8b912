"""``metrics.serve``: the whole way from a script's loop to a scrape."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import infer
import metrics
from infer.errors import ConfigError
from infer.info import engine_info
from infer.types import FinishEvent, FinishReason, Request, SamplingParams, TokenEvent
from tests.metrics.load import checkpoint
from tests.metrics.samples import INFO, STEP, replace, samples
from tests.metrics.test_definitions import Report


@pytest.fixture
def served() -> Iterator[metrics.ScriptMetrics]:
    with metrics.serve(0, INFO) as made:
        yield made


def test_a_script_is_scraped(served: metrics.ScriptMetrics) -> None:
    served.on_submit(Request(request_id="r", prompt_token_ids=(1, 2)))
    stats = replace(STEP, num_generated_tokens=1, first_token_ids=("r",))
    served.on_report(Report((TokenEvent("r", 0, 5),), stats))
    end = FinishEvent("r", 0, FinishReason.STOP, num_prompt_tokens=2, num_generated_tokens=2)
    served.on_report(Report((TokenEvent("r", 0, 6), end), replace(STEP, num_generated_tokens=1)))
    answer = httpx.get(served.url)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found = samples(answer.content)
    assert found["infer_generation_tokens_total", frozenset()] == 2
    assert found["infer_prompt_tokens_total", frozenset()] == 2
    stopped = frozenset({("finished_reason", "stop")})
    assert found["infer_request_success_total", stopped] == 1
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = httpx.get(served.url, headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_history_over_http(served: metrics.ScriptMetrics) -> None:
    served.metrics.on_step(STEP)
    answer = httpx.get(served.url + "/history", params={"seconds": 60, "every": 5})
    assert answer.headers["content-type"] == "application/json"
    reading = metrics.Reading.from_json(answer.content)
    assert reading.running == STEP.num_running
    assert len(reading.history.times) == 12


@pytest.mark.parametrize(
    "query", ["seconds=0", "seconds=1000", "seconds=x", "every=7", "days=1", "seconds=-1"]
)
def test_history_refuses_with_a_reason(served: metrics.ScriptMetrics, query: str) -> None:
    answer = httpx.get(f"{served.url}/history?{query}")
    assert answer.status_code == 400
    assert query.partition("=")[0] in answer.text


def test_other_paths_are_not_found(served: metrics.ScriptMetrics) -> None:
    assert httpx.get(served.url.replace("/metrics", "/")).status_code == 404


def test_a_port_in_use_is_a_config_error() -> None:
    threads = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*another port"):
            metrics.serve(port, INFO)
    with pytest.raises(ConfigError, match="70000"):
        metrics.serve(70000, INFO)
    assert threading.active_count() == threads


def test_closing_frees_the_port_and_ends_the_threads() -> None:
    threads = threading.active_count()
    served = metrics.serve(0, INFO)
    served.close()
    served.close()
    assert threading.active_count() == threads
    metrics.serve(served.server.port, INFO).close()


def test_the_step_api_with_one_line_in_its_loop(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "tiny")
    model = infer.load(folder, load_format="random", device="cpu", dtype="float32", progress=False)
    state = infer.init(model, infer.EngineConfig(num_blocks=50, max_num_seqs=4))
    seen: Counter[str] = Counter()
    with metrics.serve(0, engine_info(model, state)) as observer:
        for number in range(6):
            params = SamplingParams(max_tokens=number + 1, n=1 + number % 2, ignore_eos=True)
            request = Request(
                request_id=f"r{number}", prompt_token_ids=range(3, 40 + number), params=params
            )
            state = infer.submit(state, request)
        state = infer.abort(state, "r5")
        while infer.has_work(state):
            state, report = infer.step(model, state)
            observer.on_report(report)
            seen["tokens"] += sum(isinstance(event, TokenEvent) for event in report.events)
            seen["steps"] += 1
        found = samples(httpx.get(observer.url).content)
    assert seen["tokens"] == sum((number + 1) * (1 + number % 2) for number in range(5))
    assert found["infer_generation_tokens_total", frozenset()] == seen["tokens"]
    assert found["infer_request_generation_tokens_sum", frozenset()] == seen["tokens"]
    length = frozenset({("finished_reason", "length")})
    assert found["infer_request_success_total", length] == 5
    aborted = frozenset({("finished_reason", "abort")})
    assert found["infer_request_success_total", aborted] == 1
    assert found["infer_time_to_first_token_seconds_count", frozenset()] == 5
    choices_with_gaps = sum(number * (1 + number % 2) for number in range(5))
    assert found["infer_inter_token_latency_seconds_count", frozenset()] == choices_with_gaps
    assert found["infer_num_requests_running", frozenset()] == 0
    assert found["infer_kv_cache_usage_perc", frozenset()] == 0
    assert found["infer_batch_size_count", frozenset()] <= seen["steps"]
    assert found["infer_observation_errors_total", frozenset()] == 0
