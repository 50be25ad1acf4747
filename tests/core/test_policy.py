from __future__ import annotations

import pytest

from octavo.core.policy import FCFS, Priority, make_policy
from octavo.errors import ConfigError
from octavo.request import Request
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
    with pytest.raises(ConfigError, match="scheduling_policy is 'random'; allowed: fcfs, priority"):
        make_policy("random")
