"""Whether an engine's process still lives, and whether its requests get on.

Owns the judgement, in beats: at each beat the engine is asked for a sign of life, and what came since the last one is
looked at. Knows no clock, so that a machine that was asleep, or a watcher that stood still, makes one late beat and no
verdict. Who asks, and what becomes of a bad engine, is supervisor.py's.

    no sign of life    MAX_SILENT_BEATS in a row. The process answers from a thread of its own, in the middle of a step
                       too: it is stopped, or stuck where nothing can be told. With or without requests, but an engine
                       without any is left alone once it has answered, until somebody wants it.
    no work            it has requests, and for `timeout` seconds no step computed a token. A long prompt is computed in
                       many steps, those who wait do so for others, and who is swapped gives way to others: all of that
                       computes tokens. Within one step nothing is known, so `timeout` must be longer than any step.
    work in vain       between two pieces of news (a token or an end, of anybody) an engine computes all that it has
                       once at most, but for preemptions. After MAX_REPEATS times that it goes round in circles. Not
                       where it has a beam search, whose only news is its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.engine.messages import SchedulerStats, TokenDelta

if TYPE_CHECKING:
    from octavo.engine.live_requests import LiveRequests

BEAT_SECONDS = 5.0
MAX_SILENT_BEATS = 4
MAX_REPEATS = 4


class Watch:
    """Of one engine after the other. `timeout` in seconds; 0: nothing is ever wrong."""

    def __init__(self, timeout: float) -> None:
        self.beat_seconds = min(BEAT_SECONDS, timeout / MAX_SILENT_BEATS) if timeout else BEAT_SECONDS
        self._timeout = timeout
        self._max_idle_beats = math.ceil(timeout / self.beat_seconds)
        self.begin()

    def begin(self) -> None:
        """A new engine, which has nothing yet."""
        self._num_steps = 0  # of the engine, as last seen
        self._num_silent = self._num_idle = 0  # beats in a row: nothing heard; nothing computed
        # Since the last beat:
        self._has_replied = self._has_news = False
        self._num_computed = self._num_given = 0  # tokens
        # Since the last beat with news; in tokens:
        self._num_in_vain = 0  # computed
        self._num_to_do = 0  # of all requests that were there at some time

    def give(self, num_tokens: int) -> None:
        """The engine gets a request with so many tokens."""
        self._num_given += num_tokens

    def take(self, deltas: Sequence[TokenDelta], stats: SchedulerStats) -> None:
        """The engine's reply to a step; `stats` are its own."""
        self._has_replied = True
        if stats.num_steps > self._num_steps:
            self._num_steps = stats.num_steps
            self._num_computed += stats.step_tokens
        if not self._has_news:  # the first of them will do; how much of a prompt is computed is no news
            self._has_news = any(delta.token_ids or delta.finish_reason is not None for delta in deltas)

    def beat(self, requests: LiveRequests, *, was_heard: bool, has_unread: bool) -> str | None:
        """What is wrong with the engine, if anything is. `was_heard`: something has come from its process since the
        last beat; `has_unread`: replies wait here, unread."""
        self._num_silent = 0 if was_heard else self._num_silent + 1
        if not requests.engine_has_any:
            self._num_idle = self._num_in_vain = self._num_to_do = 0
        else:
            is_unread = has_unread and not self._has_replied  # it is not the engine that keeps others waiting
            gets_on = self._num_computed or self._num_given or self._has_news or is_unread
            self._num_idle = 0 if gets_on else self._num_idle + 1
            self._num_in_vain = 0 if self._has_news else self._num_in_vain + self._num_computed
            self._num_to_do = self._num_given + (requests.num_engine_tokens if self._has_news else self._num_to_do)
        self._has_replied = self._has_news = False
        self._num_computed = self._num_given = 0
        return self._verdict(requests) if self._timeout else None

    def _verdict(self, requests: LiveRequests) -> str | None:
        if self._num_silent >= MAX_SILENT_BEATS:
            return f"the engine has given no sign of life for {MAX_SILENT_BEATS * self.beat_seconds:g} s"
        if self._num_idle >= self._max_idle_beats:
            return f"the engine has requests, and has computed nothing for {self._timeout:g} s"
        if self._num_in_vain > MAX_REPEATS * self._num_to_do and not requests.engine_has_beams:
            return f"the engine has computed {self._num_in_vain} tokens, and given none"
        return None
