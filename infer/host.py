"""The host half of an engine's state and the transitions that need no device."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from infer import blocks, prefix, sequences
from infer.blocks import BlockPool, Int32
from infer.cohort import Cohort
from infer.config import GenerationDefaults, Limits
from infer.errors import ContextLengthError, RequestError, StateError
from infer.persistent import Fifo
from infer.prefix import Draft, PrefixIndex
from infer.sequences import FREE, PENALTIES, PROMPT_LOGPROBS, Sequences, Waiting, WaitingRequest
from infer.types import FinishEvent, FinishReason, Request, SamplingParams

MAX_PENALTY_SLOTS = 64  # rows of device state for penalties, bias and min_tokens


@dataclass(frozen=True, slots=True)
class Host:
    """Queue, rows, blocks and prefix index, with the marks that the next step acts on."""

    waiting: Waiting
    seqs: Sequences
    pool: BlockPool
    prefix: PrefixIndex
    step: int = 0  # number of the next step
    arrivals: int = 0  # requests ever submitted
    in_flight: int = 0  # steps launched and not collected
    aborts: Fifo[str] = field(default_factory=Fifo)  # request ids to end at the next step
    dirty: tuple[int, ...] = field(default=())  # rows the device has not heard of (fork, restore)
    cohort: Cohort | None = None  # of the last step, if that was all rows decoding

    def __repr__(self) -> str:
        """In a line: written out, its arrays fill screens."""
        return (
            f"<step {self.step} is next, {len(self.seqs.rows_of)} requests admitted, "
            f"{len(self.waiting)} waiting, "
            f"{self.pool.num_available} of {self.pool.num_blocks} blocks available>"
        )


def make(limits: Limits) -> Host:
    """An empty host state."""
    return Host(
        waiting=Waiting(),
        seqs=sequences.make(limits.max_num_seqs),
        pool=blocks.make(limits.num_blocks),
        prefix=prefix.make(limits.num_blocks),
    )


def resolve(params: SamplingParams, defaults: GenerationDefaults) -> SamplingParams:
    """``params`` with every field that the model has a default for filled."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    changes = {n: getattr(defaults, n) for n in names if getattr(params, n) is None}
    if (params.top_k or 0) < 0:
        changes["top_k"] = 0
    return replace(params, **changes) if changes else params


def mixed_seed(seed: int, arrival: int) -> int:
    """The seed of a request that brings none of its own; distinct for distinct arrivals."""
    return (seed * 0x9E3779B97F4A7C15 + arrival) % 2**63


def num_slots(limits: Limits) -> int:
    """Penalty rows the device keeps."""
    return min(limits.max_num_seqs, MAX_PENALTY_SLOTS)


def _refuse(
    request: Request, message: str, param: str, kind: type[RequestError] = RequestError
) -> RequestError:
    return kind(f"request {request.request_id!r}: {message}", param=param)


def _token_array(request: Request, vocab_size: int) -> Int32:
    """The prompt's token ids, read-only, none of them outside the vocabulary."""
    ids = request.prompt_token_ids
    try:
        packed = struct.pack(f"{len(ids)}i", *ids)  # three times as fast as numpy's conversion
    except struct.error:
        packed = b""
    tokens = np.frombuffer(packed, np.int32)
    if tokens.size and tokens.view(np.uint32).max() < vocab_size and type(ids[0]) is not bool:
        return tokens
    found = np.asarray(ids)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise _refuse(request, "the prompt must be a list of token ids, whole numbers", "prompt")
    bad = found[(found < 0) | (found >= vocab_size)]
    if bad.size:
        raise _refuse(
            request,
            f"token id {bad[0]} is out of range, the vocabulary has {vocab_size} entries",
            "prompt",
        )
    return found.astype(np.int32)


def _validated(
    request: Request, params: SamplingParams, limits: Limits, arrival: int
) -> WaitingRequest:
    """The request with ``params``, which are its own resolved, and what its scheduling needs."""
    length = len(request.prompt_token_ids)
    if length >= limits.max_model_len:
        raise _refuse(
            request,
            f"the prompt has {length} tokens and max_model_len is {limits.max_model_len}, "
            "which must also hold the answer; shorten it or raise max_model_len",
            "prompt",
            ContextLengthError,
        )
    tokens = _token_array(request, limits.vocab_size)
    room = limits.max_model_len - length
    if params.max_tokens is not None and params.max_tokens > room:
        raise _refuse(
            request,
            f"prompt ({length}) and max_tokens ({params.max_tokens}) exceed max_model_len "
            f"({limits.max_model_len}) by {params.max_tokens - room}; "
            "lower max_tokens, shorten the prompt or raise max_model_len",
            "max_tokens",
            ContextLengthError,
        )
    if params.min_tokens > room:
        raise _refuse(
            request, f"min_tokens {params.min_tokens} exceeds the {room} left", "min_tokens"
        )
    outside = [t for t in params.logit_bias or () if not 0 <= t < limits.vocab_size]
    outside += [t for t in params.stop_token_ids if not 0 <= t < limits.vocab_size]
    if outside:
        raise _refuse(
            request,
            f"token id {outside[0]} in logit_bias or stop_token_ids is out of range, "
            f"the vocabulary has {limits.vocab_size} entries",
            "logit_bias",
        )
    need = sequences.sampling_needs(params)
    rows = num_slots(limits) if need & PENALTIES else limits.max_num_seqs
    if params.n > rows:
        raise _refuse(
            request,
            f"n is {params.n}, this engine runs at most {rows} such sequences at once; "
            "lower n or raise max_num_seqs",
            "n",
        )
    total = length + (room if params.max_tokens is None else params.max_tokens)
    capacity = limits.num_blocks * limits.block_size
    if total > capacity:
        raise _refuse(
            request,
            f"prompt and answer may reach {total} tokens and the KV pool holds {capacity} "
            f"({limits.num_blocks} blocks of {limits.block_size}); lower max_tokens, shorten the "
            "prompt or raise num_blocks",
            "max_tokens",
        )
    return WaitingRequest(
        request=replace(request, params=params),
        tokens=tokens,
        block_size=limits.block_size if limits.prefix_caching else None,
        max_total_tokens=total,
        rank=arrival + request.priority * limits.priority_span,
        seed=mixed_seed(limits.seed, arrival) if params.seed is None else params.seed,
        need=need,
    )


def submit(host: Host, requests: Request | Iterable[Request], limits: Limits) -> Host:
    """Queue ``requests``; all of them or, if one is refused, none.

    Raises:
        RequestError: a request that could never run, naming the limit it breaks.
    """
    batch: Sequence[Request] = [requests] if isinstance(requests, Request) else list(requests)
    accepted: dict[str, WaitingRequest] = {}
    resolved: dict[int, SamplingParams] = {}  # by identity: many requests share their parameters
    for arrival, request in enumerate(batch, host.arrivals):
        name = request.request_id
        if name in accepted or is_live(host, name):
            raise _refuse(
                request, "this id is in use; ids of live requests are unique", "request_id"
            )
        params = resolved.get(id(request.params)) or resolve(request.params, limits.defaults)
        resolved[id(request.params)] = params
        accepted[name] = _validated(request, params, limits, arrival)
    aborts = host.aborts
    if len(aborts):  # marks of ended namesakes do not count
        aborts = aborts.drop(len(aborts)).extend([n for n in aborts if n not in accepted])
    return replace(
        host,
        waiting=sequences.enqueue(host.waiting, accepted.values()),
        arrivals=host.arrivals + len(batch),
        aborts=aborts,
    )


def is_live(host: Host, request_id: str) -> bool:
    """Whether a request of this id waits or runs."""
    return request_id in host.seqs.rows_of or request_id in host.waiting.live


def abort(host: Host, request_id: str) -> Host:
    """Mark ``request_id`` to end at the next step. An id that is not live changes nothing."""
    if not is_live(host, request_id):
        return host
    return replace(host, aborts=host.aborts.append(request_id))


def has_work(host: Host) -> bool:
    """Whether a step would do something, or a launched one must be collected."""
    return bool(len(host.waiting) or host.seqs.rows_of or host.in_flight)


def fork(host: Host, request_id: str, new_id: str, limits: Limits) -> Host:
    """A second sequence ``new_id`` that continues from where ``request_id`` is.

    It shares every block; the last partial one is copied when either first writes to it. Its seed
    is derived from its source's and its arrival number, so that sampled forks differ from their
    source and from each other.

    Raises:
        StateError: the source has launched tokens, or log-probabilities of its prompt, that were
            not collected.
        RequestError: unknown source, an id in use, or no free row.
    """
    rows = host.seqs.rows_of.get(request_id)
    if rows is None:
        raise RequestError(f"cannot fork {request_id!r}: it is not running", param="request_id")
    if is_live(host, new_id):
        raise RequestError(f"cannot fork to {new_id!r}: this id is in use", param="request_id")
    source = rows[0]
    if host.seqs.num_pending[source] or _tells_prompt(host, source):
        raise StateError(f"cannot fork {request_id!r} with a step in flight; collect it first")
    free = np.flatnonzero(host.seqs.status == FREE)
    if not free.size:
        raise RequestError(
            f"cannot fork {request_id!r}: all {limits.max_num_seqs} rows are taken; "
            "raise max_num_seqs or wait",
            param="request_id",
        )
    seqs = sequences.copy(host.seqs)
    draft = Draft.of(host.pool, host.prefix)
    row = int(free[0])
    slots = free_slots(seqs, limits, 1) if seqs.need[source] & PENALTIES else [-1]
    if not slots:
        raise RequestError(
            f"cannot fork {request_id!r}: all {num_slots(limits)} penalty rows are taken; "
            "wait, or send requests without penalties, bias and min_tokens",
            param="request_id",
        )
    request = seqs.request[source]
    request = replace(request, request_id=new_id, params=replace(request.params, n=1))
    adopt(seqs, draft, source, row, request, choice=0, slot=slots[0])
    seqs.seed[row] = mixed_seed(int(seqs.seed[source]), host.arrivals)
    seqs.rank[row] = host.arrivals + request.priority * limits.priority_span
    seqs.rows_of[new_id] = (row,)  # type: ignore[index]  # private copy
    pool, index = draft.freeze()
    return replace(
        host,
        seqs=seqs,
        pool=pool,
        prefix=index,
        arrivals=host.arrivals + 1,
        dirty=(*host.dirty, row),
    )


def _tells_prompt(host: Host, row: int) -> bool:
    """Whether a launched step may bring log-probabilities of the prompt of ``row``.

    They would be told to ``row`` alone, and be missing from those of its fork.
    """
    seqs = host.seqs
    return bool(
        host.in_flight
        and seqs.need[row] & PROMPT_LOGPROBS
        and seqs.num_cached_tokens[row] > 0
        and seqs.num_tokens[row] == seqs.num_prompt_tokens[row]
    )


_TWIN_FIELDS = (
    *("status", "rank", "need", "stop_on_eos", "check_stops", "stop_tail"),
    *("num_prompt_tokens", "num_tokens", "num_cached_tokens", "num_pending"),
    *("max_total_tokens", "min_total_tokens", "num_hit_tokens", "seed"),
    *("digests", "prefix_tail", "num_registered"),
)


def adopt(
    seqs: Sequences,
    draft: Draft,
    source: int,
    row: int,
    request: Request,
    *,
    choice: int,
    slot: int,
) -> None:
    """Make ``row`` a twin of ``source``: same tokens and KV, blocks held once more. Donated."""
    num_tokens, held = int(seqs.num_tokens[source]), sequences.table(seqs, source)
    for name in _TWIN_FIELDS:
        getattr(seqs, name)[row] = getattr(seqs, name)[source]
    seqs.choice[row] = choice
    seqs.slot[row] = slot
    seqs.num_preemptions[row] = 0
    seqs.request[row] = request
    seqs.token_ids[row] = sequences.grown(seqs.token_ids[source], num_tokens, num_tokens + 64)
    seqs.block_table[row] = np.empty(0, np.int32)
    seqs.num_blocks[row] = 0
    if held.size:
        draft.hold(held)
        sequences.append_blocks(seqs, row, held)


def register_blocks(s: Sequences, draft: Draft, row: int, full: int, size: int) -> None:
    """Index the first ``full`` blocks of ``row``, whose KV and token values exist. Donated."""
    start = int(s.num_registered[row])
    if full <= start:
        return
    parent: prefix.Entry | None = s.prefix_tail[row]
    if start and (parent is None or not draft.is_indexed(parent)):
        return  # what leads up to these blocks was evicted: nothing could find them
    s.num_registered[row] = full
    table, chain = s.block_table[row][start:full], s.digests[row][start:full]
    data = s.token_ids[row][start * size : full * size].tobytes()
    s.prefix_tail[row] = draft.register(table, chain, parent, data, s.request[row].cache_salt)


def free_slots(seqs: Sequences, limits: Limits, count: int) -> list[int]:
    """``count`` penalty slots that no row uses, fewer when they run out."""
    used = set(seqs.slot.tolist())
    return [s for s in range(num_slots(limits)) if s not in used][:count]


def finish_event(
    seqs: Sequences,
    row: int,
    reason: FinishReason,
    stop: str | int | None = None,
    error: str | None = None,
) -> FinishEvent:
    """The event that says why and with which counts ``row`` ended."""
    return FinishEvent(
        request_id=seqs.request[row].request_id,
        index=int(seqs.choice[row]),
        reason=reason,
        stop=stop,
        num_prompt_tokens=int(seqs.num_prompt_tokens[row]),
        num_cached_tokens=max(0, int(seqs.num_hit_tokens[row])),
        num_generated_tokens=int(seqs.num_tokens[row] - seqs.num_prompt_tokens[row]),
        num_preemptions=int(seqs.num_preemptions[row]),
        error=error,
    )


def generated(seqs: Sequences, row: int) -> Int32:
    """A copy of the tokens ``row`` has generated so far."""
    return sequences.tokens(seqs, row)[seqs.num_prompt_tokens[row] :].copy()


def retire(seqs: Sequences, draft: Draft, rows: Sequence[int]) -> None:
    """Give back the blocks and rows of ended sequences. Donated."""
    for row in rows:
        draft.release(sequences.table(seqs, row))
        name = seqs.request[row].request_id
        left = tuple(r for r in seqs.rows_of[name] if r != row)
        if left:
            seqs.rows_of[name] = left  # type: ignore[index]  # private copy
        else:
            del seqs.rows_of[name]  # type: ignore[attr-defined]
        sequences.vacate(seqs, row)


def check(host: Host) -> None:
    """Assert every invariant of the host state; for tests, and when an engine is idle."""
    blocks.check(host.pool)
    prefix.check(host.prefix, host.pool)
    sequences.check(host.seqs)
    held = np.zeros(host.pool.num_blocks, np.int32)
    for row in np.flatnonzero(host.seqs.num_blocks).tolist():
        held[sequences.table(host.seqs, row)] += 1
    assert (held == host.pool.ref_count).all(), "reference counts and block tables differ"
