"""A picture of the requests and the blocks at one moment, for people who look on.

Owns the numbers that stand for requests in it. Reads the scheduler and the pool between two steps and changes nothing;
who asks for a picture, and how often, it does not know. The engine waits for it, so tables are copied as they are: what
they say of each block is for the reader to find out.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

from octavo.request import Request

if TYPE_CHECKING:
    from octavo.core.scheduler import Scheduler

MAX_SHOWN = 256  # requests in a picture: more than a page can show; the tables of the others are there all the same


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
    tables: list[tuple[int, bytes]]  # of each row: the request's number, and its block ids as an array 'i'
    cached: bytes  # array 'i': the ids of the blocks that are cached


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
        return Picture(
            requests=shown,
            num_waiting=len(waiting),
            num_prefill=num_prefill,
            num_decode=len(running) - num_prefill,
            tables=[
                (self._numbers[request.request_id], scheduler.kv.block_table(row).tobytes())
                for request in running
                for row in scheduler.rows.with_blocks(request)
            ],
            cached=array("i", scheduler.kv.pool.cached_blocks()).tobytes(),
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
