"""Two persistent containers: cheap to update, while the old version stays readable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

NUM_SHARDS = 2048


@dataclass(frozen=True, slots=True)
class ShardedMap(Generic[K, V]):
    """A dict whose update copies one of 2048 shards, a microsecond at tens of thousands of keys.

    It has no iteration order to rely on, so nothing that must be deterministic iterates over it.
    """

    shards: tuple[dict[K, V], ...] = field(default=({},) * NUM_SHARDS)
    size: int = 0

    def __len__(self) -> int:
        return self.size

    def __contains__(self, key: object) -> bool:
        return key in self.shards[hash(key) % NUM_SHARDS]

    def get(self, key: K) -> V | None:
        """The value of ``key``, or None."""
        return self.shards[hash(key) % NUM_SHARDS].get(key)

    def items(self) -> Iterator[tuple[K, V]]:
        """All pairs, in no particular order."""
        for shard in self.shards:
            if shard:
                yield from shard.items()

    def edit(self) -> MapEdit[K, V]:
        """A private working copy: many changes, each shard copied once."""
        return MapEdit(self)

    def set(self, key: K, value: V) -> ShardedMap[K, V]:
        """This map with ``key`` bound to ``value``."""
        edit = self.edit()
        edit.set(key, value)
        return edit.freeze()

    def remove(self, key: K) -> ShardedMap[K, V]:
        """This map without ``key``, which must be there."""
        edit = self.edit()
        edit.remove(key)
        return edit.freeze()


class MapEdit(Generic[K, V]):
    """A mutable view over a ``ShardedMap`` that copies a shard the first time it changes it."""

    def __init__(self, base: ShardedMap[K, V]) -> None:
        self._base = base
        self._owned: dict[int, dict[K, V]] = {}
        self._size = base.size

    def get(self, key: K) -> V | None:
        """The value of ``key``, or None."""
        shard = hash(key) % NUM_SHARDS
        return self._owned.get(shard, self._base.shards[shard]).get(key)

    def _own(self, key: K) -> dict[K, V]:
        index = hash(key) % NUM_SHARDS
        shard = self._owned.get(index)
        if shard is None:
            shard = self._owned[index] = self._base.shards[index].copy()
        return shard

    def set(self, key: K, value: V) -> None:
        """Bind ``key`` to ``value``."""
        owned = self._own(key)
        self._size += key not in owned
        owned[key] = value

    def remove(self, key: K) -> None:
        """Remove ``key``, which must be there."""
        del self._own(key)[key]
        self._size -= 1

    def freeze(self) -> ShardedMap[K, V]:
        """The edited map; the edit must not be used afterwards."""
        if not self._owned:
            return self._base
        shards = list(self._base.shards)
        for index, shard in self._owned.items():
            shards[index] = shard
        return ShardedMap(tuple(shards), self._size)


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
