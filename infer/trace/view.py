"""A trace drawn for a terminal: who ran in which step, and what each step did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from infer.errors import ConfigError
from infer.trace.record import Event

MAX_VALUES = 12  # of a list, the rest in the middle is left out
BAR = 10  # columns of a cell's bar
CELL = 24
MAX_COLUMNS = 6  # requests side by side


def draw(events: Sequence[Event], *, steps: Sequence[int] = (), details: bool = True) -> str:
    """The timeline, then every step (or the chosen ones) in detail.

    Raises:
        ConfigError: a chosen step is not in the trace.
    """
    lines = [*_head(events[0]), "", *_timeline(events)]
    there = sorted({e["step"] for e in events if "step" in e})
    for step in steps:
        if step not in there:
            known = f"has steps {there[0]} to {there[-1]}" if there else "has none"
            raise ConfigError(f"step is {step}, the trace {known}")
    if details:
        for step in there:
            if not steps or step in steps:
                lines += ["", *_step(step, [e for e in events if e.get("step") == step])]
    return "\n".join(lines)


def _head(head: Event) -> Iterator[str]:
    engine, load = head["engine"], head["load"]
    case = f"case {head['case']}, " if head.get("case") else ""
    yield f"{case}model {head['model'] or 'default'}, {load['dtype']} on {load['device']}"
    yield (
        f"{engine['num_blocks']} blocks of {engine['block_size']}, "
        f"{engine['max_num_seqs']} rows, {engine['max_num_batched_tokens']} positions a step"
    )


def _timeline(events: Sequence[Event]) -> Iterator[str]:
    names: list[tuple[str, int]] = []
    for event in events:
        if event["event"] == "scheduled":
            names += [k for k in map(_key, event["sequences"]) if k not in names]
    shown = names[:MAX_COLUMNS]
    most = max((s["num_scheduled_tokens"] for e in events for s in _scheduled(e)), default=1)
    yield "step  " + "  ".join(f"{_label(key):{CELL}}" for key in shown) + "  positions"
    by_step: dict[int, dict[str, Event]] = {}
    for event in events:
        if "step" in event and event["event"] in ("scheduled", "committed"):
            by_step.setdefault(event["step"], {})[event["event"]] = event
    for step, pair in by_step.items():
        before = {_key(s): s for s in pair["scheduled"]["sequences"]}
        after = {_key(s): s for s in pair.get("committed", {}).get("sequences", ())}
        cells = [_cell(before.get(key), after.get(key), most) for key in shown]
        total = pair["scheduled"]["num_tokens"]
        yield f"{step:4}  " + "  ".join(f"{c:{CELL}}" for c in cells) + f"  {total:9}"
    if len(names) > len(shown):
        yield f"      and {len(names) - len(shown)} more sequences"


def _cell(before: Event | None, after: Event | None, most: int) -> str:
    if before is None:
        if after is not None and after["status"] == "preempted":
            return "gave its blocks back"
        return "·"
    count = before["num_scheduled_tokens"]
    bar = "█" if before["prefill"] else "▒"
    length = max(1, round(BAR * count / most))
    token = after and after["token_id"]
    ending = "" if token is None else f" → {token}"
    mark = " ■" if after and after["status"] == "finished" else ""
    return f"{bar * length} {count}{ending}{mark}"


def _step(step: int, events: Sequence[Event]) -> Iterator[str]:
    yield f"step {step}"
    for event in events:
        yield from _DRAW.get(event["event"], _nothing)(event)


def _nothing(event: Event) -> Iterator[str]:
    yield from ()


def _draw_submitted(event: Event) -> Iterator[str]:
    wanted = event["params"].get("max_tokens", "as many as fit")
    yield (
        f"  submitted  {event['request_id']}: {event['num_prompt_tokens']} prompt tokens, "
        f"wants {wanted}"
    )


def _draw_scheduled(event: Event) -> Iterator[str]:
    waiting, running = ", ".join(event["waiting"]), ", ".join(event["running"])
    before = f"before it {running or 'nothing'} ran and {waiting or 'nothing'} waited"
    yield f"  scheduled  {event['kind']}, {event['num_tokens']} positions; {before}"
    for s in event["sequences"]:
        yield (
            f"    {_label(_key(s)):10} known {s['num_tokens']}, cached {s['num_cached_tokens']}, "
            f"computes {s['num_scheduled_tokens']}, blocks {_values(s['block_table'])}"
            f"{'' if s['samples'] else ', samples nothing yet'}"
        )
    for source, target in event["copies"]:
        yield f"    block {source} is copied to {target} first"


def _draw_preempted(event: Event) -> Iterator[str]:
    yield f"  preempted  {event['request_id']} keeps its {event['num_tokens']} tokens, not its KV"


def _draw_inputs(event: Event) -> Iterator[str]:
    yield "  inputs"
    for name in ("input_ids", "positions", "slot_mapping", "cu_seqlens_q", "cu_seqlens_k"):
        yield f"    {name:13} {_values(event[name])}"
    yield f"    {'logits_rows':13} {_values(event['logits_rows'])}"


def _draw_shapes(event: Event) -> Iterator[str]:
    yield "  shapes of layer 0, and after the last"
    for entry in event["tensors"]:
        if entry["layer"] in (0, None):
            shapes = ", ".join(
                f"{name} {value}" for name, value in entry.items() if name not in ("layer", "name")
            )
            yield f"    {entry['name']:13} {shapes}"


def _draw_committed(event: Event) -> Iterator[str]:
    yield "  committed"
    for s in event["sequences"]:
        token = "no token" if s["token_id"] is None else f"token {s['token_id']}"
        yield (
            f"    {_label(_key(s)):10} {token}; known {s['num_tokens']}, "
            f"cached {s['num_cached_tokens']}, {s['status']}"
        )
    counts = event["ref_counts"]
    shown = ", ".join(f"{block}:{count}" for block, count in list(counts.items())[:MAX_VALUES])
    more = "" if len(counts) <= MAX_VALUES else f" and {len(counts) - MAX_VALUES} more"
    yield (
        f"    {event['num_free_blocks']} blocks free, {event['num_reusable_blocks']} reusable; "
        f"reference counts {shown or '-'}{more}"
    )


def _draw_finished(event: Event) -> Iterator[str]:
    text = f" {event['text']!r}" if "text" in event else ""
    yield (
        f"  finished   {event['request_id']} ({event['reason']}): "
        f"{_values(event['token_ids'])}{text}"
    )


_DRAW = {
    "submitted": _draw_submitted,
    "scheduled": _draw_scheduled,
    "preempted": _draw_preempted,
    "inputs": _draw_inputs,
    "shapes": _draw_shapes,
    "committed": _draw_committed,
    "finished": _draw_finished,
}


def _scheduled(event: Event) -> Sequence[Event]:
    return event["sequences"] if event["event"] == "scheduled" else ()


def _key(sequence: Event) -> tuple[str, int]:
    return sequence["request_id"], sequence["choice"]


def _label(key: tuple[str, int]) -> str:
    return key[0] if key[1] == 0 else f"{key[0]}/{key[1]}"


def _values(values: Sequence[Any]) -> str:
    if len(values) <= MAX_VALUES:
        return "[" + ", ".join(map(str, values)) + "]"
    half = MAX_VALUES // 2
    left, right = ", ".join(map(str, values[:half])), ", ".join(map(str, values[-half:]))
    return f"[{left}, … {right}] ({len(values)})"
