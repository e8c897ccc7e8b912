"""What keeps the host states of all ranks equal: the outside world in one message, and a check.

Scheduling, building and committing are deterministic, so ranks that start from equal states and
hear of the same submits and aborts in the same places stay equal. Nothing else has to travel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash

from infer import sequences
from infer.blocks import Int32
from infer.host import Host
from infer.persistent import Fifo
from infer.sequences import Status
from infer.types import Request

CHECK_EVERY = 64  # launches


class Submitted(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """Requests that were queued together."""

    requests: tuple[Request, ...]


class Aborted(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """A request that was marked to end."""

    request_id: str


class Forked(msgspec.Struct, tag="fork", array_like=True, frozen=True):
    """A sequence that got a twin."""

    request_id: str
    new_id: str


Happening = Submitted | Aborted | Forked


class Lease(Protocol):
    """Kept alive by every state of an engine: when it goes, so do the followers' engines."""

    def holds(self, runtime: Any) -> None:
        """``runtime`` must be released before the ranks end."""


@dataclass(frozen=True, slots=True)
class Outside:
    """What the leading rank has yet to tell its followers about one engine.

    Part of the engine's state, so that a state nobody goes on with was never heard of.
    """

    engine: int
    lease: Lease
    events: Fifo[Happening] = field(default_factory=Fifo)

    def noted(self, event: Happening) -> Outside:
        """With one more event."""
        return replace(self, events=self.events.append(event))

    def told(self) -> Outside:
        """With nothing left to tell."""
        return replace(self, events=Fifo()) if len(self.events) else self


class _Payload(msgspec.Struct, array_like=True, frozen=True):
    events: list[Happening]
    check: dict[str, int] | None


def encode(events: Fifo[Happening], check: dict[str, int] | None = None) -> bytes:
    """Events in order, and perhaps a fingerprint to compare with; usually nothing at all."""
    if not len(events) and check is None:
        return b""
    return msgspec.msgpack.encode(_Payload(list(events), check))


def decode(payload: bytes) -> tuple[list[Happening], dict[str, int] | None]:
    """What ``encode`` wrote.

    Raises:
        msgspec.DecodeError: the payload is something else.
    """
    if not payload:
        return [], None
    read = _DECODER.decode(payload)
    return read.events, read.check


_DECODER = msgspec.msgpack.Decoder(_Payload)


# --- the check ------------------------------------------------------------------------------------

_VECTORS = (
    *("status", "epoch", "choice", "num_prompt_tokens", "num_tokens", "num_cached_tokens"),
    *("num_pending", "num_blocks", "last_block", "num_registered", "slot", "rank"),
)


def fingerprint(host: Host) -> dict[str, int]:
    """A 64-bit hash of every field of the host state that the next plan depends on, by name."""
    seqs, busy = host.seqs, np.flatnonzero(host.seqs.status != Status.FREE).tolist()
    fields = {name: xxhash.xxh3_64_intdigest(getattr(seqs, name).data) for name in _VECTORS}
    fields["request_id"] = _of(seqs.request[row].request_id.encode() for row in busy)
    fields["token_ids"] = _of(sequences.tokens(seqs, row) for row in busy)
    fields["block_table"] = _of(sequences.table(seqs, row) for row in busy)
    pool, index = host.pool, host.prefix
    fields["free"] = xxhash.xxh3_64_intdigest(pool.free[: pool.num_free].data)
    fields["ref_count"] = xxhash.xxh3_64_intdigest(pool.ref_count.data)
    fields["last_use"] = xxhash.xxh3_64_intdigest(index.last_use.data)
    numbers = (host.step, host.arrivals, host.in_flight, len(host.waiting), index.next_id)
    names = ("step", "arrivals", "in_flight", "waiting", "next_id")
    return {**dict(zip(names, numbers, strict=True)), **fields}


def _of(parts: Iterable[bytes | Int32]) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.data)
    return digest.intdigest()


def first_difference(ours: dict[str, int], theirs: dict[str, int]) -> str | None:
    """The first field that differs; None when none does."""
    return next((name for name, value in ours.items() if theirs.get(name) != value), None)
