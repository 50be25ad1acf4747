"""Who gets which part of the KV memory: contiguous slots, reserved when a request begins, and octavo's blocks.

A slot holds the KV of one token. Owns the allocators; knows nothing of time and of queues (steps.py).

As in the PagedAttention paper, three systems reserve contiguous slots for a request's prompt and output, and differ in
what they know of its length; a buddy allocator (the paper's assumption for Orca) or a first-fit one finds the place:

    max      up to the end of the context
    pow2     the output's length rounded up to a power of two
    oracle   what will be held, to the token
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable

from octavo.cli.bench.paging.lengths import Length
from octavo.core.block_pool import BlockPool
from octavo.core.kv_manager import KVManager, Prefix
from octavo.request import BeamSearchParams, EngineRequest, Request, SamplingParams


class Played:
    """A request without tokens. In the step that samples its output token i (from 0 on), it holds `input` + i tokens:
    the last one that it samples is never computed."""

    def __init__(self, length: Length) -> None:
        self.length = length
        self.num_sampled = 0
        self.num_slots = 0  # reserved for it

    @property
    def num_tokens(self) -> int:
        return self.length.input + self.num_sampled

    @property
    def max_tokens(self) -> int:
        """The most that it will ever hold."""
        return self.length.input + self.length.output - 1


class Memory(ABC):
    """`num_slots` of them; `num_taken` are taken, with those that an allocator's rounding costs."""

    num_slots: int

    @property
    @abstractmethod
    def num_taken(self) -> int: ...

    @abstractmethod
    def admit(self, played: Played) -> bool:
        """Slots for the tokens of one that waits, or more. False: there is no room."""

    @abstractmethod
    def extend(self, played: Played) -> bool:
        """The same for one that runs, and has one token more than at the last call. False: it keeps what it has."""

    @abstractmethod
    def free(self, played: Played) -> None: ...


# ── Contiguous slots ─────────────────────────────────────────────────────────────────────────────────────────────────


class Places(ABC):
    """Finds contiguous places."""

    num_taken = 0

    @abstractmethod
    def allocate(self, num_slots: int) -> int | None:
        """The first slot; None: no free place is large enough."""

    @abstractmethod
    def free(self, start: int) -> None: ...


class FirstFit(Places):
    """The lowest gap that is large enough; neighbouring gaps become one."""

    def __init__(self, num_slots: int) -> None:
        self._gaps = [(0, num_slots)]  # (start, size), in order
        self._sizes: dict[int, int] = {}

    def allocate(self, num_slots: int) -> int | None:
        for i, (start, size) in enumerate(self._gaps):
            if size >= num_slots:
                self._gaps[i : i + 1] = [(start + num_slots, size - num_slots)] if size > num_slots else []
                self._sizes[start] = num_slots
                self.num_taken += num_slots
                return start
        return None

    def free(self, start: int) -> None:
        size = self._sizes.pop(start)
        self.num_taken -= size
        i = bisect_left(self._gaps, (start, 0))
        if i < len(self._gaps) and self._gaps[i][0] == start + size:
            size += self._gaps.pop(i)[1]
        if i > 0 and sum(self._gaps[i - 1]) == start:
            i -= 1
            start, size_before = self._gaps.pop(i)
            size += size_before
        self._gaps.insert(i, (start, size))


class Buddy(Places):
    """Powers of two: a place of 2^k slots begins at a multiple of 2^k, is split into two halves, its buddies, and is
    whole again when both are free (Knowlton 1965). A memory of another size is a row of such places, largest first."""

    def __init__(self, num_slots: int) -> None:
        self._free: list[list[int]] = [[] for _ in range(num_slots.bit_length())]  # by order k: starts, sorted
        self._orders: dict[int, int] = {}  # of what is allocated
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots & 1 << order:
                self._free[order].append(start)
                start += 1 << order

    def allocate(self, num_slots: int) -> int | None:
        order = (num_slots - 1).bit_length()
        found = next((k for k in range(order, len(self._free)) if self._free[k]), None)
        if found is None:
            return None
        start = self._free[found].pop(0)
        for k in reversed(range(order, found)):
            insort(self._free[k], start + (1 << k))
        self._orders[start] = order
        self.num_taken += 1 << order
        return start

    def free(self, start: int) -> None:
        order = self._orders.pop(start)
        self.num_taken -= 1 << order
        while (buddy := start ^ 1 << order) in self._free[order]:
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        insort(self._free[order], start)


class Contiguous(Memory):
    """`reserve`: how many slots a request of this length gets for its whole life."""

    def __init__(self, num_slots: int, places: Places, reserve: Callable[[Length], int]) -> None:
        self.num_slots = num_slots
        self._places = places
        self._reserve = reserve
        self._starts: dict[Played, int] = {}

    @property
    def num_taken(self) -> int:
        return self._places.num_taken

    def admit(self, played: Played) -> bool:
        num_slots = self._reserve(played.length)
        start = self._places.allocate(num_slots)
        if start is None:
            return False
        self._starts[played] = start
        played.num_slots = num_slots
        return True

    def extend(self, played: Played) -> bool:
        return True

    def free(self, played: Played) -> None:
        self._places.free(self._starts.pop(played))


def reserve_pow2(length: Length, max_model_len: int) -> int:
    """Pow2: at most twice what the output takes, and never beyond the context."""
    return min(max_model_len, length.input + (1 << (length.output - 1).bit_length()))


def reserve_oracle(length: Length) -> int:
    return length.input + length.output - 1


# ── Blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Paged(Memory):
    """The engine's own block manager, asked as its scheduler asks it: some spare blocks for the requests that run stay
    free at an admission. There is nothing to share, so the prefix cache is off."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_slots = num_blocks * block_size
        self.kv = make_kv(num_blocks, block_size)
        self._requests: dict[Played, Request] = {}

    @property
    def num_taken(self) -> int:
        return self.kv.pool.num_used * self.kv.block_size

    def admit(self, played: Played) -> bool:
        request = make_request(played.num_tokens)
        if self.kv.admit(request, Prefix(), self.kv.num_spare_blocks(len(self._requests))) is None:
            return False
        self._requests[played] = request
        self._note(played, request)
        return True

    def extend(self, played: Played) -> bool:
        request = self._requests[played]
        if not self.kv.allocate(request, played.num_tokens):
            return False
        request.token_ids.append(0)
        self._note(played, request)
        return True

    def free(self, played: Played) -> None:
        self.kv.free(self._requests.pop(played))

    def _note(self, played: Played, request: Request) -> None:
        request.num_computed_tokens = request.num_tokens
        played.num_slots = len(self.kv.block_table(request)) * self.kv.block_size


def make_kv(num_blocks: int, block_size: int) -> KVManager:
    return KVManager(BlockPool(num_blocks, enable_prefix_caching=False), block_size)


def make_request(num_tokens: int, beams: BeamSearchParams | None = None) -> Request:
    """`num_tokens` tokens of a prompt; which ones does not matter."""
    source = EngineRequest(request_id="", prompt_token_ids=[], params=SamplingParams(), seed=0, beams=beams)
    return Request(source, array("i", bytes(4 * num_tokens)))
