"""Where a request stands: waiting or running, in the policy's order, and how many seats are taken.

Owns the two queues and the seats. Knows no blocks and no budgets (scheduler.py), and of the order only that there is
one (policy.py).
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import islice

from octavo.core.policy import Policy
from octavo.request import Request, RequestStatus


class Queues:
    """Every row of a step takes one of `max_num_seqs` seats: a request one, a beam search one for each beam."""

    def __init__(self, policy: Policy, max_num_seqs: int) -> None:
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_seats_taken = 0

    @property
    def num_free_seats(self) -> int:
        return self.max_num_seqs - self.num_seats_taken

    def has_seats(self, request: Request) -> bool:
        return request.num_seats <= self.num_free_seats

    @property
    def may_admit(self) -> bool:
        """Whether somebody waits for whom there is a seat. Samples that wait for another to compute their prompt do not
        count: what is kept from that one for their sake would delay them too."""
        first = next(self._seekers(), None)
        return first is not None and self.has_seats(first)

    def count_seekers(self, at_most: int) -> int:
        """How many wait for a seat, as far as there are seats."""
        return sum(1 for _ in islice(self._seekers(), min(at_most, self.num_free_seats)))

    def _seekers(self) -> Iterator[Request]:
        return (request for request in self.waiting if request.fork_from is None)

    def add(self, request: Request) -> None:
        self._insert(self.waiting, request)

    def start(self, request: Request) -> None:
        """From waiting to running."""
        self.waiting.remove(request)
        self._insert(self.running, request)
        self.num_seats_taken += request.num_seats
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.time()
            self.policy.start(request)

    def put_back(self, request: Request) -> None:
        """From running to waiting, before its equals."""
        self._stop(request)
        request.status = RequestStatus.PREEMPTED
        order = self.policy.order
        self.waiting.insert(bisect_left(self.waiting, order(request), key=order), request)

    def remove(self, request: Request) -> None:
        """It has ended, wherever it was."""
        if request.status is RequestStatus.RUNNING:
            self._stop(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.num_seats_taken -= request.num_seats

    def _insert(self, queue: list[Request], request: Request) -> None:
        """Where the policy's order puts it, behind its equals."""
        queue.insert(bisect_right(queue, self.policy.order(request), key=self.policy.order), request)

    def check_integrity(self) -> None:
        """AssertionError unless statuses and seats agree with the queues."""
        assert all(r.status is RequestStatus.RUNNING for r in self.running), "a request that runs has another status"
        assert not any(r.status in (RequestStatus.RUNNING, RequestStatus.FINISHED) for r in self.waiting)
        assert self.num_seats_taken == sum(r.num_seats for r in self.running), "the seats are miscounted"
