"""What the control plane asks of a tier of blocks that outlives the pool, and what such a tier counts.

Where it keeps them, and how, is its own affair (runtime/offload.py).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class StoreCounts(NamedTuple):
    """All but `num_bytes`, which is so now, count from the start."""

    num_hits: int = 0  # blocks that were asked for and given
    num_misses: int = 0  # … and not given
    num_read_bytes: int = 0
    num_written_bytes: int = 0
    num_dropped: int = 0  # blocks that were put, but not written
    num_bytes: int = 0  # of all that is kept

    def following(self, earlier: StoreCounts) -> StoreCounts:
        """These counts, where another store of `earlier` has counted before."""
        sums = StoreCounts(*(mine + its for mine, its in zip(self, earlier, strict=True)))
        return sums._replace(num_bytes=self.num_bytes)


class BlockStore(Protocol):
    """A tier of full blocks that outlives the pool."""

    @property
    def counts(self) -> StoreCounts: ...

    def contains(self, content_hash: bytes) -> bool: ...

    def fetch(self, content_hash: bytes) -> bytes | memoryview | None:
        """The payload for a LoadBlock; None where there is none after all, or a damaged one."""
