"""The panel queries of the three Grafana dashboards that vLLM 0.32 ships, by construction.

Users bring these dashboards along, so each query must find data under vLLM's names. They are built
here from the patterns that those dashboards repeat; Grafana's variables stand as they do there.
"""

from __future__ import annotations

QUANTILES = ("0.99", "0.95", "0.9", "0.5")


def performance_statistics() -> list[str]:
    """Statistics over the whole range, without selecting a model."""
    queries = []
    for name in ("e2e_request_latency", "time_to_first_token", "inter_token_latency"):
        metric = f"vllm:{name}_seconds"
        queries.append(f"rate({metric}_sum[$__interval]) / rate({metric}_count[$__interval])")
        queries += [
            f"histogram_quantile({q}, sum by(le) (rate({metric}_bucket[$__range])))"
            for q in ("0.99", "0.90", "0.50")
        ]
        queries.append(
            f"(sum(increase({metric}_sum[$__range])) / sum(increase({metric}_count[$__range])))"
        )
    queries += [
        f"histogram_quantile({q}, sum by(le) "
        "(rate(vllm:inter_token_latency_seconds_bucket[$__interval])))"
        for q in ("0.50", "0.90", "0.99")
    ]
    counters = ("generation_tokens_total", "prompt_tokens_total", "iteration_tokens_total_count")
    return queries + [f"rate(vllm:{name}[$__interval])" for name in counters]


def query_statistics() -> list[str]:
    """Rates and percentiles by deployment."""
    chosen = '{model_name=~"$Deployment_id"}[$__rate_interval]'
    queries = []
    for name in ("request_success_total", "prompt_tokens_total", "generation_tokens_total"):
        queries.append(f"sum by (model_name) (rate(vllm:{name}{chosen}))")
        queries.append(f"sum(rate(vllm:{name}{chosen}))")
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens"):
        queries += [
            f"histogram_quantile({q}, sum by(le, model_name) (rate(vllm:{name}_bucket{chosen})))"
            for q in ("0.50", "0.90", "0.99")
        ]
    queries.append(f"sum by (le, model_name) (rate(vllm:request_prompt_tokens_bucket{chosen}))")
    queries.append(
        f"sum(rate(vllm:prompt_tokens_total{chosen})) "
        f"/ sum(rate(vllm:request_success_total{chosen}))"
    )
    return queries


def grafana() -> list[str]:
    """One model, over the rate interval."""
    model = '{model_name="$model_name"}'
    chosen = f"{model}[$__rate_interval]"
    queries = []
    for name in (
        "e2e_request_latency",
        "inter_token_latency",
        "request_time_per_output_token",
        "time_to_first_token",
    ):
        metric = f"vllm:{name}_seconds"
        queries += [
            f"histogram_quantile({q}, sum by(le) (rate({metric}_bucket{chosen})))"
            for q in QUANTILES
        ]
        queries.append(f"rate({metric}_sum{chosen}) / rate({metric}_count{chosen})")
    queries += [
        f"rate(vllm:{name}{chosen})"
        for name in (
            "prompt_tokens_total",
            "generation_tokens_total",
            "request_queue_time_seconds_sum",
            "request_prefill_time_seconds_sum",
            "request_decode_time_seconds_sum",
            "request_max_num_generation_tokens_sum",
        )
    ]
    queries += [
        f"vllm:{name}{model}"
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    ]
    queries += [
        f"sum by(le) (increase(vllm:request_{kind}_tokens_bucket{chosen}))"
        for kind in ("prompt", "generation")
    ]
    queries.append(f"sum by(finished_reason) (increase(vllm:request_success_total{chosen}))")
    return queries


def all_queries() -> list[str]:
    return [*performance_statistics(), *query_statistics(), *grafana()]
