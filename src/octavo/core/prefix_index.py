"""What blocks contain, by the tokens in them: chained hashes, and which known blocks begin as wanted.

Owns what a content hash is made of and the search inside a block. Knows nothing of block ids and references
(block_pool.py), and of requests only their tokens.

A full block is found by the chained hash of all tokens up to its end,

    hash(i) = H(hash(i - 1) + token ids of block i),   hash(-1) = the root of the request's cache_salt

so one equal hash means an equal prefix. What follows the last full block that is known may still begin like a known
block: all blocks that follow one hash are listed here, part-filled ones too, by their tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from octavo.request import Request

HASH_SIZE = 32  # bytes: nobody finds two prompts with one hash, so nobody reads another's cache by a collision
_UNSALTED_ROOT = bytes(HASH_SIZE)
_MAX_SEARCHED = 64  # blocks that follow one hash with the same first token: newest first, the rest are not looked at


def root_hash(cache_salt: str | None) -> bytes:
    if cache_salt is None:
        return _UNSALTED_ROOT
    return blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=HASH_SIZE).digest()


def chain_hash(parent: bytes, token_ids: array[int]) -> bytes:
    return blake2b(parent + token_ids.tobytes(), digest_size=HASH_SIZE).digest()


def block_hash(request: Request, index: int, block_size: int) -> bytes:
    """Of full block `index` of a request; -1: the root. Computed once for each block and kept with the request."""
    hashes = request.block_hashes
    if index < 0:
        return root_hash(request.source.cache_salt)
    while len(hashes) <= index:
        parent = hashes[-1] if hashes else root_hash(request.source.cache_salt)
        start = len(hashes) * block_size
        hashes.append(chain_hash(parent, request.token_ids[start : start + block_size]))
    return hashes[index]


@dataclass(slots=True)
class _Entry:
    parent: bytes
    token_ids: array[int]  # 'i', not empty


class PrefixIndex:
    """The known blocks by what precedes them."""

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}  # by content hash
        self._following: dict[tuple[bytes, int], dict[bytes, None]] = {}  # (parent, first token) -> content hashes

    def add(self, content_hash: bytes, parent: bytes, token_ids: array[int]) -> None:
        self._entries[content_hash] = _Entry(parent, token_ids)
        self._following.setdefault((parent, token_ids[0]), {})[content_hash] = None

    def remove(self, content_hash: bytes) -> int:
        """Forget a block; the number of tokens that it held."""
        entry = self._entries.pop(content_hash)
        key = (entry.parent, entry.token_ids[0])
        following = self._following[key]
        del following[content_hash]
        if not following:
            del self._following[key]
        return len(entry.token_ids)

    def num_tokens(self, content_hash: bytes) -> int:
        """That a known block holds."""
        return len(self._entries[content_hash].token_ids)

    def clear(self) -> None:
        self._entries.clear()
        self._following.clear()

    def longest(self, parent: bytes, token_ids: Sequence[int]) -> tuple[bytes, int] | None:
        """Of the blocks that follow `parent`, the one that shares most tokens with `token_ids`, and how many."""
        if not token_ids:
            return None
        best: tuple[bytes, int] | None = None
        following = self._following.get((parent, token_ids[0]), {})
        for _, content_hash in zip(range(_MAX_SEARCHED), reversed(following), strict=False):
            num_equal = common_prefix(self._entries[content_hash].token_ids, token_ids)
            if best is None or num_equal > best[1]:
                best = content_hash, num_equal
        return best


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences share at their beginning."""
    num_tokens = min(len(first), len(second))
    for i in range(num_tokens):
        if first[i] != second[i]:
            return i
    return num_tokens
