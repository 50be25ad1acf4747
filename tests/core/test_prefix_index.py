from __future__ import annotations

from array import array

from octavo.core.prefix_index import PrefixIndex, block_hash, chain_hash, common_prefix, root_hash
from octavo.request import Request
from support.fake_runner import make_request


def ids(*token_ids: int) -> array[int]:
    return array("i", token_ids)


def test_of_the_blocks_behind_one_hash_the_one_that_shares_most_is_found():
    index = PrefixIndex()
    index.add(b"a", b"root", ids(1, 2, 3, 4))
    index.add(b"b", b"root", ids(1, 2, 9))
    index.add(b"c", b"a", ids(1, 2, 3, 5))
    assert index.longest(b"root", [1, 2, 3, 7]) == (b"a", 3)
    assert index.longest(b"root", [1, 2, 9, 9]) == (b"b", 3)  # part-filled: no more than it holds
    assert index.longest(b"root", [1]) == (b"b", 1)  # of equals the newest
    assert index.longest(b"a", [1, 2, 3, 4]) == (b"c", 3)  # what precedes it counts
    assert index.longest(b"root", [2, 2, 3]) is None
    assert index.longest(b"nobody", [1, 2, 3]) is None
    assert index.longest(b"root", []) is None


def test_a_removed_block_is_not_found_and_says_how_many_tokens_it_held():
    index = PrefixIndex()
    index.add(b"a", b"root", ids(1, 2, 3, 4))
    index.add(b"b", b"root", ids(1, 2))
    assert (index.num_tokens(b"a"), index.num_tokens(b"b"), len(index._entries)) == (4, 2, 2)
    assert index.remove(b"a") == 4
    assert index.longest(b"root", [1, 2, 3, 4]) == (b"b", 2)
    assert index.remove(b"b") == 2
    assert index.longest(b"root", [1, 2, 3, 4]) is None and not index._entries and not index._following
    index.add(b"a", b"root", ids(1, 2, 3, 4))
    index.clear()
    assert index.longest(b"root", [1]) is None and not index._entries and not index._following


def test_the_search_looks_at_the_newest_64():
    index = PrefixIndex()
    index.add(b"old", b"root", ids(1, 2, 3, 4))
    for i in range(63):
        index.add(str(i).encode(), b"root", ids(1, 100 + i))
    assert index.longest(b"root", [1, 2, 3, 4]) == (b"old", 4)
    index.add(b"one more", b"root", ids(1, 99))
    assert index.longest(b"root", [1, 2, 3, 4]) == (b"one more", 1)


def test_a_hash_is_of_all_tokens_up_to_the_end_of_its_block():
    def request(*token_ids: int, **fields: object) -> Request:
        return Request.from_source(make_request("a", list(token_ids), **fields))

    first = request(1, 2, 3, 4, 5)
    assert block_hash(first, 1, 2) == chain_hash(chain_hash(root_hash(None), ids(1, 2)), ids(3, 4))
    assert first.block_hashes == [block_hash(first, 0, 2), block_hash(first, 1, 2)]  # kept
    assert block_hash(first, -1, 2) == root_hash(None) == bytes(32)
    assert block_hash(request(1, 2, 3, 4), 1, 2) == block_hash(first, 1, 2)
    others = [request(0, 2, 3, 4), request(1, 2, 3, 0), request(1, 2, 3, 4, cache_salt="s")]
    assert len({block_hash(other, 1, 2) for other in (first, *others)}) == 4


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0
