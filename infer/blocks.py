"""The block pool: which KV blocks are free, and how many sequences hold each of the others.

A block is in one of three places: on the free stack; held (``ref_count`` > 0); or reusable, held by
nobody but still indexed by the prefix cache. Functions with "donated" in their docstring change
the arrays of the pool they are given, which must be the caller's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BlockPool:
    """Reference counts and free stack of ``num_blocks`` KV blocks."""

    free: Int32  # i32[num_blocks], free[:num_free] is the stack
    ref_count: Int32  # i32[num_blocks], sequences that hold the block
    cached: Bool  # bool[num_blocks], the prefix index has an entry for it
    num_free: int
    num_reusable: int  # cached blocks with ref_count 0

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return int(self.free.size)

    @property
    def num_available(self) -> int:
        """Blocks that could be allocated, counting the reusable ones."""
        return self.num_free + self.num_reusable


def make(num_blocks: int) -> BlockPool:
    """A pool with every block free; block 0 is taken first."""
    return BlockPool(
        free=np.arange(num_blocks - 1, -1, -1, dtype=np.int32),
        ref_count=np.zeros(num_blocks, np.int32),
        cached=np.zeros(num_blocks, np.bool_),
        num_free=num_blocks,
        num_reusable=0,
    )


def take(pool: BlockPool, count: int) -> tuple[Int32, BlockPool]:
    """Pop ``count`` blocks from the free stack, each held once. ``ref_count`` donated."""
    assert count <= pool.num_free, "take needs free blocks; evict first"
    top = pool.num_free - count
    taken = pool.free[top : pool.num_free][::-1].copy()
    pool.ref_count[taken] = 1
    return taken, _counted(pool, top, pool.num_reusable)


def retain(pool: BlockPool, blocks: Int32) -> BlockPool:
    """Hold each of ``blocks`` (distinct) once more. ``ref_count`` donated."""
    revived = int(np.count_nonzero(pool.ref_count[blocks] == 0))
    pool.ref_count[blocks] += 1
    return _counted(pool, pool.num_free, pool.num_reusable - revived)


def release(pool: BlockPool, blocks: Int32) -> tuple[Int64, BlockPool]:
    """Give up one hold on each of ``blocks`` (distinct). ``ref_count`` and ``free`` donated.

    A block nobody holds goes to the free stack, or becomes reusable when the prefix index knows it:
    those are returned, in the order of ``blocks``.
    """
    index = blocks.astype(np.int64)  # numpy indexes with these several times faster
    counts = pool.ref_count[index] - 1
    pool.ref_count[index] = counts
    dead = index[counts == 0]
    kept = pool.cached[dead]
    reusable = dead[kept]
    pool = _free(pool, dead[~kept])
    return reusable, _counted(pool, pool.num_free, pool.num_reusable + reusable.size)


def mark_cached(pool: BlockPool, blocks: Sequence[int]) -> None:
    """The prefix index now has entries for ``blocks``, which somebody holds. ``cached`` donated."""
    for block in blocks:  # most often a single one
        pool.cached[block] = True


def unmark_cached(pool: BlockPool, blocks: Int32) -> BlockPool:
    """The prefix index dropped its entries for ``blocks``; unheld ones become free.

    ``cached`` and ``free`` donated.
    """
    pool.cached[blocks] = False
    unheld = blocks[pool.ref_count[blocks] == 0]
    pool = _free(pool, unheld)
    return _counted(pool, pool.num_free, pool.num_reusable - unheld.size)


def _free(pool: BlockPool, blocks: Int32 | Int64) -> BlockPool:
    end = pool.num_free + blocks.size
    pool.free[pool.num_free : end] = blocks
    return _counted(pool, end, pool.num_reusable)


def _counted(pool: BlockPool, num_free: int, num_reusable: int) -> BlockPool:
    """``dataclasses.replace`` of the counts, at a third of its cost."""
    return BlockPool(pool.free, pool.ref_count, pool.cached, num_free, num_reusable)


def check(pool: BlockPool) -> None:
    """Assert that every block is in exactly one place."""
    stack = pool.free[: pool.num_free]
    assert np.unique(stack).size == stack.size, "a block is on the free stack twice"
    assert (pool.ref_count >= 0).all(), "a block was released more often than held"
    assert (pool.ref_count[stack] == 0).all(), "a free block is held"
    assert not pool.cached[stack].any(), "a free block is in the prefix index"
    reusable = int(np.count_nonzero(pool.cached & (pool.ref_count == 0)))
    assert reusable == pool.num_reusable, f"{reusable} reusable blocks, {pool.num_reusable} counted"
    held = int(np.count_nonzero(pool.ref_count))
    assert stack.size + reusable + held == pool.num_blocks, "a block leaked"
