"""Which blocks hold which tokens of a request: block tables, their sharing, and the prefix cache.

Owns the block tables, and what has to be moved so that they are true (`take_transfers`). Knows nothing of budgets and
queues (scheduler.py), of the pool's free lists only numbers (block_pool.py), and of hashes only what they are for
(prefix_index.py).

One request, block_size 4, admitted with 9 cached tokens; a step computes 4 of the 5 tokens that it still lacks:

    token_ids     t0  t1  t2  t3 │ t4  t5  t6  t7 │ t8 │ t9 t10 t11 │t12│t13
                 ├── num_computed_tokens ─────────────┤├─ this step ───┤├later┤
    block_table   b0             │ b1             │ b2             │ b3      ·  ·
                 ├── cached, shared by hash ─────┤├── allocated at admission ───┤
                                                 ├──┤ copied: another block begins alike
    published    ├── num_published blocks: 2 ────┤├ b2 after step ┤├ once full ─┤

A block becomes known only after the step that computed its last token; the part-filled last one of a request, when
that gives its blocks back.

A fork shares all blocks of its parent, the part-filled last one too. Whoever writes to a shared block first gets a copy
of it; the last who holds it writes in place.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.block_pool import BlockPool
from octavo.core.plan import CopyBlock, EvictBlock, LoadBlock, RestoreBlock, SaveBlock, Transfer
from octavo.core.prefix_index import PrefixIndex, block_hash, chain_hash
from octavo.core.store import BlockStore
from octavo.core.swap import SwapSpace
from octavo.request import Request

SPARE_SHARE = 0.03  # of the pool; `octavo bench paging` shows what more would waste, and less preempt


@dataclass(slots=True)
class Prefix:
    """What is known of a waiting request's tokens, from the first on."""

    block_ids: list[int] = field(default_factory=list)  # whole blocks in the pool
    stored: list[bytes] = field(default_factory=list)  # the next whole blocks, in the store
    part: tuple[int, int] | None = None  # a block that begins like the next one, and for how many tokens
    num_tokens: int = 0  # of all these
    num_in_progress: int = 0  # tokens behind them that other requests are about to compute, and that could be used …
    awaited: bytes | None = None  # … and the last block of these
    num_stored_tokens: int = 0  # of num_tokens, those that the store gave: known when it is admitted


@dataclass(slots=True)
class _Table:
    block_ids: array[int]  # 'i'
    num_published: int  # blocks


class KVManager:
    def __init__(
        self, pool: BlockPool, block_size: int, *, swap: SwapSpace | None = None, store: BlockStore | None = None
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.swap = swap or SwapSpace(0)
        self.store = store
        self.num_lookup_tokens = 0  # looked up at first admissions
        self.num_hit_tokens = 0  # found then in the pool
        self.num_store_lookup_tokens = 0  # not found there, and looked up in the store
        self.num_store_hit_tokens = 0
        self._tables: dict[Request, _Table] = {}  # of those that hold blocks
        self._index = PrefixIndex()
        self._in_progress: dict[bytes, Request] = {}  # blocks of prompts that somebody is about to compute
        self._transfers: list[Transfer] = []
        pool.on_evict = self._forget_block

    @property
    def max_tokens(self) -> int:
        """The most tokens that one request alone can hold."""
        return self.pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0 … 1. Cached blocks are free."""
        return self.pool.num_used / self.pool.num_blocks

    def holds_blocks(self, request: Request) -> bool:
        return request in self._tables

    def block_table(self, request: Request) -> array[int]:
        """The live table: `allocate` extends it and replaces what it copied, nothing else changes it."""
        return self._tables[request].block_ids

    def take_transfers(self) -> list[Transfer]:
        """What the calls since the last time want moved, in this order, before anything is computed."""
        transfers, self._transfers = self._transfers, []
        return transfers

    def num_spare_blocks(self, num_rows: int) -> int:
        """Blocks to keep free at an admission, beside so many running rows: one for each, so that who comes now is not
        preempted at once; but where rows are many, they do not all fill a block in the same few steps."""
        return min(num_rows, max(1, int(SPARE_SHARE * self.pool.num_blocks)))

    # ── The beginning: what is known already ─────────────────────────────────────────────────────────────────────

    def lookup(self, request: Request) -> Prefix:
        """The longest known prefix of a waiting request.

        The last token is never in it: its logits are still to be computed. Nor is any other token of which something is
        wanted (`Request.reads_prefix_cache`).
        """
        prefix = Prefix()
        if not self.pool.enable_prefix_caching or not request.reads_prefix_cache:
            return prefix
        num_usable = request.num_tokens - 1
        for index in range(num_usable // self.block_size):
            content_hash = block_hash(request, index, self.block_size)
            block_id = None if prefix.stored else self.pool.find(content_hash)
            if block_id is not None:
                prefix.block_ids.append(block_id)
            elif self.store is not None and self.store.contains(content_hash):
                prefix.stored.append(content_hash)
            else:
                break
        num_whole = len(prefix.block_ids) + len(prefix.stored)
        start = num_whole * self.block_size
        rest = request.token_ids[start : min(num_usable, start + self.block_size)]
        found = self._index.longest(block_hash(request, num_whole - 1, self.block_size), rest)
        if found is not None:
            block_id = self.pool.find(found[0])
            assert block_id is not None, "the index knows a block that the pool does not"
            prefix.part = block_id, found[1]
        prefix.num_tokens = start + (0 if prefix.part is None else prefix.part[1])
        num_expected = start
        for index in range(num_whole, request.num_tokens // self.block_size if self._in_progress else 0):
            content_hash = block_hash(request, index, self.block_size)
            if content_hash not in self._in_progress:
                break
            num_expected += self.block_size
            prefix.awaited = content_hash
        prefix.num_in_progress = max(0, min(num_expected, num_usable) - prefix.num_tokens)
        return prefix

    def is_in_progress(self, content_hash: bytes) -> bool:
        """Whether somebody is about to compute this block."""
        return content_hash in self._in_progress

    def admit(self, request: Request, prefix: Prefix, num_spare_blocks: int) -> int | None:
        """Open the table of a waiting request: `prefix` (from `lookup`), then new blocks for all tokens it holds.

        Returns how many tokens need not be computed. None, and nothing has changed, unless `num_spare_blocks` blocks
        stay free after that.
        """
        cached = prefix.block_ids
        num_new = self._num_blocks_for(request.num_tokens) - len(cached)
        if num_new + self.pool.count_free(cached) + num_spare_blocks > self.pool.num_free:
            return None
        self.pool.share(cached)  # before allocating, which might evict them
        if prefix.part is not None:
            self.pool.touch(prefix.part[0])
        block_ids = array("i", cached)
        block_ids.extend(self.pool.allocate(num_new))
        num_cached, prefix.num_stored_tokens = self._fill(block_ids, prefix)
        self._tables[request] = _Table(block_ids, num_published=len(cached))
        if self.pool.enable_prefix_caching:
            for index in range(num_cached // self.block_size, request.num_tokens // self.block_size):
                content_hash = block_hash(request, index, self.block_size)
                if self.pool.find(content_hash) is None:
                    self._in_progress.setdefault(content_hash, request)
            if request.num_preemptions == 0:
                self._count_hits(request.num_tokens, num_cached - prefix.num_stored_tokens, prefix.num_stored_tokens)
        return num_cached

    def _count_hits(self, num_tokens: int, num_in_pool: int, num_in_store: int) -> None:
        self.num_lookup_tokens += num_tokens
        self.num_hit_tokens += num_in_pool
        if self.store is not None:
            self.num_store_lookup_tokens += num_tokens - num_in_pool
            self.num_store_hit_tokens += num_in_store

    def _fill(self, block_ids: array[int], prefix: Prefix) -> tuple[int, int]:
        """Bring in what of the prefix lies elsewhere. The number of tokens that are then there, and how many of them
        the store had."""
        payloads = []
        for content_hash in prefix.stored:
            payload = None if self.store is None else self.store.fetch(content_hash)
            if payload is None:
                break
            payloads.append(payload)
        num_whole = len(prefix.block_ids) + len(payloads)
        num_tokens = num_whole * self.block_size
        if prefix.part is not None and len(payloads) == len(prefix.stored):
            # Allocating may just have evicted the block that is copied: this comes before all that overwrites it.
            from_block, num_part_tokens = prefix.part
            self._transfers.append(CopyBlock(from_block, block_ids[num_whole], num_part_tokens))
            num_tokens += num_part_tokens
        for payload, block_id in zip(payloads, block_ids[len(prefix.block_ids) :], strict=False):
            self._transfers.append(LoadBlock(payload, block_id))
        return num_tokens, len(payloads) * self.block_size

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Open a table for `child`, whose first `num_tokens` tokens are those of `parent`: all their blocks are
        shared, the last one too if it is part-filled."""
        table = self._tables[parent]
        block_ids = table.block_ids[: self._num_blocks_for(num_tokens)]
        self.pool.share(block_ids)
        num_full = num_tokens // self.block_size
        child.block_hashes = parent.block_hashes[:num_full]
        self._tables[child] = _Table(block_ids, min(table.num_published, num_full))

    # ── The way on ───────────────────────────────────────────────────────────────────────────────────────────────

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Make the table cover the first `num_tokens` tokens, with blocks of the request's own from the first token on
        that is not computed. False, and nothing has changed, for want of blocks."""
        block_ids = self._tables[request].block_ids
        first, num_kept = divmod(request.num_computed_tokens, self.block_size)
        copies = num_kept > 0 and self.pool.num_refs(block_ids[first]) > 1
        num_room = len(block_ids) * self.block_size
        if num_tokens <= num_room and not copies:  # so it is in most steps
            return True
        num_new = self._num_blocks_for(max(0, num_tokens - num_room))
        if num_new + copies > self.pool.num_free:
            return False
        if copies:
            shared = block_ids[first]
            (block_ids[first],) = self.pool.allocate(1)
            self._transfers.append(CopyBlock(shared, block_ids[first], num_kept))
            self.pool.release([shared])
        if num_new:
            block_ids.extend(self.pool.allocate(num_new))
        return True

    def publish(self, request: Request) -> None:
        """Make the blocks known that the request's computed tokens have filled. Call it after the step, not before."""
        table = self._tables[request]
        num_full = request.num_computed_tokens // self.block_size
        if num_full == table.num_published or not self.pool.enable_prefix_caching:
            return
        for index in range(table.num_published, num_full):
            content_hash = block_hash(request, index, self.block_size)
            self._in_progress.pop(content_hash, None)
            self._publish_block(request, table.block_ids[index], index, content_hash, self.block_size)
        table.num_published = num_full

    def _publish_block(self, request: Request, block_id: int, index: int, content_hash: bytes, num_tokens: int) -> None:
        if self.pool.publish(block_id, content_hash):
            start = index * self.block_size
            parent = block_hash(request, index - 1, self.block_size)
            self._index.add(content_hash, parent, request.token_ids[start : start + num_tokens])

    # ── The end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def free(self, request: Request, *, publish_tail: bool = False) -> None:
        """Give back all blocks and slots, if the request holds any. Published blocks stay known until they are needed;
        the tail goes first, since a block without those before it is never found. `publish_tail`: the part-filled last
        block becomes known too; not where the request failed."""
        self.swap.release([request])
        table = self._tables.get(request)
        if table is None:
            return
        if publish_tail and self.pool.enable_prefix_caching:
            self._publish_tail(request, table)
        self._close(request)

    def _close(self, request: Request) -> None:
        table = self._tables.pop(request)
        if self._in_progress:
            for content_hash in request.block_hashes[table.num_published :]:
                if self._in_progress.get(content_hash) is request:
                    del self._in_progress[content_hash]
        self.pool.release(reversed(table.block_ids))

    def _publish_tail(self, request: Request, table: _Table) -> None:
        index, num_tokens = divmod(request.num_computed_tokens, self.block_size)
        if num_tokens == 0 or self.pool.num_refs(table.block_ids[index]) > 1:
            return
        if any(isinstance(each, CopyBlock) and each.to_block == table.block_ids[index] for each in self._transfers):
            return  # its content is still to come, and does not if the step fails
        start = index * self.block_size
        token_ids = request.token_ids[start : start + num_tokens]
        parent = block_hash(request, index - 1, self.block_size)
        known = self._index.longest(parent, token_ids)
        if known is None or known[1] < num_tokens:
            self._publish_block(request, table.block_ids[index], index, chain_hash(parent, token_ids), num_tokens)

    def _forget_block(self, block_id: int, content_hash: bytes) -> None:
        if self._index.remove(content_hash) == self.block_size and self.store is not None:
            self._transfers.append(EvictBlock(block_id, content_hash))

    # ── Out of the pool and back ─────────────────────────────────────────────────────────────────────────────────

    def swap_out(self, requests: Sequence[Request]) -> bool:
        """Move what these requests have computed to the swap space, and free their blocks. False, and nothing has
        changed, for want of slots."""
        computed = {r: self._tables[r].block_ids[: self._num_blocks_for(r.num_computed_tokens)] for r in requests}
        slot_of = self.swap.put(computed)
        if slot_of is None:
            return False
        self._transfers += [SaveBlock(block_id, slot) for block_id, slot in slot_of.items()]
        for request in requests:
            self._close(request)
        return True

    def swap_in(self, requests: Sequence[Request], num_spare_blocks: int) -> bool:
        """The way back, and new blocks for all tokens that these requests hold. They share full blocks as before; a
        part-filled one, which is written to next, is each one's own. False, and nothing has changed, unless
        `num_spare_blocks` blocks stay free after that."""
        num_full = {request: request.num_computed_tokens // self.block_size for request in requests}
        full_slots = {request: self.swap.slots(request)[: num_full[request]] for request in requests}
        num_own = {request: self._num_blocks_for(request.num_tokens) - num_full[request] for request in requests}
        distinct = dict.fromkeys(slot for slots in full_slots.values() for slot in slots)
        if len(distinct) + sum(num_own.values()) + num_spare_blocks > self.pool.num_free:
            return False
        block_of = dict(zip(distinct, self.pool.allocate(len(distinct)), strict=True))
        self._transfers += [RestoreBlock(slot, block_id) for slot, block_id in block_of.items()]
        for request in requests:
            full = [block_of[slot] for slot in full_slots[request]]
            self.pool.share(full)
            own = self.pool.allocate(num_own[request])
            part_filled = self.swap.slots(request)[num_full[request] :]  # one or none
            self._transfers += [RestoreBlock(slot, own[0]) for slot in part_filled]
            # What it computed may no longer be known. After a reset it is not to be.
            num_published = num_full[request] if self.swap.is_forgotten(request) else 0
            self._tables[request] = _Table(array("i", full + own), num_published)
        self.pool.release(block_of.values())  # their tables hold them
        self.swap.release(requests)
        return True

    def evictions(self) -> list[EvictBlock]:
        """What would keep all that is known in the store: the blocks of most use come first."""
        return [
            EvictBlock(block_id, content_hash)
            for block_id, content_hash in self.pool.known_blocks()
            if self._index.num_tokens(content_hash) == self.block_size
        ]

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is shared any more, but by forks; what the store has stays there. Who holds blocks
        keeps them, and publishes those that fill up later: they are found only behind a prefix that was computed anew.
        The counters go on."""
        self.pool.forget()
        self.swap.forget()
        self._index.clear()
        self._in_progress.clear()

    def check_integrity(self) -> None:
        """AssertionError unless the pool is sound and its reference counts are those of the tables."""
        self.pool.check_integrity()
        self.swap.check_integrity()
        holders = Counter(block_id for table in self._tables.values() for block_id in table.block_ids)
        for block_id in range(self.pool.num_blocks):
            num_refs = self.pool.num_refs(block_id)
            assert num_refs == holders[block_id], (
                f"block {block_id}: {num_refs} references, {holders[block_id]} holders"
            )
        assert all(owner in self._tables for owner in self._in_progress.values()), "who left is expected to compute"

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
