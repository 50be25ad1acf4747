"""What is kept of responses, and that it is bounded, whatever is deleted, evicted and followed."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from octavo.errors import NotFoundError
from octavo.server.response_store import Messages, ResponseStore, Turn


def say(text: str) -> Messages:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def size(*kept: Any) -> int:
    return sum(len(msgspec.json.encode(each)) for each in kept)


def turn_of(store: ResponseStore, response_id: str, key_name: str | None = None) -> Turn:
    return store.get(response_id, key_name).turn


def test_a_conversation_is_that_of_all_turns():
    store = ResponseStore(10, 10_000)
    store.add("1", {"id": "1"}, say("a"), None, None)
    store.add("2", {"id": "2"}, say("b"), turn_of(store, "1"), None)
    store.add("3", {"id": "3"}, say("c"), turn_of(store, "1"), None)
    assert turn_of(store, "2").conversation() == [*say("a"), *say("b")]
    assert turn_of(store, "3").conversation() == [*say("a"), *say("c")]
    assert store.get("3", None).record == b'{"id":"3"}'
    assert store.num_bytes == size({"id": "1"}, {"id": "2"}, {"id": "3"}, say("a"), say("b"), say("c"))


def test_what_follows_a_deleted_response_keeps_its_turn():
    store = ResponseStore(10, 10_000)
    store.add("1", {"id": "1"}, say("a"), None, None)
    store.add("2", {"id": "2"}, say("b"), turn_of(store, "1"), None)
    store.delete("1", None)
    assert "1" not in store and turn_of(store, "2").conversation() == [*say("a"), *say("b")]
    assert store.num_bytes == size({"id": "2"}, say("a"), say("b"))
    store.delete("2", None)
    assert (len(store), store.num_bytes) == (0, 0)


def test_what_was_let_go_meanwhile_is_held_again():
    store = ResponseStore(10, 10_000)
    store.add("1", {"id": "1"}, say("a"), None, None)
    before = turn_of(store, "1")
    store.delete("1", None)
    assert store.num_bytes == 0
    store.add("2", {"id": "2"}, say("b"), before, None)
    assert store.num_bytes == size({"id": "2"}, say("a"), say("b"))


def test_the_least_recently_used_goes_first():
    store = ResponseStore(2, 10_000)
    store.add("1", {}, say("a"), None, None)
    store.add("2", {}, say("b"), None, None)
    store.get("1", None)
    store.add("3", {}, say("c"), None, None)
    assert [each in store for each in "123"] == [True, False, True]


def test_text_is_bounded_too():
    store = ResponseStore(100, 1_000)
    for i in range(50):
        store.add(str(i), {"id": i}, say("x" * 100), None, None)
        assert 0 < store.num_bytes <= 1_000
    assert str(49) in store and "0" not in store


def test_one_that_cannot_be_kept_drives_nobody_out():
    store = ResponseStore(100, 1_000)
    store.add("1", {}, say("x" * 300), None, None)
    before = store.num_bytes
    store.add("large", {}, say("x" * 2_000), None, None)
    store.add("large with its conversation", {}, say("x" * 600), turn_of(store, "1"), None)
    assert "1" in store and len(store) == 1 and store.num_bytes == before


def test_another_key_finds_nothing():
    store = ResponseStore(10, 10_000)
    store.add("1", {}, say("a"), None, "key-a")
    for key_name in ("key-b", None):
        with pytest.raises(NotFoundError, match=r"^previous_response_id is '1'; no such response is kept") as caught:
            store.get("1", key_name, param="previous_response_id")
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "response_not_found")
        with pytest.raises(NotFoundError):
            store.delete("1", key_name)
    assert store.get("1", "key-a")


@pytest.mark.parametrize("seed", range(20))
def test_the_books_balance_after_anything(seed):
    rng = random.Random(seed)
    store = ResponseStore(rng.randint(1, 12), rng.randint(200, 3_000))
    said: dict[str, Messages] = {}
    turns: list[tuple[Turn, Messages]] = []  # of calls that run, with what they go on from
    for number in range(200):
        kept = [response_id for response_id in said if response_id in store]
        match rng.randrange(4):
            case 0 if kept:
                response_id = rng.choice(kept)
                turns.append((turn_of(store, response_id), said[response_id]))
            case 1 if kept:
                store.delete(rng.choice(kept), None)
            case 2 if turns:
                before, conversation = turns.pop(rng.randrange(len(turns)))
                new = say("x" * rng.randrange(200))
                store.add(str(number), {"id": number}, new, before, None)
                said[str(number)] = [*conversation, *new]
            case _:
                new = say("x" * rng.randrange(200))
                store.add(str(number), {"id": number}, new, None, None)
                said[str(number)] = new
        held: dict[int, Turn] = {}
        records = 0
        for response_id, conversation in said.items():
            if response_id in store:
                stored = store._responses[response_id]
                records += len(stored.record)
                assert stored.turn.conversation() == conversation
                held |= {id(turn): turn for turn in stored.turn.chain()}
        assert store.num_bytes == records + sum(len(turn.messages) for turn in held.values())
        assert store.num_bytes <= store._max_bytes and len(store) <= store._max_responses
    for response_id in said:
        if response_id in store:
            store.delete(response_id, None)
    assert store.num_bytes == 0
