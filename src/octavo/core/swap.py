"""The swap space: where the blocks of preempted requests wait. Owns which slots are taken, and by whom.

A slot is as large as a block. Knows nothing of the memory behind the slots (runtime/kv_cache.py), nor when to swap
(preemption.py).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

from octavo.request import Request


class SwapSpace:
    """Requests that are swapped out together share slots as they shared blocks."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._num_users = array("i", [0]) * num_slots
        self._tables: dict[Request, array[int]] = {}  # slots in the order of the request's tokens
        self._forgotten: set[Request] = set()  # swapped out before the last reset of the prefix cache

    def __contains__(self, request: Request) -> bool:
        return request in self._tables

    @property
    def num_free(self) -> int:
        return len(self._free)

    def put(self, block_tables: dict[Request, array[int]]) -> dict[int, int] | None:
        """Slots for the blocks in these tables: {block_id: slot}. None, and nothing has changed, for want of slots."""
        block_ids = list(dict.fromkeys(block_id for table in block_tables.values() for block_id in table))
        if len(block_ids) > len(self._free):
            return None
        slot_of = {block_id: self._free.pop() for block_id in block_ids}
        for request, table in block_tables.items():
            slots = array("i", [slot_of[block_id] for block_id in table])
            for slot in slots:
                self._num_users[slot] += 1
            self._tables[request] = slots
        return slot_of

    def slots(self, request: Request) -> array[int]:
        return self._tables[request]

    def forget(self) -> None:
        """Nothing that is here now is to become known to others."""
        self._forgotten.update(self._tables)

    def is_forgotten(self, request: Request) -> bool:
        return request in self._forgotten

    def release(self, requests: Iterable[Request]) -> None:
        """Give back the slots of those among these requests that hold any."""
        for request in requests:
            self._forgotten.discard(request)
            for slot in self._tables.pop(request, ()):
                self._num_users[slot] -= 1
                if self._num_users[slot] == 0:
                    self._free.append(slot)

    def check_integrity(self) -> None:
        """AssertionError unless every slot is either free or held as often as the tables say."""
        held = Counter(slot for slots in self._tables.values() for slot in slots)
        assert all(num_users == held[slot] for slot, num_users in enumerate(self._num_users)), "users are miscounted"
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert len(self._free) + len(held) == self.num_slots, "a slot is neither free nor in use, or both"
        assert self._forgotten <= self._tables.keys(), "what is no longer here is remembered"
