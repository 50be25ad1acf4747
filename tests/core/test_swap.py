"""The swap space alone, and the KV manager's way out of the pool and back."""

from __future__ import annotations

from array import array

import pytest

from octavo.core.block_pool import BlockPool
from octavo.core.kv_manager import KVManager
from octavo.core.plan import RestoreBlock, SaveBlock
from octavo.core.swap import SwapSpace
from octavo.request import Request
from support.fake_runner import make_request

BLOCK_SIZE = 4


def waiting(request_id: str, prompt: list[int]) -> Request:
    return Request.from_source(make_request(request_id, prompt))


def make_kv(num_blocks: int = 16, num_slots: int = 16) -> KVManager:
    return KVManager(BlockPool(num_blocks, True), BLOCK_SIZE, swap=SwapSpace(num_slots))


def computed(kv: KVManager, request_id: str, prompt: list[int], num_computed_tokens: int | None = None) -> Request:
    request = waiting(request_id, prompt)
    assert kv.admit(request, kv.lookup(request), num_spare_blocks=0) is not None
    request.num_computed_tokens = request.num_tokens if num_computed_tokens is None else num_computed_tokens
    kv.publish(request)
    kv.take_transfers()
    return request


def num_cached_tokens(kv: KVManager, prompt: list[int]) -> int:
    prefix = kv.lookup(waiting("probe", prompt))
    return len(prefix.block_ids) * BLOCK_SIZE + (prefix.part[1] if prefix.part else 0)


# ── Slots ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_blocks_that_are_shared_take_one_slot():
    swap, first, second = SwapSpace(4), waiting("a", [1]), waiting("b", [1])
    assert swap.put({first: array("i", [7, 8]), second: array("i", [7, 9])}) == {7: 0, 8: 1, 9: 2}
    assert (list(swap.slots(first)), list(swap.slots(second)), swap.num_free) == ([0, 1], [0, 2], 1)
    assert first in swap and second in swap
    swap.check_integrity()
    swap.release([first])
    assert swap.num_free == 2 and first not in swap  # slot 0 is still the second's
    swap.check_integrity()
    swap.release([first, second])
    assert swap.num_free == 4
    swap.check_integrity()


def test_want_of_slots_changes_nothing():
    swap, request = SwapSpace(1), waiting("a", [1])
    assert swap.put({request: array("i", [3, 4])}) is None
    assert swap.num_free == 1 and request not in swap
    assert SwapSpace(0).put({request: array("i", [3])}) is None


# ── Out of the pool and back ─────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_computed_goes_out_and_comes_back_and_the_rest_is_new():
    kv = make_kv()
    request = computed(kv, "a", list(range(11)), num_computed_tokens=6)
    assert list(kv.block_table(request)) == [0, 1, 2]
    assert kv.swap_out([request])
    assert kv.take_transfers() == [SaveBlock(0, 0), SaveBlock(1, 1)]  # nothing is in the third yet
    assert not kv.holds_blocks(request) and kv.pool.num_used == 0 and kv.swap.num_free == 14
    kv.check_integrity()
    assert kv.swap_in([request], num_spare_blocks=13)
    table = kv.block_table(request)
    assert kv.take_transfers() == [RestoreBlock(0, table[0]), RestoreBlock(1, table[1])]
    assert len(table) == 3 and kv.swap.num_free == 16
    kv.check_integrity()


def test_a_part_filled_block_that_is_shared_comes_back_once_for_each_who_writes_to_it():
    kv = make_kv()
    parent = computed(kv, "a", list(range(6)))
    child = waiting("b", list(range(6)))
    kv.fork(parent, child, 6)
    child.num_computed_tokens = 6
    for request in (parent, child):
        request.token_ids.append(9)
    assert kv.swap_out([parent, child])
    assert kv.take_transfers() == [SaveBlock(0, 0), SaveBlock(1, 1)]
    assert kv.swap_in([parent, child], num_spare_blocks=0)
    (full, first), (shared, second) = kv.block_table(parent), kv.block_table(child)
    assert kv.take_transfers() == [RestoreBlock(0, full), RestoreBlock(1, first), RestoreBlock(1, second)]
    assert shared == full and first != second
    assert [kv.pool.num_refs(block_id) for block_id in (full, first, second)] == [2, 1, 1]
    for request in (parent, child):
        assert kv.allocate(request, 7)
    assert kv.take_transfers() == []  # each writes in place
    kv.check_integrity()


def test_want_of_slots_or_blocks_leaves_everything_where_it_is():
    kv = make_kv(num_blocks=3, num_slots=2)
    request = computed(kv, "a", list(range(9)))
    assert not kv.swap_out([request])
    assert len(kv.block_table(request)) == 3 and kv.take_transfers() == []
    kv.free(request)
    request = computed(kv, "b", list(range(20, 28)))
    assert kv.swap_out([request])
    kv.take_transfers()
    assert not kv.swap_in([request], num_spare_blocks=2)
    assert request in kv.swap and kv.pool.num_used == 0 and kv.take_transfers() == []
    assert kv.swap_in([request], num_spare_blocks=1)
    kv.check_integrity()


def test_who_ends_while_swapped_out_gives_its_slots_back():
    kv = make_kv()
    request = computed(kv, "a", list(range(9)))
    assert kv.swap_out([request])
    kv.free(request, publish_tail=True)
    assert kv.swap.num_free == 16
    kv.check_integrity()


@pytest.mark.parametrize(("resets", "expected"), [(False, 8), (True, 0)])
def test_what_comes_back_is_known_again_unless_the_cache_was_reset_meanwhile(resets, expected):
    kv = make_kv(num_blocks=3)
    request = computed(kv, "a", list(range(10)))
    assert kv.swap_out([request])
    kv.free(computed(kv, "other", list(range(50, 62))))  # evicts all that the request left in the pool
    assert num_cached_tokens(kv, list(range(10))) == 0
    if resets:
        kv.reset_prefix_cache()
    assert kv.swap_in([request], num_spare_blocks=0)
    kv.publish(request)
    assert num_cached_tokens(kv, list(range(10))) == expected
    kv.free(request)
    kv.check_integrity()
