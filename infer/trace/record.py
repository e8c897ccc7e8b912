"""Run an engine to its end and tell every step as events, which are JSON values."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from infer import engine, sequences
from infer.host import Host
from infer.hostbatch import HostBatch, build
from infer.initialize import init
from infer.model import Model
from infer.plan import Plan
from infer.report import Report
from infer.sequences import Status
from infer.state import EngineState
from infer.trace.setup import Arrival, Setup, engine_config, header, request_fields
from infer.trace.shapes import ShapeLog, watch
from infer.types import FinishEvent

Event = dict[str, Any]
STATUS = {Status.RUNNING: "running", Status.PREEMPTED: "preempted", Status.RESERVED: "waiting"}


def record(model: Model, setup: Setup, *, shapes: bool = False) -> Iterator[Event]:
    """The events of a run, its header first.

    Args:
        shapes: tell the shapes of every layer's tensors too; the engine then runs eagerly.
    """
    config = engine_config(setup)
    log = None
    if shapes:
        state, log = watch(model, init(model, replace(config, compile=False, cuda_graphs=False)))
    else:
        state = init(model, config)
    yield header(setup, model, state.config)
    began = time.monotonic()
    todo = sorted(setup.arrivals, key=lambda a: a.step)
    while todo or engine.has_work(state):
        now = state.host.step
        due = [a for a in todo if a.step <= now] or ([] if engine.has_work(state) else todo[:1])
        todo = [a for a in todo if a not in due]
        state = yield from _submitted(state, due, time.monotonic() - began)
        state = yield from _step(model, state, began, log)


def _submitted(
    state: EngineState, due: Sequence[Arrival], seconds: float
) -> Generator[Event, None, EngineState]:
    for one in due:
        state = engine.submit(state, one.request)
        yield {
            "event": "submitted",
            "step": state.host.step,
            "t": round(seconds, 6),
            "num_prompt_tokens": len(one.request.prompt_token_ids),
            **request_fields(one.request),
        }
    return state


def _step(
    model: Model, state: EngineState, began: float, log: ShapeLog | None
) -> Generator[Event, None, EngineState]:
    queues = _queues(state.host)
    started = time.monotonic() - began
    state, ticket = engine.launch(model, state)
    plan = ticket.plan
    yield {**_scheduled(plan, queues), "t": round(started, 6)}
    for name in plan.preempted:
        row = state.host.seqs.rows_of[name][0]
        kept = int(state.host.seqs.num_tokens[row])
        yield {"event": "preempted", "step": plan.step, "request_id": name, "num_tokens": kept}
    if plan.num_sequences:
        yield _inputs(plan, build(plan, state.host.seqs), state.host)
    if log is not None and plan.num_sequences:
        yield {"event": "shapes", "step": plan.step, "tensors": log.take()}
    tokens = ticket.pending.wait().tokens
    yield {"event": "sampled", "step": plan.step, "tokens": _sampled(plan, state.host, tokens)}
    state, report = engine.collect(model, state, ticket)
    committed = _committed(plan, report, state.host)
    yield {**committed, "t": round(time.monotonic() - began, 6)}
    for finish, output in zip(report.accepted.finished, report.accepted.outputs, strict=True):
        yield _finished(model, plan.step, finish, output.tolist())
    return state


def _queues(host: Host) -> dict[str, list[str]]:
    """Who waits and who runs, by name, in scheduling order."""
    seqs = host.seqs
    rows = np.flatnonzero(seqs.status != Status.FREE)
    rows = rows[np.argsort(seqs.rank[rows], kind="stable")].tolist()
    preempted = [r for r in rows if seqs.status[r] == Status.PREEMPTED]
    return {
        "waiting": [
            *(seqs.request[row].request_id for row in preempted),
            *(w.request.request_id for w in host.waiting.by_rank()),
        ],
        "running": [seqs.request[row].request_id for row in rows if row not in preempted],
    }


def _scheduled(plan: Plan, queues: dict[str, list[str]]) -> Event:
    prefill = plan.num_cached < plan.num_prompt
    kinds = {True: "prefill", False: "decode"}
    found = {kinds[bool(p)] for p in prefill} or {"nothing"}
    return {
        "event": "scheduled",
        "step": plan.step,
        "kind": "mixed" if len(found) > 1 else found.pop(),
        **queues,
        "num_tokens": plan.num_tokens,
        "sequences": [
            {
                "request_id": row.request_id,
                "choice": row.choice,
                "row": row.row,
                "num_tokens": row.num_known,
                "num_cached_tokens": row.num_cached,
                "num_scheduled_tokens": row.num_scheduled,
                "block_table": list(row.block_table),
                "prefill": bool(prefill[i]),
                "samples": row.samples,
            }
            for i, row in enumerate(plan)
        ],
        "admitted": list(plan.admitted),
        "prefix_hits": plan.prefix_hits,
        "copies": plan.copies.tolist(),
    }


def _inputs(plan: Plan, batch: HostBatch, host: Host) -> Event:
    """What the device gets. Tokens it knows already are filled in: nothing is in flight here."""
    ids = batch.input_ids.copy()
    for i in np.flatnonzero(batch.src_rows >= 0).tolist():
        known = sequences.tokens(host.seqs, int(batch.src_rows[i]))
        ids[i] = known[batch.positions[i]]
    return {
        "event": "inputs",
        "step": plan.step,
        "input_ids": ids.tolist(),
        "positions": batch.positions.tolist(),
        "slot_mapping": batch.slot_mapping.tolist(),
        "cu_seqlens_q": batch.cu_seqlens_q.tolist(),
        "cu_seqlens_k": [0, *np.cumsum(batch.context_lens).tolist()],
        "context_lens": batch.context_lens.tolist(),
        "max_seqlen_q": batch.max_seqlen_q,
        "max_seqlen_k": batch.max_seqlen_k,
        "block_tables": [list(row.block_table) for row in plan],
        "logits_rows": batch.logits_rows.tolist(),
    }


def _sampled(plan: Plan, host: Host, tokens: Any) -> list[Event]:
    out = []
    for i, token in enumerate(tokens.tolist()):
        row = int(plan.sample_rows[i])
        position = plan.num_known[plan.samples[plan.sample_seqs[i]]]
        out.append(
            {
                "request_id": host.seqs.request[row].request_id,
                "choice": int(host.seqs.choice[row]),
                "position": int(position),
                "token_id": token,
            }
        )
    return out


def _committed(plan: Plan, report: Report, host: Host) -> Event:
    accepted = report.accepted
    tokens = {
        (request.request_id, choice): token
        for request, choice, token in zip(
            accepted.requests, accepted.choices.tolist(), accepted.tokens.tolist(), strict=True
        )
    }
    ended = {(f.request_id, f.index): f for f in accepted.finished}
    names = {(row.request_id, row.choice): None for row in plan}
    names |= dict.fromkeys(tokens) | dict.fromkeys((name, 0) for name in plan.preempted)
    pool = host.pool
    counted = np.flatnonzero((pool.ref_count > 0) | pool.cached)
    return {
        "event": "committed",
        "step": plan.step,
        "sequences": [
            _after(host, name, choice, ended.get((name, choice)), tokens.get((name, choice)))
            for name, choice in names
        ],
        **_queues(host),
        "num_free_blocks": pool.num_free,
        "num_reusable_blocks": pool.num_reusable,
        "ref_counts": {str(block): int(pool.ref_count[block]) for block in counted},
        "host_s": round(report.stats.host_s, 6),
        "device_s": round(report.stats.device_s, 6),
    }


def _after(
    host: Host, name: str, choice: int, finish: FinishEvent | None, token: int | None
) -> Event:
    """A sequence after its step; what it held is given back when it has ended."""
    out = {"request_id": name, "choice": choice, "token_id": token}
    if finish is not None:
        return out | {
            "status": "finished",
            "num_tokens": finish.num_prompt_tokens + finish.num_generated_tokens,
            "num_cached_tokens": 0,
            "num_output_tokens": finish.num_generated_tokens,
            "block_table": [],
        }
    seqs = host.seqs
    row = next(r for r in seqs.rows_of[name] if seqs.choice[r] == choice)
    known = int(seqs.num_tokens[row])
    return out | {
        "status": STATUS[Status(int(seqs.status[row]))],
        "num_tokens": known,
        "num_cached_tokens": int(seqs.num_cached_tokens[row]),
        "num_output_tokens": known - int(seqs.num_prompt_tokens[row]),
        "block_table": sequences.table(seqs, row).tolist(),
    }


def _finished(model: Model, step: int, finish: FinishEvent, tokens: list[int]) -> Event:
    out: Event = {
        "event": "finished",
        "step": step,
        "request_id": finish.request_id,
        "choice": finish.index,
        "reason": finish.reason.value,
        "num_prompt_tokens": finish.num_prompt_tokens,
        "num_cached_tokens": finish.num_cached_tokens,
        "num_preemptions": finish.num_preemptions,
        "token_ids": tokens,
    }
    if model.tokenizer is not None:
        out["text"] = model.tokenizer.decode(tokens)
    return out
