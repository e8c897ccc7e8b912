"""The numbers in Prometheus' two text formats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

from infer.types import EngineInfo
from metrics.names import COMMON_LABELS, PREFIX, Kind, Metric
from metrics.series import Histogram, Series

HTTP_LABELS = ("handler", "method", "status")
HttpCounts = Mapping[tuple[str, str, str], int]


class Families:
    """A collector of values fixed at its construction, for one exposition."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        yield from self._families


def process_families() -> list[Family]:
    """CPU, memory, open files and garbage collection of this process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return list(registry.collect())


def engine_families(
    table: Mapping[str, Metric], series: Series, info: EngineInfo, engine: str
) -> list[Family]:
    """Everything about one engine, labelled with its model and number."""
    common = (info.model_name, engine)
    families = [_family(metric, series, common) for metric in table.values()]
    return [*families, *_info_families(info, common)]


def http_families(counts: HttpCounts) -> list[Family]:
    """Requests by route, method and status."""
    family = CounterMetricFamily(
        "http_requests", "HTTP requests answered, by route.", labels=HTTP_LABELS
    )
    for labels, count in counts.items():
        family.add_metric(labels, count)
    return [family]


def expose(families: list[Family], accept: str | None) -> tuple[str, bytes]:
    """Content type and body in the format that an Accept header prefers."""
    registry = CollectorRegistry()
    registry.register(Families(families))
    encode, content_type = choose_encoder(accept or "")
    return content_type, encode(registry)


def _family(metric: Metric, series: Series, common: tuple[str, ...]) -> Family:
    name, labels = PREFIX + metric.name, (*COMMON_LABELS, *metric.labels)
    if metric.kind is Kind.HISTOGRAM:
        family = HistogramMetricFamily(name, metric.help, labels=labels)
        for values, histogram in series.histograms[metric.name].items():
            family.add_metric((*common, *values), _buckets(histogram), histogram.sum)
        return family
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    single = kind(name, metric.help, labels=labels)
    for values, value in series.values[metric.name].items():
        single.add_metric((*common, *values), value)
    return single


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = (*map(floatToGoString, histogram.bounds), "+Inf")
    return list(zip(bounds, histogram.cumulative(), strict=True))


def _info_families(info: EngineInfo, common: tuple[str, ...]) -> list[Family]:
    build = {
        "architecture": info.architecture,
        "device": info.device,
        "dtype": info.dtype,
        "attention_backend": info.attention_backend,
        "tp_size": info.tp_size,
        "pipeline_depth": info.pipeline_depth,
        "compiled": info.compiled,
        **{_label(package): version for package, version in sorted(info.versions.items())},
    }
    cache = {
        "block_size": info.block_size,
        "num_gpu_blocks": info.num_blocks,  # vLLM's label, which load balancers read
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
    }
    return [
        _info("build_info", "What runs the model, as labels; always 1.", common, build),
        _info("cache_config_info", "KV cache and limits, as labels; always 1.", common, cache),
    ]


def _info(name: str, text: str, common: tuple[str, ...], labels: Mapping[str, object]) -> Family:
    family = GaugeMetricFamily(PREFIX + name, text, labels=(*COMMON_LABELS, *labels))
    family.add_metric((*common, *map(str, labels.values())), 1)
    return family


def _label(package: str) -> str:
    """A package's name as a label name."""
    return re.sub(r"\W", "_", package, flags=re.ASCII) + "_version"
