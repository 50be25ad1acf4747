from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.block_pool import BlockPool


def publish_all(pool: BlockPool, block_ids: list[int]) -> None:
    for block_id in block_ids:
        pool.publish(block_id, b"content of %d" % block_id)


def test_allocate_and_release_count_every_block():
    pool = BlockPool(4, enable_prefix_caching=True)
    block_ids = pool.allocate(3)
    assert len(set(block_ids)) == 3 and (pool.num_used, pool.num_free) == (3, 1)
    pool.release(block_ids)
    assert (pool.num_used, pool.num_free) == (0, 4)
    pool.check_integrity()


def test_allocating_more_than_is_free_changes_nothing():
    pool = BlockPool(4, enable_prefix_caching=True)
    pool.allocate(3)
    with pytest.raises(ValueError, match="num_blocks is 2; the pool has 1 free blocks"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_integrity()


def test_releasing_a_free_block_is_an_error():
    pool = BlockPool(2, enable_prefix_caching=True)
    (block_id,) = pool.allocate(1)
    pool.release([block_id])
    with pytest.raises(ValueError, match=f"block {block_id} is released, but not in use"):
        pool.release([block_id])


def test_a_shared_block_is_free_only_when_everybody_has_released_it():
    pool = BlockPool(2, enable_prefix_caching=True)
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, b"x")
    pool.share([block_id])
    pool.release([block_id])
    assert (pool.num_refs(block_id), pool.num_used) == (1, 1)
    pool.release([block_id])
    assert (pool.num_refs(block_id), pool.num_used) == (0, 0)


def test_blank_blocks_are_handed_out_before_any_cached_one():
    pool = BlockPool(6, enable_prefix_caching=True)
    cached = pool.allocate(3)
    publish_all(pool, cached)
    pool.release(cached)
    assert not set(pool.allocate(3)) & set(cached)
    assert set(pool.allocate(3)) == set(cached)


def test_the_block_released_longest_ago_is_evicted_first():
    pool = BlockPool(4, enable_prefix_caching=True)
    a, b, c, d = pool.allocate(4)
    publish_all(pool, [a, b, c, d])
    pool.release([c, a])
    pool.release([d])
    pool.share([c])  # in use again, and released last
    pool.release([b, c])
    assert [pool.allocate(1) for _ in range(4)] == [[a], [d], [b], [c]]


def test_a_block_keeps_its_content_until_it_is_evicted():
    pool = BlockPool(1, enable_prefix_caching=True)
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, b"x")
    pool.release([block_id])
    assert pool.find(b"x") == block_id
    pool.share([block_id])
    assert pool.num_used == 1
    pool.release([block_id])
    pool.allocate(1)
    assert pool.find(b"x") is None


def test_of_two_equal_blocks_the_first_stays_known():
    pool = BlockPool(2, enable_prefix_caching=True)
    first, second = pool.allocate(2)
    pool.publish(first, b"x")
    pool.publish(second, b"x")
    assert pool.find(b"x") == first
    pool.release([first, second])
    assert pool.allocate(1) == [second]  # it holds nothing that is known: blank
    pool.check_integrity()


def test_nothing_is_found_when_prefix_caching_is_off():
    pool = BlockPool(1, enable_prefix_caching=False)
    pool.publish(pool.allocate(1)[0], b"x")
    assert pool.find(b"x") is None


def test_count_free_tells_what_sharing_will_take():
    pool = BlockPool(3, enable_prefix_caching=True)
    a, b, c = pool.allocate(3)
    publish_all(pool, [a, b, c])
    pool.release([a, b])
    assert pool.count_free([a, b, c]) == 2
    pool.share([a, b, c])
    assert pool.num_free == 0


def test_forget_makes_cached_blocks_blank_and_leaves_those_in_use_where_they_are():
    pool = BlockPool(4, enable_prefix_caching=True)
    a, b, c = pool.allocate(3)
    publish_all(pool, [a, b, c])
    pool.release([a, b])
    pool.forget()
    assert [pool.find(b"content of %d" % block_id) for block_id in (a, b, c)] == [None] * 3
    assert (pool.num_used, pool.num_refs(c)) == (1, 1)
    pool.check_integrity()
    pool.publish(c, b"content of %d" % c)
    assert pool.find(b"content of %d" % c) == c
    assert set(pool.allocate(2)) == {a, b}  # memory that was touched before, before any new
    pool.release([c])
    pool.check_integrity()


class RandomOperations(RuleBasedStateMachine):
    """Against a model that holds plain lists: who holds which block, and what each block contains."""

    @initialize(num_blocks=st.integers(1, 8), enable_prefix_caching=st.sampled_from([True, True, False]))
    def start(self, num_blocks, enable_prefix_caching):
        self.pool = BlockPool(num_blocks, enable_prefix_caching)
        self.held: list[int] = []  # one entry for each reference
        self.content: dict[int, bytes] = {}  # of known blocks, in use or not

    @rule(num_blocks=st.integers(0, 8))
    def allocate(self, num_blocks):
        num_free = self.pool.num_blocks - len(set(self.held))
        if num_blocks > num_free:
            with pytest.raises(ValueError, match="num_blocks"):
                self.pool.allocate(num_blocks)
            return
        block_ids = self.pool.allocate(num_blocks)
        assert not set(block_ids) & set(self.held) and len(set(block_ids)) == num_blocks
        self.held += block_ids
        for block_id in block_ids:
            self.content.pop(block_id, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        block_ids = data.draw(st.lists(st.sampled_from(range(len(self.held))), unique=True, min_size=1))
        self.pool.release([self.held[i] for i in block_ids])
        self.held = [block_id for i, block_id in enumerate(self.held) if i not in block_ids]

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data):
        block_id = data.draw(st.sampled_from(sorted(self.content)))
        self.pool.share([block_id])
        self.held.append(block_id)

    @precondition(lambda self: set(self.held) - set(self.content))
    @rule(data=st.data(), content=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def publish(self, data, content):
        block_id = data.draw(st.sampled_from(sorted(set(self.held) - set(self.content))))
        self.pool.publish(block_id, content)
        if self.pool.enable_prefix_caching and content not in self.content.values():
            self.content[block_id] = content

    @rule()
    def forget(self):
        self.pool.forget()
        self.content.clear()

    @invariant()
    def agrees_with_the_model(self):
        self.pool.check_integrity()
        assert self.pool.num_used == len(set(self.held))
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks
        holders = Counter(self.held)
        assert all(self.pool.num_refs(i) == holders[i] for i in range(self.pool.num_blocks))
        known = {content: block_id for block_id, content in self.content.items()}
        assert all(self.pool.find(content) == known.get(content) for content in (b"a", b"b", b"c", b"d"))


RandomOperations.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
TestRandomOperations = RandomOperations.TestCase
