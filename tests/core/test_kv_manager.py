from __future__ import annotations

import pytest

from octavo.core.block_pool import BlockPool
from octavo.core.kv_manager import KVManager, Prefix
from octavo.request import Request
from support.fake_runner import make_request

BLOCK_SIZE = 4


def make_kv(num_blocks: int = 16, enable_prefix_caching: bool = True) -> KVManager:
    return KVManager(BlockPool(num_blocks, enable_prefix_caching), BLOCK_SIZE)


def waiting(request_id: str, prompt: list[int], **fields: object) -> Request:
    return Request.from_source(make_request(request_id, prompt, **fields))


def compute_all(kv: KVManager, request: Request) -> None:
    assert kv.admit(request, kv.lookup(request), num_spare_blocks=0) is not None
    kv.take_transfers()
    request.num_computed_tokens = request.num_tokens
    kv.publish(request)


def num_cached_tokens(kv: KVManager, prompt: list[int], **fields: object) -> int:
    prefix = kv.lookup(waiting("probe", prompt, **fields))
    return len(prefix.block_ids) * BLOCK_SIZE + (prefix.part[1] if prefix.part else 0)


def test_admission_gives_blocks_for_all_tokens_and_allocate_only_when_one_is_full():
    kv = make_kv()
    request = waiting("a", [1] * 7)
    assert kv.admit(request, Prefix(), num_spare_blocks=0) == 0
    table = kv.block_table(request)
    assert len(table) == 2
    assert kv.allocate(request, 8) and len(table) == 2
    assert kv.allocate(request, 9) and len(table) == 3
    assert kv.usage == 3 / 16
    kv.check_integrity()


def test_want_of_blocks_changes_nothing():
    kv = make_kv(num_blocks=3)
    request, other = waiting("a", [1] * 8), waiting("b", [2] * 8)
    assert kv.admit(request, Prefix(), num_spare_blocks=1) == 0
    assert kv.admit(other, Prefix(), num_spare_blocks=0) is None
    assert not kv.allocate(request, 13)
    assert len(kv.block_table(request)) == 2 and kv.pool.num_free == 1
    kv.check_integrity()


def test_spare_blocks_stay_free():
    kv = make_kv(num_blocks=3)
    assert kv.admit(waiting("a", [1] * 8), Prefix(), num_spare_blocks=2) is None
    assert kv.admit(waiting("a", [1] * 8), Prefix(), num_spare_blocks=1) == 0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),  # both full blocks
        ([1, 2, 3, 4, 5, 6, 7, 8], 7),  # at most all but the last token
        ([1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 4], 3),
        ([1, 2, 3, 4, 5, 6, 7, 0, 9], 7),  # the second block differs in its last token
        ([1, 2, 3, 4, 0, 6, 7, 8, 9], 4),  # … in its first
        ([1, 2, 0, 4, 5, 6, 7, 8, 9], 2),
        ([0, 2, 3, 4, 5, 6, 7, 8, 9], 0),  # the second block is equal, but not what precedes it
        ([5, 6, 7, 8, 9], 0),
    ],
)
def test_lookup_finds_the_longest_prefix_of_full_blocks_and_the_beginning_of_one_more(prompt, expected):
    kv = make_kv()
    compute_all(kv, waiting("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert num_cached_tokens(kv, prompt) == expected


def test_blocks_are_known_only_once_they_are_computed():
    kv = make_kv()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    request = waiting("a", prompt)
    assert kv.admit(request, Prefix(), num_spare_blocks=0) == 0
    seen = []
    for request.num_computed_tokens in (0, 3, 4, 7, 8):
        kv.publish(request)
        seen.append(num_cached_tokens(kv, prompt))
    assert seen == [0, 0, 4, 4, 8]  # no part of a block that is not full: its owner still writes to it


def test_output_tokens_are_cached_like_the_prompt():
    kv = make_kv()
    request = waiting("a", [1, 2])
    assert kv.admit(request, Prefix(), num_spare_blocks=0) == 0
    request.token_ids.extend([3, 4, 5])
    request.num_computed_tokens = 4
    kv.publish(request)
    assert num_cached_tokens(kv, [1, 2, 3, 4, 5]) == 4


def test_each_salt_is_a_partition_and_so_is_none():
    kv = make_kv()
    prompt = [1, 2, 3, 4, 5]
    salts = [None, "a", "b", "\ud83d"]
    for i, salt in enumerate(salts):
        assert num_cached_tokens(kv, prompt, cache_salt=salt) == 0
        compute_all(kv, waiting(str(i), prompt, cache_salt=salt))
        assert num_cached_tokens(kv, prompt, cache_salt=salt) == 4


def test_prompt_logprobs_want_the_whole_prompt_computed_until_they_are_given_out():
    kv = make_kv()
    compute_all(kv, waiting("a", [1, 2, 3, 4, 5]))
    request = waiting("b", [1, 2, 3, 4, 5], prompt_logprobs=0)
    assert kv.lookup(request) == Prefix()
    request.token_ids.append(6)  # given out with the first token; what follows is a preempted request come back
    assert len(kv.lookup(request).block_ids) == 1


def test_cached_blocks_are_shared_not_copied():
    kv = make_kv()
    first, second = waiting("a", [1, 2, 3, 4, 5]), waiting("b", [1, 2, 3, 4, 6])
    compute_all(kv, first)
    compute_all(kv, second)
    assert kv.block_table(first)[0] == kv.block_table(second)[0]
    assert kv.block_table(first)[1] != kv.block_table(second)[1]
    assert kv.pool.num_used == 3
    kv.check_integrity()


def test_admission_does_not_evict_the_blocks_it_shares():
    kv = make_kv(num_blocks=3)
    first = waiting("a", [1, 2, 3, 4, 5])
    compute_all(kv, first)
    kv.free(first)
    request = waiting("b", [1, 2, 3, 4] + [6] * 8)
    cached = kv.lookup(request)
    assert len(cached.block_ids) == 1
    assert kv.admit(request, cached, num_spare_blocks=0) == 4
    assert len(set(kv.block_table(request))) == 3 and kv.block_table(request)[0] == cached.block_ids[0]


def test_cached_blocks_that_are_free_count_as_needed():
    kv = make_kv(num_blocks=3)
    first = waiting("a", [1, 2, 3, 4, 5])
    compute_all(kv, first)
    kv.free(first)
    request = waiting("b", [1, 2, 3, 4] + [6] * 9)
    assert kv.admit(request, kv.lookup(request), num_spare_blocks=0) is None
    assert kv.pool.num_free == 3


def test_the_tail_of_a_freed_request_is_evicted_before_its_head():
    kv = make_kv(num_blocks=4)
    prompt = list(range(16))
    request = waiting("a", prompt)
    compute_all(kv, request)
    kv.free(request)
    left = []
    for _ in range(4):
        kv.pool.allocate(1)
        left.append(num_cached_tokens(kv, [*prompt, 99]))
    assert left == [12, 8, 4, 0]


def test_after_a_reset_nothing_is_found_whether_free_or_in_use():
    kv = make_kv()
    gone, running = waiting("a", [1, 2, 3, 4, 5]), waiting("b", [6, 7, 8, 9, 10])
    for request in (gone, running):
        compute_all(kv, request)
    kv.free(gone)
    table = list(kv.block_table(running))
    kv.reset_prefix_cache()
    assert [num_cached_tokens(kv, prompt) for prompt in ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])] == [0, 0]
    assert list(kv.block_table(running)) == table
    assert (kv.num_lookup_tokens, kv.num_hit_tokens) == (10, 0)
    kv.check_integrity()


def test_what_fills_up_after_a_reset_is_found_behind_a_prefix_that_is_computed_anew():
    kv = make_kv()
    old = waiting("a", list(range(8)))
    compute_all(kv, old)
    kv.reset_prefix_cache()
    assert kv.allocate(old, 12)
    old.token_ids.extend(range(8, 12))
    old.num_computed_tokens = 12
    kv.publish(old)
    prompt = list(range(13))
    assert num_cached_tokens(kv, prompt) == 0  # its third block is known, the two before it are not
    new = waiting("b", list(range(9)))
    compute_all(kv, new)
    assert num_cached_tokens(kv, prompt) == 12
    assert kv.lookup(waiting("probe", prompt)).block_ids == [*kv.block_table(new)[:2], kv.block_table(old)[2]]
    for request in (old, new):
        kv.free(request)
    kv.check_integrity()


def test_hits_are_counted_once_for_each_request():
    kv = make_kv()
    compute_all(kv, waiting("a", [1, 2, 3, 4, 5]))
    request = waiting("b", [1, 2, 3, 4, 5, 6])
    compute_all(kv, request)
    kv.free(request)
    request.num_preemptions = 1
    compute_all(kv, request)
    assert (kv.num_lookup_tokens, kv.num_hit_tokens) == (5 + 6, 4)


def test_without_prefix_caching_nothing_is_hashed_or_counted():
    kv = make_kv(enable_prefix_caching=False)
    request = waiting("a", [1, 2, 3, 4, 5])
    compute_all(kv, request)
    assert request.block_hashes == []
    assert (kv.num_lookup_tokens, kv.num_hit_tokens, num_cached_tokens(kv, [1, 2, 3, 4, 5])) == (0, 0, 0)


def test_freeing_a_request_without_blocks_does_nothing():
    kv = make_kv()
    kv.free(waiting("a", [1]))
    kv.check_integrity()
