"""The shipped files fit each other, the metrics table, and the tools that read them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from metrics.names import Kind, table
from tests.metrics.samples import INFO
from tests.metrics.vllm_queries import all_queries

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PROMETHEUS, GRAFANA = CONFIGS / "prometheus", CONFIGS / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "purestep.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="Debian's package prometheus is not installed (configs/system-deps.sh)",
)


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@promtool
@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "recording.yml", "alerts.yml"),
        ("test", "rules", "rules.test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts(command: tuple[str, ...]) -> None:
    checked = subprocess.run(["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "warning" not in (checked.stdout + checked.stderr).lower()


def test_every_alert_is_tested_to_fire() -> None:
    groups = load_yaml(PROMETHEUS / "alerts.yml")["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    fired = {
        case["alertname"]
        for test in load_yaml(PROMETHEUS / "rules.test.yml")["tests"]
        for case in test.get("alert_rule_test", [])
        if case["exp_alerts"]
    }
    assert fired == alerts


def exported_names() -> set[str]:
    """Every series name of ours, as PromQL sees it."""
    endings = {
        Kind.COUNTER: ("_total",),
        Kind.GAUGE: ("",),
        Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
    }
    names = {
        f"infer_{metric.name}{ending}"
        for metric in table(INFO).values()
        for ending in endings[metric.kind]
    }
    return names | {"infer_build_info", "infer_cache_config_info"}


def test_rules_and_panels_name_only_what_is_exported() -> None:
    texts = [*QUERIES, json.dumps(DASHBOARD["templating"])]
    for path in ("recording.yml", "alerts.yml"):
        for group in load_yaml(PROMETHEUS / path)["groups"]:
            texts += [rule["expr"] for rule in group["rules"]]
    used = {name for text in texts for name in re.findall(r"(?<![\w:])infer_\w+(?![\w:])", text)}
    assert len(used) > 40
    assert used <= exported_names(), used - exported_names()


def relabelled(name: str) -> str | None:
    """What Prometheus makes of a name in the job that speaks vLLM's names; None: dropped."""
    jobs = load_yaml(PROMETHEUS / "prometheus.yml")["scrape_configs"]
    (job,) = (job for job in jobs if job["job_name"] == "purestep-as-vllm")
    for rule in job["metric_relabel_configs"]:
        assert rule["source_labels"] == ["__name__"]
        match = re.fullmatch(rule["regex"], name)
        if rule.get("action", "replace") == "keep":
            if match is None:
                return None
        elif match is not None:
            name = match.expand(rule["replacement"].replace("$", "\\"))
    return name


def test_relabelled_names_are_those_of_vllms_dashboards() -> None:
    made = {relabelled(name) for name in exported_names()}
    asked = {name for query in all_queries() for name in re.findall(r"vllm:\w+", query)}
    assert asked <= made, asked - made
    assert relabelled("process_cpu_seconds_total") is None


def test_both_jobs_scrape_where_the_server_listens() -> None:
    jobs = load_yaml(PROMETHEUS / "prometheus.yml")["scrape_configs"]
    targets = [config["targets"] for job in jobs for config in job["static_configs"]]
    assert targets == [["127.0.0.1:8000"]] * 2
    assert all("metrics_path" not in job for job in jobs)  # Prometheus' default is /metrics


def test_dashboard_finds_its_data_source() -> None:
    (source,) = load_yaml(GRAFANA / "provisioning" / "datasources" / "prometheus.yaml")[
        "datasources"
    ]
    (variable,) = (v for v in DASHBOARD["templating"]["list"] if v["type"] == "datasource")
    assert variable["name"] == "datasource"
    assert variable["query"] == source["type"] == "prometheus"
    assert variable["current"]["value"] == source["uid"]
    assert "__inputs" not in DASHBOARD  # Grafana leaves them unresolved in provisioned files
    uses = [panel["datasource"] for panel in PANELS]
    uses += [target["datasource"] for panel in PANELS for target in panel["targets"]]
    uses += [v["datasource"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    assert all(use == {"type": "prometheus", "uid": "${datasource}"} for use in uses)


def test_scrape_interval_is_the_one_grafana_is_told() -> None:
    (source,) = load_yaml(GRAFANA / "provisioning" / "datasources" / "prometheus.yaml")[
        "datasources"
    ]
    config = load_yaml(PROMETHEUS / "prometheus.yml")
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]


def test_panels_are_whole_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    identifiers = [panel["id"] for panel in panels]
    assert len(set(identifiers)) == len(identifiers)
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert all(x < 24 for x, _ in cells)
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["description"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        if panel["type"] == "timeseries":
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


@pytest.mark.parametrize("query", QUERIES)
def test_queries_keep_the_rules_for_queries(query: str) -> None:
    """Every selector selects; a range follows the zoom; sums are divided by counts; shares are
    never added up."""
    for name, selector in re.findall(r"\b((?:infer|process|python|http)_\w+)(\{[^}]*\})?", query):
        assert 'instance=~"$instance"' in selector, name
        if name.startswith("infer_"):
            assert 'model_name="$model_name"' in selector, name
    assert set(re.findall(r"\[([^\]]+)\]", query)) <= {"$__rate_interval"}
    if "_sum{" in query:
        assert re.search(r"_sum\{.*/ sum\(rate\(\w+_count\{", query)
    assert not re.search(r"sum.*_perc", query)
    for name in re.findall(r"infer_\w+_total", query):
        assert re.search(rf"(rate|increase)\({name}\{{", query), name


def test_units_are_those_of_the_metrics() -> None:
    """Seconds are shown as seconds, shares as percent of 1."""
    for panel in PANELS:
        if panel["type"] != "timeseries":
            continue
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            names = re.findall(r"infer_\w+", target["expr"])
            seconds = [name for name in names if "_seconds_" in name]
            assert (unit == "s") == bool(seconds), panel["title"]
            share = "_perc{" in target["expr"] or "_hits_" in target["expr"]
            assert (unit == "percentunit") == share, panel["title"]


def test_compose_mounts_what_exists_where_it_is_looked_for() -> None:
    services = load_yaml(CONFIGS / "compose.yaml")["services"]
    assert set(services) == {"server", "prometheus", "grafana"}
    mounts = {}
    for service in services.values():
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                assert (CONFIGS / source).is_dir(), source
                mounts[target] = CONFIGS / source
    (provider,) = load_yaml(GRAFANA / "provisioning" / "dashboards" / "purestep.yaml")["providers"]
    assert (mounts[provider["options"]["path"]] / "purestep.json").is_file()
    assert (mounts["/etc/grafana/provisioning"] / "datasources").is_dir()
    (flag,) = (f for f in services["prometheus"]["command"] if f.startswith("--config.file="))
    folder, name = flag.removeprefix("--config.file=").rsplit("/", 1)
    assert (mounts[folder] / name).is_file()
    build = services["server"]["build"]
    assert (CONFIGS / build["context"] / build["dockerfile"]).is_file()


def test_compose_is_reachable_from_this_machine_alone() -> None:
    services = load_yaml(CONFIGS / "compose.yaml")["services"]
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    (source,) = load_yaml(GRAFANA / "provisioning" / "datasources" / "prometheus.yaml")[
        "datasources"
    ]
    assert source["url"] == "http://127.0.0.1:9090"
