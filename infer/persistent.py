"""Two persistent containers: cheap to update, while the old version stays readable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

BRANCHES, SHARDS = 32, 64  # of a map, and of a branch
LAST = BRANCHES * SHARDS - 1

_Branches = tuple[tuple[dict[K, V], ...], ...]


def _shard_of(key: object) -> int:
    """A number up to LAST. Neighbouring integers share a shard, and so its copy."""
    return (hash(key) >> 5) & LAST


@dataclass(frozen=True, slots=True)
class ShardedMap(Generic[K, V]):
    """A dict whose update copies one of 2048 shards, a microsecond at tens of thousands of keys.

    It has no iteration order to rely on, so nothing that must be deterministic iterates over it.
    """

    branches: _Branches[K, V] = field(default=(({},) * SHARDS,) * BRANCHES)
    size: int = 0

    def __len__(self) -> int:
        return self.size

    def __contains__(self, key: object) -> bool:
        shard = _shard_of(key)
        return key in self.branches[shard // SHARDS][shard % SHARDS]

    def get(self, key: K) -> V | None:
        """The value of ``key``, or None."""
        shard = _shard_of(key)
        return self.branches[shard // SHARDS][shard % SHARDS].get(key)

    def items(self) -> Iterator[tuple[K, V]]:
        """All pairs, in no particular order."""
        for branch in self.branches:
            for shard in branch:
                yield from shard.items()

    def edit(self) -> MapEdit[K, V]:
        """A private working copy: many changes, each shard copied once."""
        return MapEdit(self)


class MapEdit(Generic[K, V]):
    """A mutable view over a ``ShardedMap`` that copies a shard the first time it changes it."""

    def __init__(self, base: ShardedMap[K, V]) -> None:
        self._base = base
        self._owned: dict[int, dict[K, V]] = {}
        self._size = base.size

    def get(self, key: K) -> V | None:
        """The value of ``key``, or None."""
        number = (hash(key) >> 5) & LAST  # _shard_of, without a call
        shard = self._owned.get(number)
        if shard is None:
            shard = self._base.branches[number // SHARDS][number % SHARDS]
        return shard.get(key)

    def _own(self, number: int) -> dict[K, V]:
        shard = self._base.branches[number // SHARDS][number % SHARDS].copy()
        self._owned[number] = shard
        return shard

    def set(self, key: K, value: V) -> None:
        """Bind ``key`` to ``value``."""
        number = (hash(key) >> 5) & LAST
        shard = self._owned.get(number)
        if shard is None:
            shard = self._own(number)
        before = len(shard)
        shard[key] = value
        self._size += len(shard) - before

    def remove(self, key: K) -> None:
        """Remove ``key``, which must be there."""
        number = _shard_of(key)
        shard = self._owned.get(number)
        del (self._own(number) if shard is None else shard)[key]
        self._size -= 1

    def freeze(self) -> ShardedMap[K, V]:
        """The edited map; the edit must not be used afterwards."""
        if not self._owned:
            return self._base
        changed: dict[int, list[dict[K, V]]] = {}
        for number, shard in self._owned.items():
            branch = number // SHARDS
            if branch not in changed:
                changed[branch] = list(self._base.branches[branch])
            changed[branch][number % SHARDS] = shard
        branches = list(self._base.branches)
        for branch, shards in changed.items():
            branches[branch] = tuple(shards)
        return ShardedMap(tuple(branches), self._size)


@dataclass(frozen=True, slots=True)
class Fifo(Generic[T]):
    """A first-in first-out queue: a window over a list that only ever grows at its end.

    Appending to the newest version is O(1) and in place beyond every older window; appending to an
    older version copies its window first, so every version stays what it was.
    """

    log: list[T] = field(default_factory=list)
    head: int = 0
    tail: int = 0

    def __len__(self) -> int:
        return self.tail - self.head

    def __iter__(self) -> Iterator[T]:
        log: Any = self.log
        return (log[i] for i in range(self.head, self.tail))

    def append(self, item: T) -> Fifo[T]:
        """This queue with ``item`` at its end."""
        return self.extend((item,))

    def extend(self, items: Sequence[T]) -> Fifo[T]:
        """This queue with ``items`` at its end."""
        if len(self.log) != self.tail:
            log = [*self.log[self.head : self.tail], *items]
            return Fifo(log, 0, len(log))
        self.log.extend(items)
        return Fifo(self.log, self.head, len(self.log))

    def drop(self, count: int) -> Fifo[T]:
        """This queue without its first ``count`` items; memory is returned once half is gone."""
        head = self.head + count
        if head * 2 > self.tail and head > 64:
            log = self.log[head : self.tail]
            return Fifo(log, 0, len(log))
        return Fifo(self.log, head, self.tail)
