"""The prefix index: full KV blocks found again by the tokens that lead up to them.

A block's digest chains its parent's digest with its own tokens, seeded by the request's
``cache_salt``. A digest only proposes an entry: a hit needs the same tokens, the same salt and the
very parent entry that matched before (entry ids are never reused), so the whole chain is verified
and a collision cannot hand out another prompt's KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import xxhash

from infer import blocks
from infer.blocks import BlockPool, Int32, Int64
from infer.persistent import Fifo, MapEdit, ShardedMap

ROOT = -1  # parent id of a first block


class Entry(NamedTuple):
    """One indexed block and what its KV stands for."""

    entry_id: int
    parent_id: int
    block: int
    digest: bytes
    tokens: bytes  # int32 token ids of the block
    salt: str | None


@dataclass(frozen=True, slots=True)
class PrefixIndex:
    """Entries by digest and by block, and which reusable block to evict next.

    Blocks are evicted in the order in which their last holder released them. A sequence releases
    its blocks from the last to the first, so that a chain goes leaf first.
    """

    by_digest: ShardedMap[bytes, Entry]
    by_block: ShardedMap[int, Entry]
    last_use: Int64  # i64[num_blocks], number of the block's last release that left it reusable
    idle: Fifo[tuple[int, int]]  # (block, number of the release); outdated where numbers differ
    num_releases: int = 0
    next_id: int = 0


def make(num_blocks: int) -> PrefixIndex:
    """An empty index over ``num_blocks`` blocks."""
    return PrefixIndex(
        by_digest=ShardedMap(),
        by_block=ShardedMap(),
        last_use=np.zeros(num_blocks, np.int64),
        idle=Fifo(),
    )


def digests(
    tokens: Int32, block_size: int, salt: str | None, parents: Sequence[bytes] = ()
) -> tuple[bytes, ...]:
    """Chained xxh3-128 digests of the full blocks of ``tokens``, given those of the first ones."""
    last = parents[-1] if parents else _root(salt)
    data = np.ascontiguousarray(tokens[len(parents) * block_size :], np.int32).tobytes()
    width = 4 * block_size
    chain = []
    for start in range(0, len(data) - width + 1, width):
        last = xxhash.xxh3_128_digest(last + data[start : start + width])
        chain.append(last)
    return (*parents, *chain)


def extended(parent: Entry | None, tokens: bytes, salt: str | None) -> bytes:
    """The digest of a block of ``tokens`` (int32) after ``parent``."""
    return xxhash.xxh3_128_digest((_root(salt) if parent is None else parent.digest) + tokens)


def _root(salt: str | None) -> bytes:
    return xxhash.xxh3_128_digest((salt or "").encode())


@dataclass(slots=True)
class Draft:
    """A working copy of pool and index inside one transition; ``freeze`` ends it."""

    pool: BlockPool
    by_digest: MapEdit[bytes, Entry]
    by_block: MapEdit[int, Entry]
    last_use: Int64
    idle: Fifo[tuple[int, int]]
    num_releases: int
    next_id: int
    coming: set[bytes] = field(default_factory=set)  # of blocks that are computed in this very step
    owned: set[str] = field(default_factory=set)  # arrays that were copied, and may be changed

    @classmethod
    def of(cls, pool: BlockPool, index: PrefixIndex) -> Draft:
        """Start from ``pool`` and ``index``; an array is copied before its first change."""
        return cls(
            pool=pool,
            by_digest=index.by_digest.edit(),
            by_block=index.by_block.edit(),
            last_use=index.last_use,
            idle=index.idle,
            num_releases=index.num_releases,
            next_id=index.next_id,
        )

    def freeze(self) -> tuple[BlockPool, PrefixIndex]:
        """The new pool and index."""
        index = PrefixIndex(
            by_digest=self.by_digest.freeze(),
            by_block=self.by_block.freeze(),
            last_use=self.last_use,
            idle=self.idle,
            num_releases=self.num_releases,
            next_id=self.next_id,
        )
        return self.pool, index

    def _own(self, *names: str) -> None:
        """Make arrays of the pool, or ``last_use``, this draft's own."""
        for name in names:
            if name not in self.owned:
                self.owned.add(name)
                if name == "last_use":
                    self.last_use = self.last_use.copy()
                else:
                    own = getattr(self.pool, name).copy()
                    self.pool = replace(self.pool, **{name: own})

    def match(
        self, chain: Sequence[bytes], tokens: Int32, block_size: int, salt: str | None, limit: int
    ) -> tuple[list[Entry], bool]:
        """Entries that hold the first blocks of ``tokens``, at most ``limit`` of them.

        The flag says that the next block is being computed in this very step: whoever asks gains
        by waiting one step, since entries may only be read by later steps.
        """
        found: list[Entry] = []
        parent = ROOT
        for i, digest in enumerate(chain[:limit]):
            entry = self.by_digest.get(digest)
            if entry is None:
                return found, digest in self.coming
            if entry.parent_id != parent or entry.salt != salt:
                break
            if entry.tokens != tokens[i * block_size : (i + 1) * block_size].tobytes():
                break
            found.append(entry)
            parent = entry.entry_id
        return found, False

    def use(self, entries: Sequence[Entry]) -> Int32:
        """Hold the blocks of ``entries`` once more and return them."""
        table = np.fromiter((e.block for e in entries), np.int32, len(entries))
        self.hold(table)
        return table

    def hold(self, table: Int32) -> None:
        """Hold each block of ``table`` once more."""
        self._own("ref_count")
        self.pool = blocks.retain(self.pool, table)

    def register(
        self,
        table: Int32,
        chain: Sequence[bytes],
        parent: Entry | None,
        data: bytes,
        salt: str | None,
    ) -> Entry | None:
        """Index the blocks of ``table``, next after ``parent``; equal entries that are there stay.

        ``chain`` holds the digests of the first of them or of all, ``data`` their tokens (int32).
        Returns the entry that now stands for the whole prefix: the parent for the next block.
        """
        parent_id = ROOT if parent is None else parent.entry_id
        width = len(data) // max(1, table.size)
        new: list[int] = []
        for i, block in enumerate(table.tolist()):
            tokens = data[i * width : (i + 1) * width]
            digest = chain[i] if i < len(chain) else extended(parent, tokens, salt)
            old = self.by_digest.get(digest)
            if old is not None:
                if old.parent_id == parent_id and old.tokens == tokens and old.salt == salt:
                    parent, parent_id = old, old.entry_id
                    continue
                self.drop([old])
                if old.block in new:  # its digest collides with a later one of the same chain
                    new.remove(old.block)
            parent = Entry(self.next_id, parent_id, block, digest, tokens, salt)
            parent_id = self.next_id
            self.next_id += 1
            self.by_digest.set(digest, parent)
            self.by_block.set(block, parent)
            new.append(block)
        if new:
            self._own("cached")
            blocks.mark_cached(self.pool, new)
        return parent

    def is_indexed(self, entry: Entry) -> bool:
        """Whether ``entry`` was neither evicted nor replaced."""
        return self.by_block.get(entry.block) is entry

    def drop(self, entries: Sequence[Entry]) -> None:
        """Forget ``entries``; blocks that nobody holds become free."""
        for entry in entries:
            self.by_digest.remove(entry.digest)
            self.by_block.remove(entry.block)
        dropped = np.fromiter((e.block for e in entries), np.int32, len(entries))
        self._own("cached", "free")
        self.pool = blocks.unmark_cached(self.pool, dropped)

    def forget(self, table: Int32) -> None:
        """Drop the entries of the blocks of ``table``."""
        found = [self.by_block.get(block) for block in table.tolist()]
        self.drop([entry for entry in found if entry is not None])

    def reserve(self, count: int) -> bool:
        """Make at least ``count`` blocks free, evicting those that were released longest ago.

        Changes nothing and returns False when the pool cannot give that many.
        """
        if count > self.pool.num_available:
            return False
        missing = count - self.pool.num_free
        if missing <= 0:
            return True
        victims: list[Entry] = []
        seen = 0
        for block, number in self.idle:
            seen += 1
            entry = self.by_block.get(block) if self._is_idle(block, number) else None
            if entry is not None:
                victims.append(entry)
                if len(victims) == missing:
                    break
        assert len(victims) == missing, "a reusable block is not in the queue"
        self.idle = self.idle.drop(seen)
        self.drop(victims)
        return True

    def _is_idle(self, block: int, number: int) -> bool:
        return bool(self.last_use[block] == number and self.pool.ref_count[block] == 0)

    def take(self, count: int) -> Int32:
        """``count`` fresh blocks, each held once; ``reserve`` must have said yes."""
        self._own("ref_count")
        taken, self.pool = blocks.take(self.pool, count)
        return taken

    def release(self, table: Int32) -> None:
        """Give up one hold on each block of a sequence's ``table``."""
        self._own("ref_count", "free")
        idle, self.pool = blocks.release(self.pool, table[::-1])
        if not idle.size:
            return
        first, self.num_releases = self.num_releases, self.num_releases + idle.size
        self._own("last_use")
        self.last_use[idle] = np.arange(first, self.num_releases)
        self.idle = self.idle.extend(
            list(zip(idle.tolist(), range(first, self.num_releases), strict=True))
        )
        if len(self.idle) > 2 * self.pool.num_blocks + 1024:  # mostly outdated
            # What _is_idle asks of one, asked of all: over plain lists three times as fast.
            last, held = self.last_use.tolist(), self.pool.ref_count.tolist()
            valid = [(b, number) for b, number in self.idle if last[b] == number and not held[b]]
            self.idle = Fifo(valid, 0, len(valid))


def check(index: PrefixIndex, pool: BlockPool) -> None:
    """Assert that index and pool agree."""
    for block, entry in index.by_block.items():
        assert entry.block == block and pool.cached[block]
        assert index.by_digest.get(entry.digest) is entry, "an entry is indexed one way only"
    assert len(index.by_block) == len(index.by_digest) == int(np.count_nonzero(pool.cached))
    reusable = np.flatnonzero(pool.cached & (pool.ref_count == 0)).tolist()
    queued = {block for block, number in index.idle if index.last_use[block] == number}
    assert queued.issuperset(reusable), "a reusable block cannot be evicted"


def clear(pool: BlockPool, index: PrefixIndex) -> tuple[BlockPool, PrefixIndex]:
    """Forget every entry; blocks that nobody holds become free."""
    draft = Draft.of(pool, index)
    draft.drop([entry for _, entry in sorted(index.by_block.items(), key=lambda item: item[0])])
    return draft.freeze()
