"""Requests through a memory, step by step, and what each slot was good for meanwhile.

All requests wait at first and begin in order, as soon as the next one has room. In a step, each that runs gains one
token; a prompt is computed at once. Who finds no room for its token preempts the one that began last, which loses its
slots, and begins again with the tokens it has. Knows nothing of how memory is given out (memory.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.cli.bench.paging.lengths import Length
from octavo.cli.bench.paging.memory import Memory, Played
from octavo.errors import ConfigError


@dataclass(slots=True)
class Account:
    """Slots, summed over the steps. The first five add up to `num_slots`, all there are:

    │◄───────────── reserved for requests ─────────────►│
    │ tokens       │ reserved          │ internal       │ rounding          │ free
    │ held now     │ held later        │ never held     │ the allocator's   │ no use to who waits
    """

    tokens: int = 0
    reserved: int = 0
    internal: int = 0
    rounding: int = 0
    free: int = 0
    num_slots: int = 0
    num_steps: int = 0
    num_running: int = 0  # requests, summed over the steps
    num_preemptions: int = 0

    def add(self, running: Sequence[Played], memory: Memory) -> None:
        num_reserved = 0
        for played in running:
            useful = min(played.num_slots, played.max_tokens)
            self.tokens += played.num_tokens
            self.reserved += useful - played.num_tokens
            self.internal += played.num_slots - useful
            num_reserved += played.num_slots
        self.rounding += memory.num_taken - num_reserved
        self.free += memory.num_slots - memory.num_taken
        self.num_slots += memory.num_slots
        self.num_steps += 1
        self.num_running += len(running)


def play(memory: Memory, lengths: Sequence[Length], num_warmup: int) -> Account:
    """What became of the memory while somebody waited, from the step on when `num_warmup` requests have ended.

    ConfigError where no room is made for a request, or nobody waits for long enough.
    """
    waiting = deque(Played(length) for length in lengths)
    running: list[Played] = []  # in the order of `lengths`
    account = Account()
    while waiting or running:
        num_preempted = _extend(memory, running, waiting)
        while waiting and not num_preempted and memory.admit(waiting[0]):
            running.append(waiting.popleft())
        if not running:
            raise ConfigError(
                f"--num-blocks is too small: {memory.num_slots} slots have no room for a request of "
                f"{waiting[0].length.input} + {waiting[0].length.output} tokens"
            )
        if waiting and len(lengths) - len(waiting) - len(running) >= num_warmup:
            account.add(running, memory)
            account.num_preemptions += num_preempted
        running = _advance(memory, running)
    if account.num_steps == 0:
        raise ConfigError(
            f"--num-requests is {len(lengths)}; that is too few: nobody waits for {memory.num_slots} slots"
        )
    return account


def _extend(memory: Memory, running: list[Played], waiting: deque[Played]) -> int:
    """Room for one token more of all that run. Returns how many were preempted for that."""
    num_before = len(running)
    i = 0
    while i < len(running):
        if memory.extend(running[i]):
            i += 1
        else:
            memory.free(running[-1])
            waiting.appendleft(running.pop())
    return num_before - len(running)


def _advance(memory: Memory, running: list[Played]) -> list[Played]:
    """A token for each that runs. Returns those that go on."""
    going_on = []
    for played in running:
        played.num_sampled += 1
        if played.num_sampled < played.length.output:
            going_on.append(played)
        else:
            memory.free(played)
    return going_on
