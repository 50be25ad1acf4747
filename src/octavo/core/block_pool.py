"""The pool of KV blocks: which are in use, by how many, and which free ones still hold something worth keeping.

Owns the reference counts, both free lists and the map from content hash to block. Knows nothing of requests and
tokens, nor what a hash is made of (prefix_index.py), nor the memory behind a block id (runtime/kv_cache.py).

A block is in one of three states. Free blocks are the blank and the cached ones together.

              allocate                    last reference released
    ┌───────┐ ────────►  ┌────────────┐  ─── no hash ──►  blank
    │ blank │            │ in use     │
    └───────┘            │ 1 … refs   │  ─── a hash ───►  cached: may be shared again, until it is evicted
    ┌────────┐  share    │            │
    │ cached │ ────────► │            │  ◄── allocate, when no block is blank: the cached block that was released
    └────────┘           └────────────┘      longest ago loses its hash

`forget` makes every cached block blank, and takes the hashes of those in use.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, KeysView, Sequence


class BlockPool:
    """Every operation takes constant time for each block.

    `on_evict(block_id, content_hash)` hears of every block whose content is about to be given up for a new one.
    """

    on_evict: Callable[[int, bytes], None] | None = None

    def __init__(self, num_blocks: int, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._num_refs = array("i", [0]) * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_with: dict[bytes, int] = {}
        # A stack, so that memory which was touched before is touched again before any new memory is.
        self._blank = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the one released longest ago comes first

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, num_blocks: int) -> list[int]:
        """New blocks, one reference each. Their content is undefined. ValueError beyond `num_free`."""
        if num_blocks > self.num_free:
            raise ValueError(f"num_blocks is {num_blocks}; the pool has {self.num_free} free blocks")
        block_ids = [self._blank.pop() if self._blank else self._evict() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._num_refs[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reference to each of these blocks, which are in use or which `find` gave."""
        for block_id in block_ids:
            if self._num_refs[block_id] == 0:
                del self._cached[block_id]
            self._num_refs[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One reference less. Of the blocks that become free, those named first are evicted first."""
        for block_id in block_ids:
            if self._num_refs[block_id] == 0:
                raise ValueError(f"block {block_id} is released, but not in use")
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] > 0:
                continue
            if self._hash_of[block_id] is None:
                self._blank.append(block_id)
            else:
                self._cached[block_id] = None

    def publish(self, block_id: int, content_hash: bytes) -> bool:
        """Let `find` give this block, which is in use, and whose content is complete. False where another block with
        this content is known: it stays the one."""
        if not self.enable_prefix_caching or content_hash in self._block_with:
            return False
        self._hash_of[block_id] = content_hash
        self._block_with[content_hash] = block_id
        return True

    def find(self, content_hash: bytes) -> int | None:
        """The block with this content, in use or cached. It stays valid until the next `allocate`, or `share` it."""
        return self._block_with.get(content_hash)

    def known_blocks(self) -> list[tuple[int, bytes]]:
        """All that `find` gives, with their hashes: those in use first, those to be evicted next last."""
        in_use = [block_id for block_id in self._block_with.values() if self._num_refs[block_id]]
        return [(i, content_hash) for i in (*in_use, *reversed(self._cached)) if (content_hash := self._hash_of[i])]

    def touch(self, block_id: int) -> None:
        """A cached block was of use: it is evicted last."""
        if block_id in self._cached:
            self._cached.move_to_end(block_id)

    def forget(self) -> None:
        """No content is known any more: cached blocks become blank, those in use stay with who has them."""
        for block_id in self._block_with.values():
            self._hash_of[block_id] = None
        self._block_with.clear()
        self._blank.extend(self._cached)
        self._cached.clear()

    def count_free(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks are free, so that sharing them takes as many from `num_free`."""
        return sum(self._num_refs[block_id] == 0 for block_id in block_ids)

    def num_refs(self, block_id: int) -> int:
        return self._num_refs[block_id]

    def cached_blocks(self) -> KeysView[int]:
        """Those to be evicted next come first."""
        return self._cached.keys()

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        content_hash = self._hash_of[block_id]
        assert content_hash is not None
        del self._block_with[content_hash]
        self._hash_of[block_id] = None
        if self.on_evict is not None:
            self.on_evict(block_id, content_hash)
        return block_id

    def check_integrity(self) -> None:
        """AssertionError unless every block is in exactly one state and the hash map agrees with the blocks."""
        blank, cached = set(self._blank), set(self._cached)
        assert len(blank) == len(self._blank), "a block is blank twice"
        for block_id, num_refs in enumerate(self._num_refs):
            states = (num_refs > 0) + (block_id in blank) + (block_id in cached)
            assert num_refs >= 0 and states == 1, f"block {block_id} is in {states} states, with {num_refs} references"
            has_hash = self._hash_of[block_id] is not None
            assert has_hash or block_id not in cached, f"block {block_id} is cached without a hash"
            assert not has_hash or block_id not in blank, f"block {block_id} is blank with a hash"
        known = {content_hash: i for i, content_hash in enumerate(self._hash_of) if content_hash is not None}
        assert known == self._block_with, "the hash map and the blocks disagree"
