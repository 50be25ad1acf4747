"""A picture of the requests and the blocks at one moment, for people who look on.

Owns the numbers that stand for requests in it. Reads the scheduler and the pool between two steps and changes nothing;
who asks for a picture, and how often, it does not know. It costs some 30 ns for each block that is not free.

    block      0   1   2   3   4   5   6
    owners     1   1   2   2  -1   0   0     request 1 has two blocks, request 2 two, one is cached, two are free
    num_refs   2   1   1   1   0   0   0     the first one is shared by two requests
"""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Iterable
from itertools import count, islice, repeat
from typing import TYPE_CHECKING, NamedTuple

from octavo.request import Request

if TYPE_CHECKING:
    from octavo.core.scheduler import Scheduler

FREE, CACHED = 0, -1
MAX_SHOWN = 256  # requests in a picture: as many as a page can show; their blocks are in the map in any case


class Phase(enum.StrEnum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


class RequestPicture(NamedTuple):
    """Tokens of a beam search are those of its best beam. A number is a request's own while pictures are taken, and
    another's afterwards; 0: it waits, and has had none."""

    number: int
    phase: Phase
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_preemptions: int


class Picture(NamedTuple):
    requests: list[RequestPicture]  # the running ones first, MAX_SHOWN of all
    num_waiting: int
    num_prefill: int
    num_decode: int
    owners: bytes  # array 'h' [num_blocks]: FREE, CACHED, or the number of the first request that holds the block
    num_refs: bytes  # array 'i' [num_blocks]: how many hold it


class Painter:
    """Takes pictures of one scheduler. A request keeps its number from picture to picture."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._numbers: dict[str, int] = {}  # by request_id

    def paint(self) -> Picture:
        scheduler = self._scheduler
        running, waiting = scheduler.running, scheduler.waiting
        self._give_numbers(running)
        phases = [self._phase(request) for request in running]
        shown = [self._show(request, phase) for request, phase in zip(running[:MAX_SHOWN], phases, strict=False)]
        shown += [self._show(request, Phase.WAITING) for request in islice(waiting, MAX_SHOWN - len(shown))]
        num_prefill = phases.count(Phase.PREFILL)
        pool = scheduler.kv.pool
        return Picture(
            requests=shown,
            num_waiting=len(waiting),
            num_prefill=num_prefill,
            num_decode=len(running) - num_prefill,
            owners=self._owners(running).tobytes(),
            num_refs=pool.all_num_refs().tobytes(),
        )

    def _give_numbers(self, running: Iterable[Request]) -> None:
        """To who has none, the smallest that are free."""
        known = self._numbers
        self._numbers = {r.request_id: known[r.request_id] for r in running if r.request_id in known}
        taken = set(self._numbers.values())
        free = (number for number in count(1) if number not in taken)
        for request in running:
            if request.request_id not in self._numbers:
                self._numbers[request.request_id] = next(free)

    def _phase(self, request: Request) -> Phase:
        rows = self._scheduler.rows.all(request)
        decodes = all(row.num_output_tokens > 0 and row.num_left <= 1 for row in rows)
        return Phase.DECODE if decodes else Phase.PREFILL

    def _show(self, request: Request, phase: Phase) -> RequestPicture:
        first = self._scheduler.rows.all(request)[0]
        return RequestPicture(
            self._numbers.get(request.request_id, 0),
            phase,
            request.num_prompt_tokens,
            first.num_output_tokens,
            first.num_computed_tokens,
            request.num_preemptions,
        )

    def _owners(self, running: Iterable[Request]) -> array[int]:
        """'h' [num_blocks]."""
        scheduler = self._scheduler
        owners = array("h", [FREE]) * scheduler.kv.pool.num_blocks
        _mark(owners, scheduler.kv.pool.cached_blocks(), CACHED)
        for request in reversed(list(running)):  # so that the first to have come owns what is shared
            number = self._numbers[request.request_id]
            for row in scheduler.rows.with_blocks(request):
                _mark(owners, scheduler.kv.block_table(row), number)
        return owners


def _mark(owners: array[int], block_ids: Iterable[int], owner: int) -> None:
    deque(map(owners.__setitem__, block_ids, repeat(owner)), maxlen=0)  # half the time of a loop
