"""The responses that later ones may follow (--enable-responses-store): in memory, bounded, the least recently used go
first.

Owns which are kept, whose each is, and the conversation that each ends. Knows no HTTP and no shape of a response.

A conversation is a chain of turns, each with the messages that it added. Like the blocks of a common prefix, turns are
shared and counted: one lives as long as a kept response ends with it, or with a turn behind it.

    response 1 ─► turn 1 ◄─┬─ turn 2 ◄─ response 2
                           └─ turn 3 ◄─ response 3      another answer to the same
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.errors import NotFoundError

Messages = list[dict[str, Any]]  # as response_items.py makes them


@dataclass(slots=True, eq=False)
class Turn:
    messages: bytes  # JSON: memory is what it counts
    before: Turn | None
    num_holders: int = 0  # kept responses that end with it, and held turns right behind it

    def conversation(self) -> Messages:
        """The messages of all turns up to this one."""
        turns = reversed(list(self.chain()))
        return [message for turn in turns for message in msgspec.json.decode(turn.messages)]

    def chain(self) -> Iterator[Turn]:
        """This turn, and all before it, the first one last."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.before


@dataclass(slots=True)
class StoredResponse:
    record: bytes  # JSON, as it was answered
    turn: Turn
    key_name: str | None  # whose it is, where the server has keys


class ResponseStore:
    """At most `max_responses`, and of their texts `max_bytes`. One that is larger, with its conversation, is not kept,
    and nothing makes room for it."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()  # by id, the last used last

    def __len__(self) -> int:
        return len(self._responses)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._responses

    def add(
        self, response_id: str, record: dict[str, Any], messages: Messages, before: Turn | None, key_name: str | None
    ) -> None:
        """Keep a response that added `messages` to what was `before`; no other may have its id."""
        assert response_id not in self._responses, response_id
        turn = Turn(msgspec.json.encode(messages), before)
        stored = StoredResponse(msgspec.json.encode(record), turn, key_name)
        if len(stored.record) + sum(len(each.messages) for each in turn.chain()) > self._max_bytes:
            return
        self._responses[response_id] = stored
        self.num_bytes += len(stored.record)
        self._hold(turn)
        while len(self._responses) > self._max_responses or self.num_bytes > self._max_bytes:
            self._let_go(next(iter(self._responses)))

    def get(self, response_id: str, key_name: str | None, *, param: str = "response_id") -> StoredResponse:
        """A use of it. NotFoundError, with `param`, for one that is not kept or is another key's."""
        stored = self._responses.get(response_id)
        if stored is None or stored.key_name != key_name:
            raise NotFoundError(
                f"{param} is {response_id[:200]!r}; no such response is kept (it was never stored, was deleted, or had "
                "to make room: --responses-store-size, --responses-store-bytes)",
                param=param,
                code="response_not_found",
            )
        self._responses.move_to_end(response_id)
        return stored

    def delete(self, response_id: str, key_name: str | None) -> None:
        """Forget it; what follows it stays. NotFoundError as `get`."""
        self.get(response_id, key_name)
        self._let_go(response_id)

    def _let_go(self, response_id: str) -> None:
        stored = self._responses.pop(response_id)
        self.num_bytes -= len(stored.record)
        for turn in stored.turn.chain():
            turn.num_holders -= 1
            if turn.num_holders:
                return
            self.num_bytes -= len(turn.messages)

    def _hold(self, last: Turn) -> None:
        """What was before may have been let go while the response was made: then it is held again."""
        for turn in last.chain():
            turn.num_holders += 1
            if turn.num_holders > 1:
                return
            self.num_bytes += len(turn.messages)
