"""What crosses the public boundary: requests going in, reports and statistics coming out.

Everything here is a frozen value without torch, so that metrics, dashboards and other processes can
import it. Times are seconds on a monotonic clock of the process that measured them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from infer.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_LOGPROBS = 20
MAX_N = 64
COUNTS = ("top_k", "seed", "n", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an EOS or stop token, or a stop string
    LENGTH = "length"  # max_tokens or max_model_len reached
    ABORT = "abort"  # the caller asked for it
    ERROR = "error"  # the engine failed under it


def _check(ok: bool, name: str, value: object, limit: str, remedy: str = "") -> None:
    if not ok:
        tail = f"; {remedy}" if remedy else ""
        raise RequestError(f"{name} is {value!r}, it must be {limit}{tail}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request picks its tokens. ``None`` means "the model's default".

    Model defaults come from the checkpoint's ``generation_config.json`` and fall back to
    temperature 1, no truncation, no penalties. ``temperature=0`` is greedy.

    Raises:
        RequestError: a field is out of range.
    """

    temperature: float | None = None
    top_k: int | None = None  # 0 or -1: off
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None  # None: derived from the engine's seed and the request's arrival number
    n: int = 1
    max_tokens: int | None = None  # None: up to max_model_len
    min_tokens: int = 0  # no EOS, stop token or stop string before this many
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # top N beside the sampled token's own; raw (before sampling edits)
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for name, low, high, text in (
            ("temperature", 0.0, 100.0, "a finite number from 0 to 100"),
            ("top_p", 0.0, 1.0, "above 0 and at most 1"),
            ("min_p", 0.0, 1.0, "from 0 to 1"),
            ("repetition_penalty", 0.0, 10.0, "above 0 and at most 10"),
            ("presence_penalty", -2.0, 2.0, "from -2 to 2"),
            ("frequency_penalty", -2.0, 2.0, "from -2 to 2"),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            ok = isinstance(value, (int, float)) and math.isfinite(value) and low <= value <= high
            if name in ("top_p", "repetition_penalty"):
                ok = ok and value > 0
            _check(ok, name, value, text)
        for name in COUNTS:
            value = getattr(self, name)
            _check(value is None or hasattr(value, "__index__"), name, value, "a whole number")
        top_k = self.top_k
        _check(top_k is None or top_k >= -1, "top_k", top_k, "-1 or 0 (off) or a positive count")
        _check(1 <= self.n <= MAX_N, "n", self.n, f"from 1 to {MAX_N}")
        _check(
            self.max_tokens is None or self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "at least 1",
            "leave it out to generate up to the context length",
        )
        _check(
            0 <= self.min_tokens <= (self.max_tokens or self.min_tokens),
            "min_tokens",
            self.min_tokens,
            f"from 0 to max_tokens ({self.max_tokens})",
        )
        _check(
            len(self.stop) <= MAX_STOP_STRINGS,
            "stop",
            f"{len(self.stop)} strings",
            f"at most {MAX_STOP_STRINGS} strings",
        )
        for text in self.stop:
            _check(
                isinstance(text, str)
                and 0 < len(text.encode("utf-8", "replace")) <= MAX_STOP_BYTES,
                "stop",
                text,
                f"non-empty strings of at most {MAX_STOP_BYTES} bytes",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(
                value is None or 0 <= value <= MAX_LOGPROBS,
                name,
                value,
                f"from 0 to {MAX_LOGPROBS}",
            )
        _check(
            self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "from 0 to 2**63 - 1"
        )
        for token, bias in (self.logit_bias or {}).items():
            ok = isinstance(token, int) and math.isfinite(bias) and -100 <= bias <= 100
            _check(ok, "logit_bias", {token: bias}, "token ids mapped to numbers from -100 to 100")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue. ``params.n`` continuations share the prompt's KV blocks."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # smaller runs earlier
    cache_salt: str | None = None  # prefix blocks are shared only under the same salt

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", tuple(self.prompt_token_ids))
        _check(isinstance(self.params, SamplingParams), "params", self.params, "SamplingParams")
        _check(
            len(self.prompt_token_ids) > 0,
            "prompt",
            "empty",
            "at least one token long",
            "send a BOS token if the model has one",
        )
        limit = 1 << 20
        _check(abs(self.priority) <= limit, "priority", self.priority, f"within +-{limit}")


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the raw distribution, and its rank (1 is the best)."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One accepted token of choice ``index`` of a request."""

    request_id: str
    index: int
    token_id: int
    logprob: Logprob | None = None
    top_logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """Choice ``index`` of a request ended; it comes after its last token."""

    request_id: str
    index: int
    reason: FinishReason
    stop: str | int | None = None  # the stop string or stop token that matched
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobsEvent:
    """Log-probabilities of prompt positions 1.. (position 0 has none), once a prompt is computed.

    ``logprobs[i]`` is the pair (the prompt's own token, the top alternatives) at position i + 1.
    """

    request_id: str
    logprobs: tuple[tuple[Logprob, tuple[Logprob, ...]], ...]


Event = TokenEvent | FinishEvent | PromptLogprobsEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One engine step, for observers. Counts are of the state after the step."""

    step: int
    time: float  # monotonic seconds at collect
    num_running: int  # admitted sequences holding or about to get KV
    num_waiting: int  # requests not admitted, and preempted sequences
    num_prefill_tokens: int  # positions computed for prompts (and recomputation)
    num_decode_tokens: int  # positions computed for sequences that generate
    num_sequences: int  # sequences in this step's batch
    num_generated_tokens: int  # tokens accepted
    num_preempted: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int  # reusable prefix blocks nobody holds
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # of which found
    host_s: float  # schedule + build + collect
    device_s: float  # launch to values read, less the host's own work
    graph_hit: bool = False
    num_recompiles: int = 0  # since the step before
    first_token_ids: tuple[str, ...] = ()  # requests admitted into their first step (queue ends)

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks held by sequences, 0 to 1."""
        used = self.num_blocks - self.num_free_blocks - self.num_cached_blocks
        return used / self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """A finished request as its front end saw it (times monotonic, seconds, one process)."""

    request_id: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int  # over all choices
    num_preemptions: int
    n: int
    max_tokens: int | None
    arrival: float  # request received, before tokenization
    scheduled: float | None  # first step that ran it
    first_token: float | None
    last_token: float | None
    finished: float
    inter_token_s: tuple[float, ...] = ()  # gaps between streamed token events, all choices
    longest_choice: int | None = None  # tokens of the longest choice; None where n > 1 is unknown

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (tokens - 1) of one choice; None for one-token answers."""
        tokens = self.num_generated_tokens
        if self.first_token is None or self.last_token is None or tokens <= self.n:
            return None
        return (self.last_token - self.first_token) / (tokens / self.n - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine is, for banners, ``/health``, info metrics and the dashboard's model page."""

    model_name: str
    architecture: str
    device: str
    dtype: str
    attention_backend: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    weight_bytes: int
    vocab_size: int
    tp_size: int
    pipeline_depth: int
    compiled: bool
    versions: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)  # the model configuration, for display
    model_path: str | None = None  # the checkpoint's folder, if it has one
    sampling: Mapping[str, Any] = field(default_factory=dict)  # the checkpoint's own defaults


class RejectionKind(StrEnum):
    """Why a front end refused a request before the engine saw it."""

    INVALID = "invalid"  # a RequestError: the caller must change it (HTTP 400, 404, 422)
    CAPACITY = "capacity"  # the queue is full (429)
    UNAUTHORIZED = "unauthorized"  # no or a wrong API key (401)
    TOO_LARGE = "too_large"  # body or headers beyond the limit (413, 431)
    SHUTDOWN = "shutdown"  # the engine is stopping or not ready (503)


class FailureKind(StrEnum):
    """Why an accepted request ended without its answer."""

    ENGINE = "engine"  # a step failed
    WORKER = "worker"  # a process of the engine died or hung
    DEADLINE = "deadline"  # the request's own time limit passed
    INTERNAL = "internal"  # a fault in the front end


class Observer(Protocol):
    """Who watches an engine. Every call returns within microseconds, from any thread."""

    def on_step(self, stats: StepStats, /) -> None: ...

    def on_first_token(self, request_id: str, ttft_s: float, /) -> None:
        """Optional early news of what this request's ``RequestStats`` will say again."""

    def on_request(self, stats: RequestStats, /) -> None:
        """A request ended, whatever its finish reason; once a request."""

    def on_rejection(self, kind: RejectionKind, /) -> None: ...

    def on_failure(self, kind: FailureKind, /) -> None: ...
