from __future__ import annotations

from bisect import bisect_right
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.policy import FCFS, MAX_IDLE_ACCOUNTS, Fair, Priority, make_policy
from octavo.errors import ConfigError
from octavo.request import BeamSearchParams, Request
from support.fake_runner import make_request


def requests(*rows: tuple[int, float]) -> list[Request]:
    return [
        Request.from_source(make_request(str(i), [1], priority=priority, arrival_time=arrival_time))
        for i, (priority, arrival_time) in enumerate(rows)
    ]


def test_fcfs_serves_by_arrival_and_preempts_the_last():
    a, b, c = requests((0, 2.0), (-5, 3.0), (9, 1.0))
    policy = make_policy("fcfs")
    assert sorted([a, b, c], key=policy.order) == [c, a, b]
    assert policy.victim([a, b, c]) is b


def test_priority_serves_lower_values_first_then_by_arrival():
    a, b, c, d = requests((1, 1.0), (0, 3.0), (0, 2.0), (-1, 4.0))
    policy = make_policy("priority")
    assert sorted([a, b, c, d], key=policy.order) == [d, c, b, a]
    assert policy.victim([a, b, c, d]) is a
    assert policy.victim([b, c, d]) is b


@pytest.mark.parametrize("policy", [FCFS(), Priority()])
def test_among_equals_the_last_gives_way(policy):
    equals = requests((0, 1.0), (0, 1.0), (0, 1.0))
    assert policy.victim(equals) is equals[-1]


def test_an_unknown_policy_is_named():
    with pytest.raises(ConfigError, match="scheduling_policy is 'random'; allowed: fcfs, priority, fair"):
        make_policy("random")


# ── Fair shares ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Queue:
    """What the scheduler does to its policy: requests wait in order, are started from the front, and end."""

    def __init__(self) -> None:
        self.policy = make_policy("fair")
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._numbers = count()

    def arrive(self, user: str | None, num_prompt_tokens: int = 1, max_tokens: int = 1, **fields: object) -> Request:
        number = next(self._numbers)
        source = make_request(
            f"{user}{number}",
            [1] * num_prompt_tokens,
            max_tokens=max_tokens,
            user=user,
            arrival_time=float(number),
            **fields,
        )
        request = Request.from_source(source)
        self.policy.arrive(request)
        order = self.policy.order
        self.waiting.insert(bisect_right(self.waiting, order(request), key=order), request)
        return request

    def start(self, place: int = 0) -> Request:
        request = self.waiting.pop(place)
        request.first_scheduled_time = 1.0
        self.policy.start(request)
        self.running.append(request)
        return request

    def finish(self, request: Request, num_output_tokens: int | None = None) -> None:
        """After so many tokens, or all that it may take."""
        (self.running if request in self.running else self.waiting).remove(request)
        num_output_tokens = request.params.max_tokens if num_output_tokens is None else num_output_tokens
        request.token_ids.extend([1] * (num_output_tokens or 0))
        self.policy.finish(request)

    def serve(self, num_requests: int) -> list[str | None]:
        """The users of the next requests, which are started and ended one after the other."""
        users = []
        for _ in range(num_requests):
            request = self.start()
            users.append(request.source.user)
            self.finish(request)
        return users


def test_a_thousand_requests_of_one_user_do_not_delay_the_first_of_another():
    queue = Queue()
    for _ in range(1000):
        queue.arrive("a")
    assert queue.serve(10) == ["a"] * 10
    queue.arrive("b")
    queue.arrive("b")
    # The virtual time is that of a's tenth request; so b's first stands before a's next.
    assert queue.serve(5) == ["b", "a", "b", "a", "a"]


def test_users_get_equal_shares_of_tokens_not_of_requests():
    queue = Queue()
    for _ in range(4):
        queue.arrive("a", num_prompt_tokens=20, max_tokens=10)
    for _ in range(12):
        queue.arrive("b", num_prompt_tokens=4, max_tokens=6)
    assert queue.serve(16) == [*"abbb"] * 4


def test_three_users_take_turns_and_those_without_a_name_are_one():
    queue = Queue()
    for user in ("a", "a", "a", None, None, "b", None, "b"):
        queue.arrive(user)
    assert queue.serve(8) == ["a", None, "b", "a", None, "b", "a", None]


def test_who_was_idle_has_lost_nothing_and_saved_nothing():
    queue = Queue()
    queue.arrive("b")
    for _ in range(20):
        queue.arrive("a")
    assert queue.serve(11) == [*"baaaaaaaaaa"]
    for _ in range(5):
        queue.arrive("b")
    assert queue.serve(12) == [*"bababababaaa"]


def test_who_comes_with_one_large_request_after_the_other_pays_for_each():
    queue = Queue()
    for _ in range(20):
        queue.arrive("b", max_tokens=9)  # 10 tokens each
    served = []
    for _ in range(3):
        queue.arrive("a", max_tokens=49)  # 50 tokens, and the next comes when this one has ended
        while queue.waiting:
            served += queue.serve(1)
            if served[-1] == "a":
                break
    # a's second waits until b has had as much as a's first, though a had nothing in the queue meanwhile.
    assert "".join(map(str, served)) == "babbbbbabbbbba"


@pytest.mark.parametrize(("num_output_tokens", "place"), [(99, 11), (49, 6), (0, 1)])
def test_what_a_request_did_not_use_is_given_back(num_output_tokens, place):
    queue = Queue()
    first = queue.arrive("a", max_tokens=99)
    for _ in range(20):
        queue.arrive("b", max_tokens=9)
    assert queue.start() is first
    queue.finish(first, num_output_tokens)
    queue.arrive("a")
    assert queue.serve(20).index("a") == place


def test_a_request_that_never_started_costs_nothing():
    queue = Queue()
    for _ in range(20):
        queue.arrive("b", max_tokens=9)
    assert queue.serve(1) == ["b"]
    queue.finish(queue.arrive("a", num_prompt_tokens=50, max_tokens=50), 0)
    queue.arrive("a")
    queue.arrive("a")
    assert queue.serve(3) == ["a", "a", "b"]


def test_what_delays_nobody_any_more_is_not_given_back():
    queue = Queue()
    for _ in range(40):
        queue.arrive("b", max_tokens=9)
    old = queue.arrive("a", max_tokens=99)
    while queue.start() is not old:
        pass
    queue.serve(20)  # b's virtual time passes a's finish tag
    queue.arrive("a", max_tokens=99)
    assert queue.serve(1) == ["a"]
    queue.finish(old, 0)
    queue.arrive("a")
    assert queue.serve(11) == [*"bbbbbbbbbba"]


def test_the_samples_of_a_prompt_share_its_cost():
    queue = Queue()
    for index in range(3):
        queue.arrive("a", num_prompt_tokens=30, max_tokens=10, sample_index=index)
    for _ in range(8):
        queue.arrive("b", max_tokens=9)
    # a's samples start at 0, 40 and 50.
    assert queue.serve(11) == [*"abbbbababbb"]


def test_who_is_started_before_its_turn_delays_no_newcomer():
    queue = Queue()
    for index in range(8):
        queue.arrive("a", num_prompt_tokens=10, max_tokens=10, sample_index=index)
    for _ in range(20):
        queue.arrive("b", max_tokens=9)
    while any(request.source.user == "a" for request in queue.waiting):  # all samples with the first
        queue.start([request.source.user for request in queue.waiting].index("a"))
    queue.arrive("c")
    assert queue.serve(3) == ["b", "c", "b"]
    queue.arrive("a")
    assert queue.serve(19).index("a") == 8  # the samples have cost 90 tokens: from 20 to 90, b goes first
    assert not queue.waiting


def test_the_order_of_a_request_is_fixed_for_its_life():
    queue = Queue()
    first, second = queue.arrive("a", max_tokens=99), queue.arrive("a", max_tokens=99)
    order = queue.policy.order(second)
    queue.start()
    queue.finish(first, 3)
    queue.arrive("b")
    queue.start()
    assert queue.policy.order(second) == order
    assert queue.policy.victim([second, *queue.running]) is second


def test_idle_users_are_forgotten():
    queue = Queue()
    for number in range(3 * MAX_IDLE_ACCOUNTS):
        queue.arrive("busy")  # never idle, so the books are never closed
        queue.arrive(f"u{number}", max_tokens=1 + number % 7)
        for _ in range(2):
            queue.serve(1)
    policy = queue.policy
    assert isinstance(policy, Fair)
    assert len(policy._accounts) <= 8  # by then the virtual time has passed all others
    while queue.waiting:
        queue.serve(1)
    assert not policy._accounts and not policy._idle and not policy._start_tags


def test_who_is_back_is_not_forgotten():
    queue = Queue()
    for _ in range(9):
        queue.arrive("b")
    queue.arrive("a")
    assert queue.serve(2) == ["b", "a"]
    back = queue.arrive("a")
    queue.arrive("c")
    assert queue.serve(2) == ["c", "b"]
    assert queue.start() is back
    assert queue.serve(7) == [*"bbbbbbb"]  # the virtual time passes all that a has had, and c
    queue.arrive("d")
    queue.arrive("b")
    assert queue.serve(1) == ["d"]
    queue.finish(back)
    assert queue.serve(1) == ["b"]


def test_ever_new_users_do_not_pass_over_the_second_request_of_an_old_one():
    queue = Queue()
    queue.arrive("old")
    second = queue.arrive("old")
    queue.arrive("new")
    queue.start()
    for number in range(2 * MAX_IDLE_ACCOUNTS):
        queue.arrive(f"new {number}")
        if second not in queue.waiting:
            break
        queue.serve(1)
    assert second not in queue.waiting
    assert isinstance(queue.policy, Fair) and len(queue.policy._accounts) <= MAX_IDLE_ACCOUNTS + 2


ARRIVALS = st.tuples(st.sampled_from("aabbc"), st.integers(1, 30), st.integers(1, 30))
EVENTS = st.lists(st.one_of(ARRIVALS, ARRIVALS, st.just("start"), st.just("start"), st.integers(0, 5)), max_size=120)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(EVENTS)
def test_while_two_users_wait_what_is_started_for_them_differs_by_a_request_of_each(events):
    """The theorem of start-time fair queueing, for any arrivals, other users, and requests that run side by side."""
    queue = Queue()
    started = {"a": 0, "b": 0, "c": 0}
    longest = dict(started)
    seen: list[int] = []  # the difference at every moment since both have requests waiting
    for event in events:
        both_wait = {"a", "b"} <= {request.source.user for request in queue.waiting}
        seen = (seen or [started["a"] - started["b"]]) if both_wait else []
        match event:
            case (user, num_prompt_tokens, max_tokens):
                queue.arrive(user, num_prompt_tokens, max_tokens)
                longest[user] = max(longest[user], num_prompt_tokens + max_tokens)
            case "start" if queue.waiting:
                request = queue.start()
                started[request.source.user] += request.num_prompt_tokens + request.params.max_tokens
                seen.append(started["a"] - started["b"])
            case int(index) if index < len(queue.running):
                queue.finish(queue.running[index])
        assert not seen or max(seen) - min(seen) <= longest["a"] + longest["b"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(ARRIVALS, st.integers(0, 30)), min_size=1, max_size=40))
def test_whoever_waits_is_started_though_others_keep_coming_and_use_little(events):
    queue = Queue()
    queue.arrive("a", 30, 30)
    second = queue.arrive("a", 30, 30)
    for number in range(2000):
        (user, num_prompt_tokens, max_tokens), num_output_tokens = events[number % len(events)]
        queue.arrive(user, num_prompt_tokens, max_tokens)
        request = queue.start()
        queue.finish(request, min(num_output_tokens, request.params.max_tokens))
        if second not in queue.waiting:
            return
    raise AssertionError("2000 requests went before it")


@pytest.mark.parametrize("num_steps", [0, 3, 10])
def test_a_search_is_charged_what_its_beams_computed_however_it_ended(num_steps):
    """Four beams of at most ten tokens, aborted after some steps: no hypothesis need have ended by then."""
    queue = Queue()
    search = queue.arrive("a", 5, 10, beams=BeamSearchParams(beam_width=4, max_tokens=10))
    other = queue.arrive("b", 1, 100)
    queue.start()
    search.hypotheses, search.num_search_steps = [], num_steps
    queue.finish(search, num_output_tokens=0)
    following = queue.arrive("a")
    assert queue.policy.order(following)[0] == 5 + 4 * num_steps
    assert queue.policy.order(other)[0] == 0
