"""Built-in runs whose numbers can be worked out by hand before looking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infer.errors import ConfigError
from infer.trace.setup import Arrival, Setup, arrival

WALK = {
    "block_size": 256,
    "num_blocks": 8,
    "max_model_len": 1024,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 512,
}


def _ids(count: int, start: int = 3) -> list[int]:
    """Token ids below 1,000 whose blocks all differ."""
    return [(start + 7 * i + i // 11) % 1000 for i in range(count)]


def lifecycle() -> tuple[Arrival, ...]:
    """Prompts of 64 and 96 tokens that want 2 and 3 more: a prefill of 160, then two decodes."""
    return (arrival("R1", _ids(64), 2), arrival("R2", _ids(96, 501), 3))


def chunk() -> tuple[Arrival, ...]:
    """700 and 32 tokens under a budget of 512: 512, then 188 + 32 = 220, then decode."""
    return (arrival("A", _ids(700), 3), arrival("B", _ids(32, 501), 3))


def prefix() -> tuple[Arrival, ...]:
    """Two prompts of 620 that share 512, one after the other: 512 cached, 108 computed."""
    shared = _ids(512)
    return (
        arrival("P", [*shared, *_ids(108, 100)], 2),
        arrival("Q", [*shared, *_ids(108, 600)], 2, step=3),
    )


def preempt() -> tuple[Arrival, ...]:
    """Three sequences of 4 tokens on 4 blocks of 4: the last comer gives its block back."""
    return (
        arrival("A", [11, 12, 13, 14], 3),
        arrival("B", [21, 22, 23, 24], 3),
        arrival("C", [31, 32, 33, 34], 3),
    )


def refcount() -> tuple[Arrival, ...]:
    """Two shared blocks, held by nobody, one, two, one and nobody: 0, 1, 2, 1, 0."""
    shared = _ids(512)
    return (
        arrival("P", [*shared, *_ids(108, 100)], 1),
        arrival("Q", [*shared, *_ids(108, 600)], 4, step=1),
        arrival("R", [*shared, *_ids(108, 800)], 4, step=3),
    )


def walk_a() -> tuple[Arrival, ...]:
    """Three tokens in, three out: one prefill and two decodes."""
    return (arrival("R1", [100, 200, 300], 3),)


def walk_b() -> tuple[Arrival, ...]:
    """Two requests of which one ends early: five steps, not seven."""
    return (arrival("R1", [100, 200, 300], 2), arrival("R2", [400, 500, 600, 700], 5))


def walk_c() -> tuple[Arrival, ...]:
    """A prompt of exactly one block: where the KV of the 257th token goes."""
    return (arrival("R1", range(100, 356), 3),)


CASES: dict[str, tuple[Callable[[], tuple[Arrival, ...]], dict[str, Any]]] = {
    "walk-a": (walk_a, WALK),
    "walk-b": (walk_b, WALK),
    "walk-c": (walk_c, WALK),
    "lifecycle": (lifecycle, WALK),
    "chunk": (chunk, WALK),
    "prefix": (prefix, WALK),
    "preempt": (
        preempt,
        {
            "block_size": 4,
            "num_blocks": 4,
            "max_model_len": 16,
            "max_num_seqs": 3,
            "max_num_batched_tokens": 64,
        },
    ),
    "refcount": (refcount, {**WALK, "max_num_seqs": 3, "max_num_batched_tokens": 1024}),
}


def case_text(name: str) -> str:
    """What a case shows, in a line."""
    return (CASES[name][0].__doc__ or "").strip()


def case_setup(name: str, model: str | None, load: dict[str, Any], engine: dict[str, Any]) -> Setup:
    """A case as a run; ``engine`` options win over the case's own.

    Raises:
        ConfigError: no such case.
    """
    if name not in CASES:
        raise ConfigError(f"case is {name!r}; choose {', '.join(CASES)}")
    arrivals, options = CASES[name]
    return Setup(
        model=model, load=load, engine={**options, **engine}, arrivals=arrivals(), case=name
    )
