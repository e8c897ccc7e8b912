"""The prefix index: full KV blocks found again by the tokens that lead up to them.

A block's digest chains its parent's digest with its own tokens, seeded by the request's
``cache_salt``. A digest only proposes an entry: a hit needs the same tokens, the same salt and the
very parent entry that matched before (entry ids are never reused), so the whole chain is verified
and a collision cannot hand out another prompt's KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from infer import blocks
from infer.blocks import BlockPool, Int32, Int64
from infer.persistent import MapEdit, ShardedMap

ROOT = -1  # parent id of a first block
EVICTION_SHARE = 64  # evict at least 1/64 of the pool at once, so that its scan is amortised


@dataclass(frozen=True, slots=True)
class Entry:
    """One indexed block and what its KV stands for."""

    entry_id: int
    parent_id: int
    parent_block: int  # -1 for a first block
    block: int
    digest: bytes
    tokens: bytes  # int32 token ids of the block
    salt: str | None
    step: int  # the step whose launch writes it; later steps may read it


@dataclass(frozen=True, slots=True)
class PrefixIndex:
    """Entries by digest and by block, with what eviction needs."""

    by_digest: ShardedMap[bytes, Entry]
    by_block: ShardedMap[int, Entry]
    last_use: Int64  # i64[num_blocks], step of the last hit or registration
    num_children: Int32  # i32[num_blocks], live entries whose parent is this block's entry
    next_id: int = 0


def make(num_blocks: int) -> PrefixIndex:
    """An empty index over ``num_blocks`` blocks."""
    return PrefixIndex(
        by_digest=ShardedMap(),
        by_block=ShardedMap(),
        last_use=np.zeros(num_blocks, np.int64),
        num_children=np.zeros(num_blocks, np.int32),
    )


def digests(
    tokens: Int32, block_size: int, salt: str | None, parents: Sequence[bytes] = ()
) -> tuple[bytes, ...]:
    """Chained xxh3-128 digests of the full blocks of ``tokens``, given those of the first ones."""
    chain = list(parents)
    last = chain[-1] if chain else xxhash.xxh3_128_digest((salt or "").encode())
    data = np.ascontiguousarray(tokens, np.int32).tobytes()
    width = 4 * block_size
    for start in range(len(chain) * width, len(data) - width + 1, width):
        last = xxhash.xxh3_128_digest(last + data[start : start + width])
        chain.append(last)
    return tuple(chain)


@dataclass(slots=True)
class Draft:
    """A working copy of pool and index inside one transition; ``freeze`` ends it."""

    pool: BlockPool
    by_digest: MapEdit[bytes, Entry]
    by_block: MapEdit[int, Entry]
    last_use: Int64
    num_children: Int32
    next_id: int
    step: int
    registered: set[bytes] = field(default_factory=set)  # by this transition

    @classmethod
    def of(cls, pool: BlockPool, index: PrefixIndex, step: int) -> Draft:
        """Copy the arrays once; everything after that is in place."""
        return cls(
            pool=blocks.copy(pool),
            by_digest=index.by_digest.edit(),
            by_block=index.by_block.edit(),
            last_use=index.last_use.copy(),
            num_children=index.num_children.copy(),
            next_id=index.next_id,
            step=step,
        )

    def freeze(self) -> tuple[BlockPool, PrefixIndex]:
        """The new pool and index."""
        index = PrefixIndex(
            by_digest=self.by_digest.freeze(),
            by_block=self.by_block.freeze(),
            last_use=self.last_use,
            num_children=self.num_children,
            next_id=self.next_id,
        )
        return self.pool, index

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
            if entry is None or entry.parent_id != parent or entry.salt != salt:
                break
            if entry.tokens != tokens[i * block_size : (i + 1) * block_size].tobytes():
                break
            if digest in self.registered:
                return found, True
            found.append(entry)
            parent = entry.entry_id
        return found, False

    def use(self, entries: Sequence[Entry]) -> Int32:
        """Hold the blocks of ``entries`` once more and return them."""
        table = np.fromiter((e.block for e in entries), np.int32, len(entries))
        self.pool = blocks.retain(self.pool, table)
        self.last_use[table] = self.step
        return table

    def register(
        self, block: int, digest: bytes, parent: Entry | None, tokens: Int32, salt: str | None
    ) -> Entry:
        """Index ``block`` under ``digest``; an equal entry that is there already stays.

        Returns the entry that now stands for this prefix: the parent for the next block.
        """
        parent_id = ROOT if parent is None else parent.entry_id
        old = self.by_digest.get(digest)
        data = np.ascontiguousarray(tokens, np.int32).tobytes()
        if old is not None:
            if old.parent_id == parent_id and old.tokens == data and old.salt == salt:
                return old
            self._drop([old])
        entry = Entry(
            entry_id=self.next_id,
            parent_id=parent_id,
            parent_block=-1 if parent is None else parent.block,
            block=block,
            digest=digest,
            tokens=data,
            salt=salt,
            step=self.step,
        )
        self.next_id += 1
        self.by_digest.set(digest, entry)
        self.by_block.set(block, entry)
        self.pool = blocks.mark_cached(self.pool, block)
        self.last_use[block] = self.step
        self.registered.add(digest)
        if self._is_live(parent):
            assert parent is not None
            self.num_children[parent.block] += 1
        return entry

    def _is_live(self, entry: Entry | None) -> bool:
        if entry is None:
            return False
        now = self.by_block.get(entry.block)
        return now is not None and now.entry_id == entry.entry_id

    def _drop(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.by_digest.remove(entry.digest)
            self.by_block.remove(entry.block)
            self.num_children[entry.block] = 0
            if entry.parent_block >= 0:
                parent = self.by_block.get(entry.parent_block)
                if parent is not None and parent.entry_id == entry.parent_id:
                    self.num_children[entry.parent_block] -= 1
        dropped = np.fromiter((e.block for e in entries), np.int32, len(entries))
        self.pool = blocks.unmark_cached(self.pool, dropped)

    def reserve(self, count: int) -> bool:
        """Make at least ``count`` blocks free, evicting the least recently used leaves first.

        Changes nothing and returns False when the pool cannot give that many.
        """
        if count > self.pool.num_available:
            return False
        goal = max(count, self.pool.num_blocks // EVICTION_SHARE)
        while self.pool.num_free < count:
            leaves = np.flatnonzero(
                self.pool.cached & (self.pool.ref_count == 0) & (self.num_children == 0)
            )
            if leaves.size == 0:  # parents of held duplicates only: any reusable block will do
                leaves = np.flatnonzero(self.pool.cached & (self.pool.ref_count == 0))
            order = np.argsort(self.last_use[leaves], kind="stable")
            victims = leaves[order[: goal - self.pool.num_free]]
            entries = [self.by_block.get(int(block)) for block in victims]
            self._drop([e for e in entries if e is not None])
        return True

    def take(self, count: int) -> Int32:
        """``count`` fresh blocks, each held once; ``reserve`` must have said yes."""
        taken, self.pool = blocks.take(self.pool, count)
        return taken

    def release(self, table: Int32) -> None:
        """Give up one hold on each block of ``table``."""
        self.pool = blocks.release(self.pool, table)


def check(index: PrefixIndex, pool: BlockPool) -> None:
    """Assert that index and pool agree."""
    children = np.zeros_like(index.num_children)
    for block, entry in index.by_block.items():
        assert entry.block == block and pool.cached[block]
        assert index.by_digest.get(entry.digest) is entry, "an entry is indexed one way only"
        parent = index.by_block.get(entry.parent_block) if entry.parent_block >= 0 else None
        if parent is not None and parent.entry_id == entry.parent_id:
            children[parent.block] += 1
    assert len(index.by_block) == len(index.by_digest) == int(np.count_nonzero(pool.cached))
    assert (children == index.num_children).all(), "child counts drifted"
