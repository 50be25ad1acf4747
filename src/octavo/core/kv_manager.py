"""Which blocks hold which tokens of a request: block tables, and the prefix cache over full blocks.

Owns the block tables and what a content hash is made of. Knows nothing of budgets and queues (scheduler.py), and the
pool's free lists only as numbers (block_pool.py).

One request, block_size 4, admitted with 8 cached tokens; a step computes 5 of the 6 tokens that it still lacks:

    token_ids     t0  t1  t2  t3 │ t4  t5  t6  t7 │ t8  t9 t10 t11 │t12 t13
                 ├── num_computed_tokens ────────┤├── this step ──────┤├later┤
    block_table   b0             │ b1             │ b2             │ b3      ·  ·
                 ├── cached, shared by hash ─────┤├── allocated at admission ───┤
    published    ├── num_published blocks: 2 ────┤├ b2 after step ┤├ once full ─┤

A full block is found by the chained hash of all tokens up to its end:

    hash(i) = H(hash(i - 1) + token ids of block i),   hash(-1) = the root of the request's cache_salt

so one equal hash means an equal prefix. A block becomes known only after the step that computed its last token.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from octavo.core.block_pool import BlockPool
from octavo.request import Request

_HASH_SIZE = 32  # bytes: nobody finds two prompts with one hash, so nobody reads another's cache by a collision
_UNSALTED_ROOT = bytes(_HASH_SIZE)


@dataclass(slots=True)
class _Table:
    block_ids: array[int]  # 'i'
    num_published: int  # blocks


class KVManager:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.num_lookup_tokens = 0  # looked up at first admissions
        self.num_hit_tokens = 0  # found then
        self._tables: dict[Request, _Table] = {}  # of those that hold blocks

    @property
    def max_tokens(self) -> int:
        """The most tokens that one request alone can hold."""
        return self.pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0 … 1. Cached blocks are free."""
        return self.pool.num_used / self.pool.num_blocks

    def block_table(self, request: Request) -> array[int]:
        """The live table: `allocate` appends to it, nothing else changes it."""
        return self._tables[request].block_ids

    def lookup(self, request: Request) -> list[int]:
        """The cached blocks, in order, of the longest known prefix of a waiting request.

        The last token is never among them: its logits are still to be computed. Nor is any other token whose logits
        are wanted, so prompt_logprobs that are not yet given out want the whole prompt computed.
        """
        if not self.pool.enable_prefix_caching or request.wants_prompt_logprobs:
            return []
        block_ids: list[int] = []
        for index in range((request.num_tokens - 1) // self.block_size):
            block_id = self.pool.find(self._block_hash(request, index))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def admit(self, request: Request, cached: Sequence[int], num_spare_blocks: int) -> bool:
        """Open the table of a waiting request: `cached` (from `lookup`), then new blocks for all tokens it holds.

        False, and nothing has changed, unless `num_spare_blocks` blocks stay free after that.
        """
        num_new = self._num_blocks_for(request.num_tokens) - len(cached)
        if num_new + self.pool.count_free(cached) + num_spare_blocks > self.pool.num_free:
            return False
        self.pool.share(cached)  # before allocating, which might evict them
        block_ids = array("i", cached)
        block_ids.extend(self.pool.allocate(num_new))
        self._tables[request] = _Table(block_ids, num_published=len(cached))
        if request.num_preemptions == 0 and self.pool.enable_prefix_caching:
            self.num_lookup_tokens += request.num_tokens
            self.num_hit_tokens += len(cached) * self.block_size
        return True

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Make the table cover the first `num_tokens` tokens. False, and nothing has changed, for want of blocks."""
        block_ids = self._tables[request].block_ids
        num_new = self._num_blocks_for(num_tokens) - len(block_ids)
        if num_new <= 0:
            return True
        if num_new > self.pool.num_free:
            return False
        block_ids.extend(self.pool.allocate(num_new))
        return True

    def publish(self, request: Request) -> None:
        """Make the blocks known that the request's computed tokens have filled. Call it after the step, not before."""
        table = self._tables[request]
        num_full = request.num_computed_tokens // self.block_size
        if num_full == table.num_published or not self.pool.enable_prefix_caching:
            return
        for index in range(table.num_published, num_full):
            self.pool.publish(table.block_ids[index], self._block_hash(request, index))
        table.num_published = num_full

    def free(self, request: Request) -> None:
        """Give back all blocks, if the request holds any. Published ones stay known until they are needed; the tail
        goes first, since a block without those before it is never found."""
        table = self._tables.pop(request, None)
        if table is not None:
            self.pool.release(reversed(table.block_ids))

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is shared any more. Who holds blocks keeps them, and publishes those that fill up
        later: they are found only behind a prefix that was computed anew. The counters go on."""
        self.pool.forget()

    def check_integrity(self) -> None:
        """AssertionError unless the pool is sound and its reference counts are those of the tables."""
        self.pool.check_integrity()
        holders = Counter(block_id for table in self._tables.values() for block_id in table.block_ids)
        for block_id in range(self.pool.num_blocks):
            num_refs = self.pool.num_refs(block_id)
            assert num_refs == holders[block_id], (
                f"block {block_id}: {num_refs} references, {holders[block_id]} holders"
            )

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _block_hash(self, request: Request, index: int) -> bytes:
        hashes = request.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else _root(request.source.cache_salt)
            start = len(hashes) * self.block_size
            token_ids = request.token_ids[start : start + self.block_size]
            hashes.append(blake2b(parent + token_ids.tobytes(), digest_size=_HASH_SIZE).digest())
        return hashes[index]


def _root(cache_salt: str | None) -> bytes:
    if cache_salt is None:
        return _UNSALTED_ROOT
    return blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=_HASH_SIZE).digest()
