"""Forks and copy-on-write, hits inside a block, a store behind the pool: which blocks, and which transfers, exactly."""

from __future__ import annotations

import pytest

from octavo.core.block_pool import BlockPool
from octavo.core.kv_manager import KVManager, Prefix
from octavo.core.plan import CopyBlock, EvictBlock, LoadBlock
from octavo.core.prefix_index import block_hash
from octavo.core.swap import SwapSpace
from octavo.request import Request
from support.fake_runner import FakeStore, make_request

BLOCK_SIZE = 4


def make_kv(num_blocks: int = 16, store: FakeStore | None = None, *, enable_prefix_caching: bool = True) -> KVManager:
    """Blocks are given out in the order of their ids."""
    return KVManager(BlockPool(num_blocks, enable_prefix_caching), BLOCK_SIZE, swap=SwapSpace(8), store=store)


def waiting(request_id: str, prompt: list[int], **fields: object) -> Request:
    return Request.from_source(make_request(request_id, prompt, **fields))


def admit(kv: KVManager, request: Request) -> int:
    num_cached_tokens = kv.admit(request, kv.lookup(request), num_spare_blocks=0)
    assert num_cached_tokens is not None
    request.num_computed_tokens = num_cached_tokens
    kv.check_integrity()
    return num_cached_tokens


def computed(kv: KVManager, request_id: str, prompt: list[int]) -> Request:
    request = waiting(request_id, prompt)
    admit(kv, request)
    kv.take_transfers()
    request.num_computed_tokens = request.num_tokens
    kv.publish(request)
    return request


def forked(kv: KVManager, parent: Request, num_tokens: int) -> Request:
    child = waiting("child", list(parent.token_ids[: parent.num_prompt_tokens]))
    kv.fork(parent, child, num_tokens)
    child.num_computed_tokens = num_tokens
    kv.check_integrity()
    return child


def write(kv: KVManager, request: Request) -> list[int]:
    """One token more, as a step does; the block table afterwards."""
    request.token_ids.append(9)
    assert kv.allocate(request, request.num_tokens)
    kv.check_integrity()
    return list(kv.block_table(request))


# ── Forks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fork_shares_all_blocks_and_who_writes_first_copies():
    kv = make_kv()
    parent = computed(kv, "a", list(range(6)))
    child = forked(kv, parent, 6)
    assert list(kv.block_table(child)) == list(kv.block_table(parent)) == [0, 1]
    assert kv.pool.num_used == 2 and kv.take_transfers() == []
    assert write(kv, parent) == [0, 2]
    assert kv.take_transfers() == [CopyBlock(1, 2, 2)]
    assert write(kv, child) == [0, 1]  # the last who holds it writes in place
    assert kv.take_transfers() == []
    assert write(kv, parent) == [0, 2] and write(kv, child) == [0, 1] and kv.take_transfers() == []


def test_of_three_who_share_a_block_the_first_two_to_write_copy():
    kv = make_kv()
    parent = computed(kv, "a", list(range(7)))
    first, second = forked(kv, parent, 7), forked(kv, parent, 7)
    assert [write(kv, each) for each in (second, parent, first)] == [[0, 2], [0, 3], [0, 1]]
    assert kv.take_transfers() == [CopyBlock(1, 2, 3), CopyBlock(1, 3, 3)]
    for request in (parent, second, first):
        kv.free(request)
    assert kv.pool.num_used == 0
    kv.check_integrity()


def test_at_the_end_of_a_block_nothing_is_copied():
    kv = make_kv()
    parent = computed(kv, "a", list(range(8)))
    child = forked(kv, parent, 8)
    assert write(kv, parent) == [0, 1, 2] and write(kv, child) == [0, 1, 3]
    assert kv.take_transfers() == []


def test_a_block_whose_other_holders_have_gone_is_written_in_place():
    kv = make_kv()
    parent = computed(kv, "a", list(range(6)))
    child = forked(kv, parent, 6)
    kv.free(parent, publish_tail=True)  # not its alone: it stays unknown, and the child goes on in it
    assert kv.lookup(waiting("probe", [0, 1, 2, 3, 4, 5, 6])) == Prefix([0], num_tokens=4)
    assert write(kv, child) == [0, 1] and kv.take_transfers() == []


@pytest.mark.parametrize(
    ("num_tokens", "table", "transfers"),
    [(5, [0, 2], [CopyBlock(1, 2, 1)]), (4, [0, 2], []), (3, [2], [CopyBlock(0, 2, 3)])],
)
def test_a_fork_may_share_only_the_beginning(num_tokens, table, transfers):
    kv = make_kv()
    child = forked(kv, computed(kv, "a", list(range(7))), num_tokens)
    assert kv.allocate(child, num_tokens + 1)
    assert (list(kv.block_table(child)), kv.take_transfers()) == (table, transfers)
    kv.check_integrity()


def test_a_copy_for_which_there_is_no_block_changes_nothing():
    kv = make_kv(num_blocks=2)
    parent = computed(kv, "a", list(range(6)))
    forked(kv, parent, 6)
    assert not kv.allocate(parent, 7)
    assert list(kv.block_table(parent)) == [0, 1] and kv.take_transfers() == []
    kv.check_integrity()


def test_a_copy_and_a_new_block_are_had_together_or_not_at_all():
    kv = make_kv(num_blocks=3)
    parent = computed(kv, "a", list(range(6)))
    forked(kv, parent, 6)
    assert not kv.allocate(parent, 9)
    assert list(kv.block_table(parent)) == [0, 1] and kv.pool.num_free == 1 and kv.take_transfers() == []


def test_after_a_reset_a_fork_does_not_make_its_parents_blocks_known_again():
    kv = make_kv()
    child = forked(kv, computed(kv, "a", list(range(8))), 8)
    kv.reset_prefix_cache()
    child.token_ids.extend(range(8, 12))
    assert kv.allocate(child, 12)
    child.num_computed_tokens = 12
    kv.publish(child)
    assert kv.lookup(waiting("probe", list(range(13)))) == Prefix()


# ── The part-filled last block ───────────────────────────────────────────────────────────────────────────────────────


def test_the_last_block_of_who_ends_is_found_as_far_as_it_is_filled():
    kv = make_kv()
    kv.free(computed(kv, "a", [1, 2, 3, 4, 5, 6]), publish_tail=True)
    assert kv.lookup(waiting("probe", [1, 2, 3, 4, 5, 6, 7])) == Prefix([0], part=(1, 2), num_tokens=6)
    assert kv.lookup(waiting("probe", [1, 2, 3, 4, 5, 6])) == Prefix(
        [0], part=(1, 1), num_tokens=5
    )  # all but the last token
    assert kv.lookup(waiting("probe", [1, 2, 3, 4, 9, 6, 7])) == Prefix([0], num_tokens=4)
    request = waiting("b", [1, 2, 3, 4, 5, 6, 7])
    assert admit(kv, request) == 6
    assert (list(kv.block_table(request)), kv.take_transfers()) == ([0, 2], [CopyBlock(1, 2, 2)])


@pytest.mark.parametrize(
    ("prompt", "known"), [([1, 2, 3, 4, 5], 1), ([1, 2, 3, 4, 5, 6], 1), ([1, 2, 3, 4, 5, 6, 7], 2)]
)
def test_a_beginning_that_is_known_does_not_become_known_again(prompt, known):
    kv = make_kv()
    kv.free(computed(kv, "a", [1, 2, 3, 4, 5, 6]), publish_tail=True)
    kv.free(computed(kv, "b", prompt), publish_tail=True)
    assert len(kv.pool.known_blocks()) == 1 + known
    kv.check_integrity()


def test_the_tail_of_who_failed_stays_unknown():
    kv = make_kv()
    kv.free(computed(kv, "a", [1, 2, 3, 4, 5, 6]))
    assert kv.lookup(waiting("probe", [1, 2, 3, 4, 5, 6, 7])) == Prefix([0], num_tokens=4)


def test_a_tail_that_is_still_to_be_copied_stays_unknown():
    """If the step fails, it never is."""
    kv = make_kv()
    parent = computed(kv, "a", [1, 2, 3, 4, 5, 6])
    child = forked(kv, parent, 6)
    assert kv.allocate(child, 7)
    kv.free(child, publish_tail=True)
    assert kv.lookup(waiting("probe", [1, 2, 3, 4, 5, 6, 7])) == Prefix([0], num_tokens=4)
    kv.take_transfers()
    kv.free(parent, publish_tail=True)
    assert kv.lookup(waiting("probe", [1, 2, 3, 4, 5, 6, 7])) == Prefix([0], part=(1, 2), num_tokens=6)


def test_a_block_may_be_evicted_by_the_admission_that_copies_from_it():
    kv = make_kv(num_blocks=3)
    kv.free(computed(kv, "a", [1, 2, 3, 4, 5, 6]), publish_tail=True)
    request = waiting("b", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert admit(kv, request) == 6
    assert (list(kv.block_table(request)), kv.take_transfers()) == ([0, 2, 1], [CopyBlock(1, 2, 2)])


def test_a_block_may_even_be_copied_onto_itself():
    kv = make_kv(num_blocks=2)
    kv.free(computed(kv, "a", [1, 2, 3, 4, 5, 6]), publish_tail=True)
    request = waiting("b", [1, 2, 3, 4, 5, 6, 7])
    assert admit(kv, request) == 6
    assert (list(kv.block_table(request)), kv.take_transfers()) == ([0, 1], [CopyBlock(1, 1, 2)])


# ── Who is about to compute what ─────────────────────────────────────────────────────────────────────────────────────

WAVE = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("end", ["free", "swap_out", "reset_prefix_cache"])
def test_blocks_in_progress_are_expected_until_their_owner_leaves(end):
    kv = make_kv()
    request = waiting("a", WAVE)
    admit(kv, request)
    first, second = request.block_hashes
    assert kv.lookup(waiting("probe", WAVE)) == Prefix(num_in_progress=8, awaited=second)
    assert kv.lookup(waiting("probe", WAVE[:8])) == Prefix(num_in_progress=7, awaited=second)  # all but the last token
    assert kv.lookup(waiting("probe", [1, 2, 3, 4, 5, 6, 7, 0, 9])) == Prefix(num_in_progress=4, awaited=first)
    assert kv.lookup(waiting("probe", WAVE, cache_salt="s")) == Prefix()
    request.num_computed_tokens = 5
    kv.publish(request)
    assert kv.lookup(waiting("probe", WAVE)) == Prefix([0], num_tokens=4, num_in_progress=4, awaited=second)
    match end:
        case "free":
            kv.free(request)
        case "swap_out":
            assert kv.swap_out([request])
        case "reset_prefix_cache":
            kv.reset_prefix_cache()
    assert kv.lookup(waiting("probe", WAVE)).num_in_progress == 0 and not kv.is_in_progress(second)
    kv.check_integrity()


def test_what_is_known_is_not_expected_of_who_computes_it_again():
    kv = make_kv()
    computed(kv, "a", WAVE[:8])
    request = waiting("b", WAVE[:8])
    assert admit(kv, request) == 7  # the block of the last token is its own
    assert kv.lookup(waiting("probe", WAVE[:8])) == Prefix([0], part=(1, 3), num_tokens=7)


def test_nothing_is_expected_where_nothing_becomes_known():
    kv = make_kv(enable_prefix_caching=False)
    admit(kv, waiting("a", WAVE))
    assert kv.lookup(waiting("probe", WAVE)) == Prefix()


# ── A store behind the pool ──────────────────────────────────────────────────────────────────────────────────────────


def store_with(*blocks: int) -> tuple[FakeStore, list[bytes]]:
    """A store that has these blocks of WAVE; the hashes of all its full blocks."""
    store, request = FakeStore(), waiting("a", WAVE)
    hashes = [block_hash(request, index, BLOCK_SIZE) for index in range(2)]
    for index in blocks:
        store.blocks[hashes[index]] = [index] * BLOCK_SIZE
    return store, hashes


def test_blocks_in_the_store_are_loaded():
    store, hashes = store_with(0, 1)
    kv, request = make_kv(store=store), waiting("a", WAVE)
    prefix = kv.lookup(request)
    assert prefix == Prefix(stored=hashes, num_tokens=8)
    assert kv.admit(request, prefix, num_spare_blocks=0) == 8 == prefix.num_stored_tokens
    request.num_computed_tokens = 8
    assert kv.take_transfers() == [LoadBlock([0] * 4, 0), LoadBlock([1] * 4, 1)]
    assert kv.lookup(waiting("probe", WAVE)).block_ids == []  # known once the step is done
    kv.publish(request)
    assert kv.lookup(waiting("probe", WAVE)).block_ids == [0, 1]
    assert (kv.num_lookup_tokens, kv.num_hit_tokens) == (9, 0)
    assert (kv.num_store_lookup_tokens, kv.num_store_hit_tokens) == (9, 8)


@pytest.mark.parametrize(("damaged", "num_cached", "loaded"), [(1, 4, [0]), (0, 0, [])])
def test_a_damaged_payload_ends_the_chain(damaged, num_cached, loaded):
    store, hashes = store_with(0, 1)
    store.damaged.add(hashes[damaged])
    kv, request = make_kv(store=store), waiting("a", WAVE)
    assert admit(kv, request) == num_cached
    assert kv.take_transfers() == [LoadBlock([index] * 4, index) for index in loaded]
    assert kv.lookup(waiting("probe", WAVE)).num_in_progress == 8 - num_cached  # what is computed instead
    kv.free(request)
    kv.check_integrity()


def test_the_chain_goes_from_the_pool_to_the_store():
    store, hashes = store_with(1)
    kv = make_kv(store=store)
    kv.free(computed(kv, "a", WAVE[:5]))
    assert kv.lookup(waiting("b", WAVE)) == Prefix([0], stored=hashes[1:], num_tokens=8)
    request = waiting("b", WAVE)
    assert admit(kv, request) == 8
    assert kv.take_transfers() == [LoadBlock([1] * 4, 1)] and list(kv.block_table(request)) == [0, 1, 2]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_lies_in_the_pool_behind_a_stored_block_is_copied_unless_that_is_damaged(is_damaged):
    store, hashes = store_with(0)
    kv = make_kv(num_blocks=4, store=store)
    kv.free(computed(kv, "a", WAVE))  # blocks 0 and 1 are known; 1 would be evicted first
    kv.pool.touch(1)
    other = computed(kv, "other", [50] * 12)  # evicts block 0
    kv.free(other)
    kv.take_transfers()
    assert kv.lookup(waiting("b", WAVE)) == Prefix(stored=hashes[:1], part=(1, 4), num_tokens=8)
    if is_damaged:
        store.damaged.add(hashes[0])
    request = waiting("b", WAVE)
    assert admit(kv, request) == (0 if is_damaged else 8)
    copies = [each for each in kv.take_transfers() if not isinstance(each, EvictBlock)]
    first, second, _ = kv.block_table(request)
    assert copies == ([] if is_damaged else [CopyBlock(1, second, 4), LoadBlock([0] * 4, first)])


def test_full_blocks_go_to_the_store_before_anything_takes_their_place_and_tails_are_dropped():
    kv = make_kv(num_blocks=3, store=FakeStore())
    request = computed(kv, "a", WAVE)
    hashes = list(request.block_hashes)
    kv.free(request, publish_tail=True)  # evicted in this order: the tail, block 1, block 0
    request = waiting("b", [1, 2, 3, 4, 5, 6, 0, 0, 0])
    assert kv.lookup(request) == Prefix([0], part=(1, 2), num_tokens=6)
    assert admit(kv, request) == 6
    assert list(kv.block_table(request)) == [0, 2, 1]
    assert kv.take_transfers() == [EvictBlock(1, hashes[1]), CopyBlock(1, 2, 2)]


def test_an_orderly_end_keeps_full_blocks_those_of_most_use_first():
    kv = make_kv(store=FakeStore())
    running = computed(kv, "a", [9] * 5)
    gone = computed(kv, "b", WAVE)
    kv.free(gone, publish_tail=True)
    assert kv.evictions() == [
        EvictBlock(kv.block_table(running)[0], running.block_hashes[0]),
        EvictBlock(2, gone.block_hashes[0]),
        EvictBlock(3, gone.block_hashes[1]),
    ]
