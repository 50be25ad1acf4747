"""Who goes first, and who gives way. Knows requests; knows nothing of blocks, budgets and steps.

To add a policy: a class with `order`, and its name below and in `config.py`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.request import Request

# Most users that are remembered while they want nothing: naming ever new ones takes no more memory than this.
MAX_IDLE_ACCOUNTS = 1024


class Policy:
    """The scheduler asks `order` and `victim`, and tells how each request fares: `arrive` once, before the first
    `order`; `start` at its first admission, if there is one, with `first_scheduled_time` set; `finish` once, however it
    ends."""

    def order(self, request: Request) -> tuple[float, ...]:
        """The smallest goes first; among equals, who came first. Fixed for a request's life: the waiting are kept
        sorted by it, and who was preempted stands before all that came later, so that nobody is passed over for ever.
        """
        raise NotImplementedError

    def victim(self, candidates: Collection[Request]) -> Request:
        """Who is preempted when blocks run out. `candidates` is not empty; among equals, who came last is last."""
        return sorted(candidates, key=self.order)[-1]  # a stable sort: among equals the last

    def arrive(self, request: Request) -> None:
        """Most policies need no news."""

    def start(self, request: Request) -> None: ...

    def finish(self, request: Request) -> None: ...


class FCFS(Policy):
    """First come, first served: the last to come gives way."""

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.source.arrival_time,)


class Priority(Policy):
    """A lower value goes first and gives way last; among equals, first come, first served."""

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.source.priority, request.source.arrival_time)


@dataclass(slots=True)
class _Account:
    finish_tag: int = 0  # where the user's next request starts, unless the virtual time is further
    start_tag: int = 0  # of the first request since the virtual time last was
    num_requests: int = 0  # that have not ended


class Fair(Policy):
    """Equal shares for all users who want something: start-time fair queueing.

    Each user's requests stand one behind the other on a line of virtual time, whose unit is the token:

        user a    ├── request 1 ──┤├── request 2 ──┤├── request 3 ──┤        arrived together
        user b                 ├ 4 ┤├ 5 ┤                                    arrived when the virtual time was here
        virtual time ──────────▲

    A request starts where its user's last one ends (the finish tag), but not before the virtual time, which is the
    start tag of the request that was started last; and it is as long as its cost, the tokens it may take. The smallest
    start tag goes first. So a thousand requests of one user stand beside another's first, not before it, and who comes
    back after a while has lost nothing and saved nothing. While two users both have requests waiting, what is started
    for the one and for the other differs by no more than one request of each. What a request did not use, its user gets
    back at its end, for the requests that come after; so a low `max_tokens` pays where many are sent at once.

    Requests without a user are one user's. The samples of a prompt share its cost.

    Sources: Goyal, Vin, Cheng: Start-time fair queuing: a scheduling algorithm for integrated services packet
    switching networks, SIGCOMM 1996. Tokens as the measure of service to users of a language model: Sheng et al.:
    Fairness in serving large language models, OSDI 2024.
    """

    def __init__(self) -> None:
        self._virtual_time = 0
        self._start_tags: dict[Request, int] = {}  # of those that have not ended
        self._unstarted: list[int] = []  # the tags of those that were never started, sorted
        self._accounts: dict[str | None, _Account] = {}  # by user
        self._idle: OrderedDict[str | None, None] = OrderedDict()  # users without requests; who was left first is first

    def order(self, request: Request) -> tuple[float, ...]:
        return (self._start_tags[request], request.source.arrival_time)

    def arrive(self, request: Request) -> None:
        user = request.source.user
        account = self._accounts.setdefault(user, _Account())
        self._idle.pop(user, None)
        if account.finish_tag <= self._virtual_time:
            account.finish_tag = account.start_tag = self._virtual_time
        self._start_tags[request] = account.finish_tag
        insort(self._unstarted, account.finish_tag)
        account.finish_tag += _cost(request)
        account.num_requests += 1

    def start(self, request: Request) -> None:
        start_tag = self._start_tags[request]
        del self._unstarted[bisect_left(self._unstarted, start_tag)]
        # Who is started before its turn, as samples are with the first of their prompt, does not take time along.
        self._virtual_time = max(self._virtual_time, min([start_tag, *self._unstarted[:1]]))

    def finish(self, request: Request) -> None:
        user, start_tag = request.source.user, self._start_tags.pop(request)
        if request.first_scheduled_time is None:
            del self._unstarted[bisect_left(self._unstarted, start_tag)]
        account = self._accounts[user]
        # What was ahead of the virtual time once, and no longer was when the user came back, delays nobody any more.
        if start_tag >= account.start_tag:
            account.finish_tag -= _cost(request) - _used(request)
        account.num_requests -= 1
        if account.num_requests == 0:
            self._idle[user] = None
            self._forget()

    def _forget(self) -> None:
        """Drop the accounts of idle users that say no more than the virtual time does."""
        if not self._start_tags:  # nobody competes with anybody
            self._accounts.clear()
            self._idle.clear()
            self._virtual_time = 0
        while self._idle:
            user = next(iter(self._idle))
            if self._accounts[user].finish_tag > self._virtual_time:
                if len(self._idle) <= MAX_IDLE_ACCOUNTS:
                    return
                # Time goes on, or ever new users, who all start now, would pass over the second request of an old one.
                self._virtual_time = self._accounts[user].finish_tag
            del self._accounts[user], self._idle[user]


def _cost(request: Request) -> int:
    """The tokens that a request may take. Of the samples of a prompt only the first computes it."""
    num_prompt_tokens = 0 if request.source.sample_index else request.num_prompt_tokens
    return num_prompt_tokens + (request.params.max_tokens or 0) * request.num_seats


def _used(request: Request) -> int:
    """What a request that has ended did take."""
    if request.first_scheduled_time is None:
        return 0
    num_prompt_tokens = 0 if request.source.sample_index else request.num_prompt_tokens
    if request.source.beams is not None:
        return num_prompt_tokens + request.num_search_steps * request.num_seats
    return num_prompt_tokens + request.num_output_tokens


def make_policy(name: str) -> Policy:
    """`name` as in `EngineConfig.scheduling_policy`; any other: ConfigError."""
    match name:
        case "fcfs":
            return FCFS()
        case "priority":
            return Priority()
        case "fair":
            return Fair()
    raise ConfigError(f"scheduling_policy is {name!r}; allowed: fcfs, priority, fair", param="scheduling_policy")
