"""Who goes first, and who gives way. Knows requests; knows nothing of blocks, budgets and steps.

To add a policy: a class with `order` and `victim`, and its name below and in `config.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from octavo.errors import ConfigError
from octavo.request import Request


class Policy(Protocol):
    def order(self, request: Request) -> tuple[float, ...]:
        """The smallest goes first; among equals, who came first. Fixed for a request's life: the waiting are kept
        sorted by it, and who was preempted stands before all that came later, so that nobody is passed over for ever.
        """

    def victim(self, candidates: Collection[Request]) -> Request:
        """Who is preempted when blocks run out. `candidates` is not empty; among equals, who came last is last."""


class FCFS:
    """First come, first served: the last to come gives way."""

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.source.arrival_time,)

    def victim(self, candidates: Collection[Request]) -> Request:
        return sorted(candidates, key=self.order)[-1]  # a stable sort: among equals the last


class Priority(FCFS):
    """A lower value goes first and gives way last; among equals, first come, first served."""

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.source.priority, request.source.arrival_time)


def make_policy(name: str) -> Policy:
    """`name` as in `EngineConfig.scheduling_policy`; any other: ConfigError."""
    match name:
        case "fcfs":
            return FCFS()
        case "priority":
            return Priority()
    raise ConfigError(f"scheduling_policy is {name!r}; allowed: fcfs, priority", param="scheduling_policy")
