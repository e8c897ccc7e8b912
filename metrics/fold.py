"""How one observation changes the numbers: the definitions of the metrics, in code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from infer.types import FinishReason, RejectionKind, RequestStats, StepStats
from metrics.observations import FirstToken, HttpAnswer, Observation, Reported, Submitted
from metrics.reports import ReportFollower
from metrics.series import Series
from metrics.window import Window

MAX_HANDLERS = 256
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
OTHER = "other"


class Fold:
    """Applies observations to the series since the start and to the window of the last minutes.

    After the last ``apply`` of a run comes one ``flush``; only then are the numbers whole. Not
    thread-safe; its owner holds a lock.
    """

    __slots__ = ("_follower", "_gaps", "_handlers", "_told", "http", "series", "window")

    def __init__(self, series: Series, window: Window, handlers: Iterable[str] = ()) -> None:
        self.series = series
        self.window = window
        self._told: set[str] = set()  # running requests whose first token is counted already
        self._gaps: list[float] = []
        self._follower = ReportFollower()
        self._handlers = {OTHER, *handlers}
        self.http: Counter[tuple[str, str, str]] = Counter(
            {(handler, "GET", "200"): 0 for handler in sorted(self._handlers)}
        )

    def apply(self, at: float, observation: Observation) -> None:
        """Count ``observation``, made at ``at`` (monotonic seconds)."""
        if isinstance(observation, StepStats):
            self._step(at, observation)
        elif isinstance(observation, RequestStats):
            self._request(at, observation)
        elif isinstance(observation, FirstToken):
            self._told.add(observation.request_id)
            self._time_to_first_token(at, observation.ttft_s)
        elif isinstance(observation, HttpAnswer):
            self._http_answer(observation)
        elif isinstance(observation, Reported):
            for told in self._follower.follow(observation.report):
                self.apply(at, told)
        elif isinstance(observation, Submitted):
            self._follower.submitted(observation)
        elif isinstance(observation, RejectionKind):
            self.series.add("admission_rejections", 1, observation)
        else:
            self.series.add("request_failures", 1, observation)

    def flush(self, at: float) -> None:
        """Count what ``apply`` put by: tokens are too many to be counted one request at a time."""
        if self._gaps:
            gaps = np.array(self._gaps)
            self._gaps.clear()
            self.series.observe_all("inter_token_latency_seconds", gaps)
            self.window.observe_all(at, "itl", gaps)

    def _http_answer(self, answer: HttpAnswer) -> None:
        handler = answer.handler
        if handler not in self._handlers:
            if len(self._handlers) < MAX_HANDLERS:
                self._handlers.add(handler)
            else:
                handler = OTHER
        method = answer.method if answer.method in METHODS else OTHER
        self.http[handler, method, str(answer.status)] += 1

    def _step(self, at: float, step: StepStats) -> None:
        series = self.series
        used = step.num_blocks - step.num_free_blocks - step.num_cached_blocks
        series.set("num_requests_running", step.num_running)
        series.set("num_requests_waiting", step.num_waiting)
        series.set("kv_cache_usage_perc", step.kv_usage)
        series.set("kv_cache_blocks", step.num_free_blocks, "free")
        series.set("kv_cache_blocks", used, "used")
        series.set("kv_cache_blocks", step.num_cached_blocks, "cached")
        series.add("generation_tokens", step.num_generated_tokens)
        series.add("computed_tokens", step.num_prefill_tokens, "prefill")
        series.add("computed_tokens", step.num_decode_tokens, "decode")
        series.add("prefix_cache_queries", step.prefix_queries)
        series.add("prefix_cache_hits", step.prefix_hits)
        series.add("num_preemptions", step.num_preempted)
        series.add("recompiles", step.num_recompiles)
        if step.num_sequences:  # else it only admitted, aborted or freed
            series.add("graph_steps", 1, "hit" if step.graph_hit else "miss")
            series.observe("iteration_tokens", step.num_prefill_tokens + step.num_decode_tokens)
            series.observe("batch_size", step.num_sequences)
            series.observe("step_duration_seconds", step.host_s, "host")
            series.observe("step_duration_seconds", step.device_s, "device")
        self.window.step(at, step)

    def _request(self, at: float, request: RequestStats) -> None:
        series = self.series
        series.add("request_success", 1, request.finish_reason)
        if request.finish_reason is FinishReason.ABORT:
            series.add("aborted_requests", 1, _stage(request))
        if request.scheduled is not None:
            series.add("prompt_tokens", request.num_prompt_tokens)
            series.add("prompt_tokens_cached", request.num_cached_tokens)
        self._request_sizes(request)
        self._request_times(at, request)
        self.window.count(at, "requests")

    def _request_sizes(self, request: RequestStats) -> None:
        series = self.series
        computed = max(0, request.num_prompt_tokens - request.num_cached_tokens)
        longest = request.num_generated_tokens if request.n == 1 else request.longest_choice
        series.observe("request_prompt_tokens", request.num_prompt_tokens)
        series.observe("request_generation_tokens", request.num_generated_tokens)
        series.observe("request_params_n", request.n)
        series.observe("request_num_preemptions", request.num_preemptions)
        if request.scheduled is not None:
            series.observe("request_prefill_kv_computed_tokens", computed)
        if longest is not None:
            series.observe("request_max_num_generation_tokens", longest)
        if request.max_tokens is not None:
            series.observe("request_params_max_tokens", request.max_tokens)

    def _request_times(self, at: float, request: RequestStats) -> None:
        scheduled, first, last = request.scheduled, request.first_token, request.last_token
        self._span("e2e_request_latency_seconds", request.arrival, request.finished)
        self.window.observe(at, "e2e", request.finished - request.arrival)
        self._span("request_queue_time_seconds", request.arrival, scheduled)
        self._span("request_prefill_time_seconds", scheduled, first)
        self._span("request_decode_time_seconds", first, last)
        self._span("request_inference_time_seconds", scheduled, last)
        if request.ttft_s is not None and request.request_id not in self._told:
            self._time_to_first_token(at, request.ttft_s)
        self._told.discard(request.request_id)
        if request.tpot_s is not None:
            self.series.observe("request_time_per_output_token_seconds", request.tpot_s)
            self.window.observe(at, "tpot", request.tpot_s)
        self._gaps += request.inter_token_s

    def _span(self, name: str, start: float | None, end: float | None) -> None:
        if start is not None and end is not None:
            self.series.observe(name, end - start)

    def _time_to_first_token(self, at: float, ttft_s: float) -> None:
        self.series.observe("time_to_first_token_seconds", ttft_s)
        self.window.observe(at, "ttft", ttft_s)


def _stage(request: RequestStats) -> str:
    """How far an aborted request had come."""
    if request.first_token is not None:
        return "decode"
    return "queued" if request.scheduled is None else "prefill"
