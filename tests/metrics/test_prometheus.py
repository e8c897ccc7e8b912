"""A real Prometheus with the shipped configuration scrapes a server under load."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from tests.metrics.load import ClientCount, Load
from tests.metrics.samples import samples
from tests.metrics.vllm_queries import all_queries

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DASHBOARD = CONFIGS / "grafana" / "dashboards" / "purestep.json"
DEADLINE_S = 30.0

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Debian's package prometheus is not installed (configs/system-deps.sh)",
)


class Prometheus:
    """A running server, asked over its HTTP API."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str, **params: str) -> Any:
        body = self._client.get(f"/api/v1/{path}", params=params).json()
        assert body["status"] == "success", f"{params}: {body}"
        return body["data"]

    def values(self, query: str) -> list[float]:
        """The numbers that a query has now; NaN, which panels do not draw, left out."""
        found = [float(series["value"][1]) for series in self.get("query", query=query)["result"]]
        return [value for value in found if not math.isnan(value)]


def until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Poll until ``condition`` holds; fail with ``what()`` at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    server = Load(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def model_name(prometheus: Prometheus) -> str:
    """As a page with our dashboard would find it."""
    until(
        lambda: bool(prometheus.values("infer_num_requests_running")), lambda: "nothing is scraped"
    )
    (series,) = prometheus.get("query", query="infer_num_requests_running")["result"]
    return series["metric"]["model_name"]


@pytest.fixture(scope="module")
def prometheus(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    for path in (CONFIGS / "prometheus").iterdir():
        shutil.copy(path, folder)
    config = (folder / "prometheus.yml").read_text()
    for shipped, here in (
        ("127.0.0.1:8000", httpx.URL(load.url).netloc.decode()),
        ("scrape_interval: 5s", "scrape_interval: 1s"),
        ("evaluation_interval: 15s", "evaluation_interval: 1s"),
    ):
        assert shipped in config
        config = config.replace(shipped, here)
    (folder / "prometheus.yml").write_text(config)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ],
            stderr=log,
        )
    try:
        with httpx.Client(base_url=f"http://{address}") as client:
            server = Prometheus(client)
            until(server.ready, (folder / "log").read_text)
            yield server
    finally:
        process.terminate()
        process.wait(10)


def panel_queries() -> list[str]:
    """Every query of every panel of our dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def recording_rules() -> list[str]:
    """The name of every series that a rule records."""
    return re.findall(r"record: (\S+)", (CONFIGS / "prometheus" / "recording.yml").read_text())


def substituted(query: str, model_name: str) -> str:
    """With Grafana's variables as they would be on a page that shows the last minute."""
    for name, value in (
        ("$__rate_interval", "5s"),
        ("$__interval", "5s"),
        ("$__range", "1m"),
        ("$model_name", model_name),
        ("$Deployment_id", model_name),
        ("$instance", ".*"),
    ):
        query = query.replace(name, value)
    assert "$" not in query
    return query


def check_all_have_data(prometheus: Prometheus, queries: list[str]) -> None:
    """Each query has numbers within the deadline, while the load runs."""
    missing = list(queries)

    def all_found() -> bool:
        missing[:] = [query for query in missing if not prometheus.values(query)]
        return not missing

    until(all_found, lambda: "no data for:\n" + "\n".join(missing))


def test_every_panel_of_our_dashboard_has_data(prometheus: Prometheus, model_name: str) -> None:
    queries = panel_queries()
    assert len(queries) > 50
    check_all_have_data(prometheus, [substituted(query, model_name) for query in queries])


def test_every_panel_of_vllms_dashboards_has_data(prometheus: Prometheus, model_name: str) -> None:
    queries = all_queries()
    assert len(queries) == 67
    check_all_have_data(prometheus, [substituted(query, model_name) for query in queries])


def test_every_recording_rule_has_data(prometheus: Prometheus) -> None:
    check_all_have_data(prometheus, recording_rules())


def test_variables_of_our_dashboard_list_the_model(prometheus: Prometheus, model_name: str) -> None:
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    queries = [variable["query"]["query"] for variable in variables if variable["type"] == "query"]
    for query in queries:
        selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        selector = substituted(selector, model_name)
        found = prometheus.get("series", **{"match[]": selector})
        assert {series[label] for series in found}, query
        if label == "model_name":
            assert {series[label] for series in found} == {model_name}


def test_targets_are_up_and_no_series_is_under_two_names(prometheus: Prometheus) -> None:
    targets = prometheus.get("targets")["activeTargets"]
    assert {target["labels"]["job"] for target in targets} == {"purestep", "purestep-as-vllm"}
    until(lambda: prometheus.values("sum(up)") == [2.0], lambda: str(targets))
    for job, ours in (("purestep", "infer_.+"), ("purestep-as-vllm", "vllm:.+")):
        # Prometheus adds ALERTS where a condition has begun to hold.
        known = f"{ours}|up|ALERTS.*|scrape_.+|http_.+|process_.+|python_.+"
        others = f'{{job="{job}", __name__!~"{known}"}}'
        assert prometheus.get("query", query=others)["result"] == []


@pytest.fixture(scope="module")
def counted(prometheus: Prometheus, load: Load) -> ClientCount:
    """After the load: what the clients counted. Tests that need the load come before."""
    return load.stop()


@pytest.mark.parametrize(
    ("query", "of"),
    [
        ("infer_generation_tokens_total", lambda c: c.tokens),
        ("infer_prompt_tokens_total", lambda c: c.prompt_tokens),
        ("sum(infer_request_success_total)", lambda c: c.requests),
        ('infer_request_success_total{finished_reason="length"}', lambda c: c.finishes["length"]),
        ('infer_request_success_total{finished_reason="stop"}', lambda c: c.finishes["stop"]),
        ('infer_request_success_total{finished_reason="abort"}', lambda c: 0),
        ("infer_time_to_first_token_seconds_count", lambda c: len(c.ttft_s)),
        ("infer_inter_token_latency_seconds_count", lambda c: c.tokens - c.requests),
        ("infer_e2e_request_latency_seconds_count", lambda c: c.requests),
        ("infer_request_queue_time_seconds_count", lambda c: c.requests),
        ("infer_request_prefill_time_seconds_count", lambda c: c.requests),
        ("infer_request_decode_time_seconds_count", lambda c: c.requests),
        ("infer_request_prompt_tokens_sum", lambda c: c.prompt_tokens),
        ("infer_request_generation_tokens_sum", lambda c: c.tokens),
        ("vllm:generation_tokens_total", lambda c: c.tokens),
        (
            'http_requests_total{handler="/v1/completions", method="POST", status="200"}',
            lambda c: c.requests,
        ),
        ("infer_num_requests_running", lambda c: 0),
        ("infer_num_requests_waiting", lambda c: 0),
        ("infer_kv_cache_usage_perc", lambda c: 0),
        ("infer_observation_errors_total", lambda c: 0),
    ],
)
def test_counts_are_the_clients(
    prometheus: Prometheus, counted: ClientCount, query: str, of: Callable[[ClientCount], int]
) -> None:
    assert counted.requests > 20
    until(
        lambda: prometheus.values(query) == [of(counted)],
        lambda: f"{prometheus.values(query)}, the clients counted {of(counted)}",
    )


@pytest.mark.parametrize(
    ("metric", "of"),
    [
        ("infer_time_to_first_token_seconds", lambda c: c.ttft_s),
        ("infer_inter_token_latency_seconds", lambda c: c.inter_token_s),
    ],
)
def test_medians_are_the_clients(
    load: Load, counted: ClientCount, metric: str, of: Callable[[ClientCount], list[float]]
) -> None:
    """Medians agree within 10 ms or 10 %, as far as a histogram tells: it knows the bucket."""
    observed = of(counted)
    found = samples(httpx.get(load.url).content)
    count = found[f"{metric}_count", frozenset()]
    bounds = sorted(
        (float(dict(labels)["le"]), cumulative)
        for (name, labels), cumulative in found.items()
        if name == f"{metric}_bucket"
    )
    place = next(i for i, (_, cumulative) in enumerate(bounds) if cumulative >= count / 2)
    lower, upper = bounds[place - 1][0] if place else 0.0, bounds[place][0]
    assert min(lower * 0.9, lower - 0.01) <= median(observed) <= max(upper * 1.1, upper + 0.01)


def test_aborts_and_refusals_are_counted_and_leave_nothing_behind(
    prometheus: Prometheus, load: Load, counted: ClientCount
) -> None:
    load.abort(3)
    load.refuse(2)
    for query, wanted in (
        ('infer_request_success_total{finished_reason="abort"}', 3),
        ("sum(infer_aborted_requests_total)", 3),
        ("sum(infer_request_success_total)", counted.requests + 3),
        ("infer_e2e_request_latency_seconds_count", counted.requests + 3),
        ('infer_admission_rejections_total{reason="invalid"}', 2),
        ('http_requests_total{handler="/v1/completions", status="400"}', 2),
        ("infer_num_requests_running", 0),
        ("infer_kv_cache_usage_perc", 0),
    ):
        until(
            lambda: prometheus.values(query) == [wanted],  # noqa: B023
            lambda: f"{query}: {prometheus.values(query)}, not {wanted}",  # noqa: B023
        )


def test_no_alert_fires_over_a_healthy_server(prometheus: Prometheus) -> None:
    firing = [alert for alert in prometheus.get("alerts")["alerts"] if alert["state"] == "firing"]
    assert firing == []


def test_promtool_accepts_what_was_scraped(load: Load) -> None:
    body = httpx.get(load.url).content
    checked = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
