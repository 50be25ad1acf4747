"""Who goes on in which engine, and who is to blame for a crash: the judgement alone, without any process."""

from __future__ import annotations

from octavo.engine.live_requests import LiveRequests
from octavo.engine.messages import TokenDelta
from octavo.request import FinishReason
from support.fake_runner import make_request


def live(*names: str) -> LiveRequests:
    """These, and the engine has them."""
    requests = LiveRequests()
    for name in names:
        requests.add(make_request(name, [1, 2], max_tokens=100))
    assert given(requests) == list(names)
    return requests


def given(requests: LiveRequests, *, has_room: bool = True) -> list[str]:
    return [request.request_id for request in requests.take_due(has_room)]


def say(requests: LiveRequests, *names: str, num_tokens: int = 2) -> None:
    requests.take([TokenDelta(name, [7] * num_tokens) for name in names])


def crash(requests: LiveRequests, *, somebody_waited: bool = False) -> tuple[str | None, bool]:
    """The culprit, and whether the crash counts as explained."""
    found = requests.crash(somebody_waited)
    return found.culprit and found.culprit.request_id, found.is_explained


def test_they_go_on_behind_what_they_have_said():
    requests = live("a", "b", "c", "d")
    requests.take([TokenDelta("a", [5]), TokenDelta("b", [6, 7]), TokenDelta("gone", [1])])
    requests.take([TokenDelta("a", [8]), TokenDelta("c", [9], finish_reason=FinishReason.STOP)])
    requests.remove(["d", "gone"])
    requests.add(make_request("e", [1], max_tokens=4))
    requests.crash(False)
    sources = requests.take_due(True)
    assert [(each.request_id, each.output_token_ids) for each in sources] == [("a", [5, 8]), ("b", [6, 7]), ("e", [])]
    assert [each.prompt_token_ids for each in sources] == [[1, 2], [1, 2], [1]]
    assert given(requests) == [] and len(requests) == 3


def test_after_one_crash_all_go_on_together():
    requests = live("a", "b", "c")
    say(requests, "a", "b", "c")
    assert crash(requests) == (None, False)
    assert given(requests, has_room=False) == ["a", "b", "c"]


def test_those_twice_under_suspicion_are_looked_at_one_by_one():
    requests = live("a", "b", "c", "d")
    say(requests, "a", "b", "c", "d")
    crash(requests)
    assert given(requests) == ["a", "b", "c", "d"]
    say(requests, "b", "d")
    assert crash(requests) == (None, False)  # a or c
    assert given(requests) == ["b", "d"]
    say(requests, "b")
    assert given(requests) == []
    say(requests, "d", num_tokens=1)
    assert given(requests) == []  # the first token may be that of a prompt
    say(requests, "d", num_tokens=1)
    assert given(requests, has_room=False) == []
    assert given(requests) == ["a"]
    requests.add(make_request("e", [1]))
    assert given(requests) == []
    say(requests, "a")
    assert given(requests) == ["c"]
    assert crash(requests) == (None, True)
    assert given(requests) == ["a", "b", "d", "e"]
    say(requests, "a", "b", "d", "e")
    assert given(requests) == ["c"]
    assert crash(requests) == ("c", True)
    assert given(requests) == ["a", "b", "d", "e"]  # nobody is under suspicion any more
    requests.add(make_request("f", [1]))
    assert given(requests) == ["f"]


def test_the_only_new_one_is_held_back_at_once():
    requests = live("a", "b")
    say(requests, "a")
    assert crash(requests) == (None, True)
    assert given(requests) == ["a"]
    say(requests, "a")
    assert given(requests) == ["b"]
    say(requests, "b")  # it was not to blame
    assert crash(requests) == (None, False)
    assert given(requests) == ["a", "b"]


def test_an_end_is_getting_on():
    requests = live("a", "b")
    say(requests, "a")
    crash(requests)
    assert given(requests) == ["a"]
    requests.take([TokenDelta("a", [], finish_reason=FinishReason.LENGTH)])
    assert given(requests) == ["b"]
    assert requests.crash(False).engine_worked
    assert len(requests) == 0


def test_who_is_aborted_holds_nobody_up():
    requests = live("a", "b", "c")
    crash(requests)
    given(requests)
    crash(requests)
    assert given(requests) == ["a"]
    requests.remove(["a"])
    assert given(requests) == ["b"]
    requests.remove(["b", "c"])
    requests.add(make_request("d", [1]))
    assert given(requests) == ["d"]


def test_who_may_only_have_waited_is_not_blamed():
    requests = live("a", "b")
    for _ in range(5):
        say(requests, "a")
        assert crash(requests, somebody_waited=True) == (None, False)
        if given(requests) == ["a"]:
            say(requests, "a")
            assert given(requests) == ["b"]


def test_whether_the_engine_worked():
    requests = live("a")
    say(requests, "a", num_tokens=1)
    assert not requests.crash(False).engine_worked
    given(requests)
    say(requests, "a")
    assert requests.crash(False).engine_worked
    given(requests)
    requests.take([TokenDelta("a", finish_reason=FinishReason.ERROR, error="no")])
    assert not requests.crash(False).engine_worked
    assert not requests.engine_has_any


def test_what_was_said_before_it_came_stays_said():
    requests = LiveRequests()
    requests.add(make_request("a", [1, 2], max_tokens=100, output_token_ids=[5, 6]))
    (first,) = requests.take_due(has_room=True)
    assert first.output_token_ids == [5, 6] and requests.num_engine_tokens == 4
    requests.take([TokenDelta("a", [7])])
    assert requests.num_engine_tokens == 5
    crash(requests)
    (again,) = requests.take_due(has_room=True)
    assert again.output_token_ids == [5, 6, 7] and again.prompt_token_ids == [1, 2]
