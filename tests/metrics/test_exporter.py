"""The exposition: complete from the start, the same in both formats, and what promtool accepts."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from infer.types import FailureKind, FinishReason, RejectionKind
from metrics import Metrics
from metrics.names import Kind, table
from tests.metrics.samples import INFO, REQUEST, STEP, replace, samples

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    with Metrics(INFO, handlers=("/v1/completions",)) as made:
        yield made


def test_everything_exists_at_zero_before_anything_happened(metrics: Metrics) -> None:
    found = samples(metrics.render()[1])
    wanted = {
        "infer_request_success_total": ("finished_reason", list(FinishReason)),
        "infer_admission_rejections_total": ("reason", list(RejectionKind)),
        "infer_request_failures_total": ("error_type", list(FailureKind)),
        "infer_aborted_requests_total": ("stage", ["queued", "prefill", "decode"]),
        "infer_graph_steps_total": ("result", ["hit", "miss"]),
        "infer_computed_tokens_total": ("phase", ["prefill", "decode"]),
        "infer_step_duration_seconds_count": ("phase", ["host", "device"]),
    }
    for name, (label, labels) in wanted.items():
        assert all(found[name, frozenset({(label, value)})] == 0 for value in labels), name
    ours = {key: value for key, value in found.items() if key[0].startswith("infer_")}
    nonzero = {name for (name, _), value in ours.items() if value}
    assert nonzero == {"infer_build_info", "infer_cache_config_info", "infer_kv_cache_blocks"}
    assert found["infer_kv_cache_blocks", frozenset({("state", "free")})] == INFO.num_blocks
    http = frozenset({("handler", "/v1/completions"), ("method", "GET"), ("status", "200")})
    assert found["http_requests_total", http] == 0


def test_every_metric_is_there_with_the_labels_of_all(metrics: Metrics) -> None:
    families = list(parse_plain(metrics.render()[1].decode()))
    names = {sample.name for family in families for sample in family.samples}
    ending = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_bucket"}
    for metric in table(INFO).values():
        assert f"infer_{metric.name}{ending[metric.kind]}" in names
    for family in families:
        for sample in family.samples:
            if sample.name.startswith("infer_"):
                assert sample.labels["model_name"] == "tiny"
                assert sample.labels["engine"] == "0"


def test_both_formats_show_the_same(metrics: Metrics) -> None:
    metrics.on_step(STEP)
    metrics.on_request(REQUEST)
    metrics.on_http("/health", "GET", 200)
    plain_type, plain = metrics.render(None)
    open_type, openmetrics = metrics.render(OPENMETRICS)
    assert plain_type.startswith("text/plain; version=0.0.4")
    assert open_type.startswith("application/openmetrics-text")

    def ours(families: Iterator) -> dict:  # type: ignore[type-arg]
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if not sample.name.startswith(("process_", "python_"))
        }

    by_plain, by_open = (
        ours(parse_plain(plain.decode())),
        ours(parse_openmetrics(openmetrics.decode())),
    )
    assert by_plain == by_open
    assert len(by_plain) > 400

    def sample_names(body: bytes) -> set[str]:
        return set(re.findall(r"^([a-zA-Z_:][\w:]*)[{ ]", body.decode(), re.MULTILINE))

    assert sample_names(plain) == sample_names(openmetrics)
    assert not {name for name in sample_names(plain) if name.endswith("_created") or ":" in name}


def test_names_of_models_and_versions_are_escaped() -> None:
    odd = 'a"b\\c\nd ü {x="1"}'
    info = replace(INFO, model_name=odd, versions={"flash-attn": "2.8+cu130"})
    with Metrics(info, engine="7") as metrics:
        families = list(parse_plain(metrics.render()[1].decode()))
    labels = [sample.labels for family in families for sample in family.samples]
    ours = [given for given in labels if "model_name" in given]
    assert {given["model_name"] for given in ours} == {odd}
    assert {given["engine"] for given in ours} == {"7"}
    assert any(given.get("flash_attn_version") == "2.8+cu130" for given in ours)


def test_info_tells_what_runs_and_the_size_of_the_cache(metrics: Metrics) -> None:
    families = {family.name: family for family in parse_plain(metrics.render()[1].decode())}
    (build,) = families["infer_build_info"].samples
    assert build.value == 1
    assert build.labels["torch_version"] == "2.13.0"
    assert build.labels["attention_backend"] == "torch"
    (cache,) = families["infer_cache_config_info"].samples
    assert cache.labels["block_size"] == "16"
    assert cache.labels["num_gpu_blocks"] == "400"


def test_process_metrics_are_this_process(metrics: Metrics) -> None:
    found = samples(metrics.render()[1])
    assert found["process_resident_memory_bytes", frozenset()] > 1e6
    assert found["process_cpu_seconds_total", frozenset()] > 0


def test_routes_beyond_the_limit_share_one_label(metrics: Metrics) -> None:
    for number in range(1000):
        metrics.on_http(f"/made/up/{number}", "BREW", 418)
    found = samples(metrics.render()[1])
    http = {
        labels: value for (name, labels), value in found.items() if name == "http_requests_total"
    }
    assert len(http) < 300
    assert sum(http.values()) == 1000
    assert {dict(labels)["method"] for labels in http} == {"GET", "other"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_complain_about(metrics: Metrics) -> None:
    metrics.on_step(STEP)
    metrics.on_request(REQUEST)
    body = metrics.render()[1]
    checked = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
