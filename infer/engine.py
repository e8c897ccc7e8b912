"""The transitions of an engine's state: the public step API.

state = init(model, EngineConfig())
state = submit(state, Request(request_id="a", prompt_token_ids=(1, 2, 3)))
while has_work(state):
    state, report = step(model, state)
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from infer import host as hosts
from infer.commit import Accepted, commit
from infer.errors import StateError
from infer.host import Host
from infer.hostbatch import build
from infer.lockstep import Aborted, Forked, Happening, Outside, Submitted
from infer.model import Model
from infer.parallel import guarded
from infer.plan import Plan
from infer.report import LogprobArrays, Report
from infer.schedule import decide, index_prompts
from infer.state import EngineState, Ticket
from infer.types import Logprob, PromptLogprobsEvent, Request, StepStats


def submit(state: EngineState, requests: Request | Iterable[Request]) -> EngineState:
    """Queue requests. All of them, or none if one is refused.

    Raises:
        RequestError: one of them can never run; the message names value, limit and remedy.
        StateError: this state was already advanced.
    """
    check_current(state)
    batch = (requests,) if isinstance(requests, Request) else tuple(requests)
    host = hosts.submit(state.host, batch, state.limits)
    return replace(state, host=host, outside=_noted(state, Submitted(batch)))


def abort(state: EngineState, request_id: str) -> EngineState:
    """Mark a request to end at the next step, with finish reason ``abort``.

    An id that is not live changes nothing: it may have finished a moment ago.
    """
    check_current(state)
    host = hosts.abort(state.host, request_id)
    return replace(state, host=host, outside=_noted(state, Aborted(request_id)))


def fork(state: EngineState, request_id: str, new_id: str) -> EngineState:
    """Let ``new_id`` continue from where the running ``request_id`` is, sharing its KV blocks.

    Raises:
        RequestError: unknown source, an id in use, or no free row.
        StateError: a step is in flight for the source, or this state was already advanced.
    """
    check_current(state)
    host = hosts.fork(state.host, request_id, new_id, state.limits)
    parts = state.prompt_parts
    if request_id in parts:  # forked inside its prompt: both go on from there
        parts = {**parts, new_id: parts[request_id]}
    outside = _noted(state, Forked(request_id, new_id))
    return replace(state, host=host, outside=outside, prompt_parts=parts)


def has_work(state: EngineState) -> bool:
    """Whether a step would compute or report something."""
    return hosts.has_work(state.host)


def launch(model: Model, state: EngineState) -> tuple[EngineState, Ticket]:
    """Schedule a step and hand it to the device, without waiting for its values.

    If it raises, the given state is still good: nothing of the step was recorded. Not so where
    ranks follow this one: then an error ends them all, and with them the model.

    Raises:
        StateError: this state was already advanced.
        EngineError: another rank failed; the message names it and the cause.
    """
    check_current(state)
    with guarded(model.tp, f"the launch of step {state.host.step}"):
        if state.outside is not None and model.tp.link is not None:
            model.tp.link.launching(state.outside, state.host.step, state.host)
            state = replace(state, outside=state.outside.told())
        return _launch(model, state)


def _launch(model: Model, state: EngineState) -> tuple[EngineState, Ticket]:
    started = time.monotonic()
    plan, host = decide(state.host, state.limits)
    batch = build(plan, host.seqs)
    built = time.monotonic()
    pending, kv, rows = state.runtime.run(model, state.kv, state.rows, plan, batch, host.seqs)
    # Where launching waits for nothing it is the host's work; else it is the device's.
    launched = time.monotonic() if state.runtime.asynchronous else built
    host = index_prompts(plan, host, state.limits)
    ticket = Ticket(plan.step, plan, pending, launched=launched, host_s=launched - started)
    return _advanced(state, host=host, kv=kv, rows=rows), ticket


def collect(model: Model, state: EngineState, ticket: Ticket) -> tuple[EngineState, Report]:
    """Wait for a launched step's values and apply them.

    Raises:
        StateError: tickets are collected out of order or twice, or the state was already advanced.
        EngineError: another rank failed; the message names it and the cause.
    """
    check_current(state)
    expected = state.host.step - state.host.in_flight
    if ticket.step != expected or not state.host.in_flight:
        raise StateError(
            f"ticket of step {ticket.step} cannot be collected, step {expected} is next; "
            "collect every ticket once, in the order of the launches"
        )
    with guarded(model.tp, f"step {ticket.step}"):
        if state.outside is not None and model.tp.link is not None:
            model.tp.link.collecting(state.outside, ticket.step)
            state = replace(state, outside=state.outside.told())
        return _collect(model, state, ticket)


def _collect(model: Model, state: EngineState, ticket: Ticket) -> tuple[EngineState, Report]:
    values = ticket.pending.wait()
    ready = time.monotonic()
    token_bytes = model.tokenizer.token_bytes if model.tokenizer is not None else ()
    accepted, host = commit(
        state.host,
        state.limits,
        ticket.plan,
        values.tokens,
        token_bytes=token_bytes,
        failed=values.failed,
    )
    parts, prompts = _prompt_logprobs(state, ticket.plan, values.prompt_logprobs)
    done = time.monotonic()
    stats = _stats(host, ticket, accepted, state.runtime.take_counters(), ready, done)
    report = Report(ticket.plan, accepted, stats, values.logprobs, prompts)
    return _advanced(state, host=host, prompt_parts=parts), report


def step(model: Model, state: EngineState) -> tuple[EngineState, Report]:
    """One round of continuous batching: ``collect`` after ``launch``.

    ``state`` is used up: go on from the one that is returned. The report says what was planned,
    accepted and finished; a state without work gives an empty one.

    Raises:
        StateError: the state was already advanced, or launched steps are not collected yet.
        EngineError: another rank failed; the message names it and the cause.
    """
    state, ticket = launch(model, state)
    return collect(model, state, ticket)


def check_current(state: EngineState) -> None:
    """Raise StateError unless ``state`` is the newest of its engine."""
    if state.generation != state.runtime.generation:
        raise StateError(
            f"this state (generation {state.generation}) was already advanced to generation "
            f"{state.runtime.generation}; continue from the newest, or take a snapshot to return"
        )


def _noted(state: EngineState, event: Happening) -> Outside | None:
    return None if state.outside is None else state.outside.noted(event)


def _advanced(state: EngineState, **changes: Any) -> EngineState:
    state.runtime.generation += 1
    return replace(state, generation=state.runtime.generation, **changes)


def _stats(
    host: Host,
    ticket: Ticket,
    accepted: Accepted,
    counters: tuple[bool, int],
    ready: float,
    done: float,
) -> StepStats:
    plan, pool = ticket.plan, host.pool
    graph_hit, num_recompiles = counters
    _, running, preempted, reserved = np.bincount(host.seqs.status, minlength=4).tolist()
    if plan.cohort is not None:
        num_decode = num_tokens = plan.num_sequences
    else:
        num_decode = int(plan.num_scheduled[plan.num_cached >= plan.num_prompt].sum())
        num_tokens = plan.num_tokens
    return StepStats(
        step=plan.step,
        time=done,
        num_running=running + reserved,
        num_waiting=len(host.waiting) + preempted,
        num_prefill_tokens=num_tokens - num_decode,
        num_decode_tokens=num_decode,
        num_sequences=plan.num_sequences,
        num_generated_tokens=int(accepted.tokens.size),
        num_preempted=len(plan.preempted),
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_reusable,
        prefix_queries=plan.prefix_queries,
        prefix_hits=plan.prefix_hits,
        host_s=ticket.host_s + done - ready,
        device_s=ready - ticket.launched,
        graph_hit=graph_hit,
        num_recompiles=num_recompiles,
        first_token_ids=plan.admitted,
    )


def _prompt_logprobs(
    state: EngineState, plan: Plan, values: LogprobArrays | None
) -> tuple[dict[str, tuple[tuple[int, LogprobArrays], ...]], tuple[PromptLogprobsEvent, ...]]:
    """Keep a chunk's prompt log-probabilities; whole prompts leave as events."""
    if values is None:
        if not state.prompt_parts:
            return {}, ()
        live = state.host.seqs.rows_of
        return {k: v for k, v in state.prompt_parts.items() if k in live}, ()
    parts = dict(state.prompt_parts)
    events = []
    at = 0
    for i in plan.prompt_logprobs.tolist():
        request, count = plan.requests[i], int(plan.num_scheduled[i])
        cached = int(plan.num_cached[i])
        earlier = tuple(p for p in parts.get(request.request_id, ()) if p[0] < cached)
        parts[request.request_id] = (*earlier, (cached, values.rows(slice(at, at + count))))
        at += count
        if cached + count >= len(request.prompt_token_ids):
            events.append(_prompt_event(request, parts.pop(request.request_id)))
    return parts, tuple(events)


def _prompt_event(
    request: Request, parts: tuple[tuple[int, LogprobArrays], ...]
) -> PromptLogprobsEvent:
    ids, top_n = request.prompt_token_ids, request.params.prompt_logprobs or 0
    out: list[tuple[Logprob, tuple[Logprob, ...]]] = []
    for first, values in parts:
        for i in range(values.chosen.size):
            target = first + i + 1
            if target < len(ids):
                out.append(values.entry(i, ids[target], top_n))
    return PromptLogprobsEvent(request.request_id, tuple(out))
