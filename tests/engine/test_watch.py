"""The judgement of an engine, beat by beat: what is a fault, and what only looks like one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from octavo.core.beams import BeamSearchParams
from octavo.engine.live_requests import LiveRequests
from octavo.engine.messages import SchedulerStats, TokenDelta
from octavo.engine.watch import BEAT_SECONDS, MAX_REPEATS, MAX_SILENT_BEATS, Watch
from octavo.request import EngineRequest
from support.fake_runner import make_beams, make_engine, make_request

TIMEOUT = 6 * BEAT_SECONDS


class Watched:
    """A watch over an engine that is only told of: its steps, its tokens, the beats."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.watch = Watch(timeout)
        self.requests = LiveRequests()
        self.stats = SchedulerStats()

    def give(self, *sources: EngineRequest) -> None:
        for source in sources:
            self.requests.add(source)
        for request in self.requests.take_due(has_room=True):
            self.watch.give(len(request.prompt_token_ids) + len(request.output_token_ids))

    def step(self, num_tokens: int, deltas: Sequence[TokenDelta] = ()) -> None:
        self.stats.num_steps += 1
        self.stats.step_tokens = num_tokens
        self.requests.take(deltas)
        self.watch.take(deltas, self.stats)

    def beat(self, *, was_heard: bool = True, has_unread: bool = False) -> str | None:
        return self.watch.beat(self.requests, was_heard=was_heard, has_unread=has_unread)

    def beats(self, number: int, **signs: bool) -> list[str | None]:
        return [self.beat(**signs) for _ in range(number)]


def request(name: str = "a", num_tokens: int = 10) -> EngineRequest:
    return make_request(name, [1] * num_tokens, max_tokens=100)


@pytest.mark.parametrize("has_work", [False, True])
def test_silence(has_work):
    watched = Watched()
    if has_work:
        watched.give(request())
    assert watched.beats(MAX_SILENT_BEATS - 1, was_heard=False) == [None] * (MAX_SILENT_BEATS - 1)
    watched.step(1)
    assert watched.beat() is None
    *before, verdict = watched.beats(MAX_SILENT_BEATS, was_heard=False)
    assert before == [None] * (MAX_SILENT_BEATS - 1)
    assert verdict == "the engine has given no sign of life for 20 s"
    watched.watch.begin()
    assert watched.beat(was_heard=False) is None


def test_an_idle_engine_that_answers_has_all_the_time():
    assert not any(Watched().beats(1000))


def test_requests_and_no_step():
    watched = Watched()
    watched.beats(10)
    watched.give(request())
    assert not any(watched.beats(6))  # the first of these is the one in which it came
    watched.give(request("b"))
    assert not any(watched.beats(6))
    assert watched.beat() == "the engine has requests, and has computed nothing for 30 s"
    watched.requests.remove(["a", "b"])
    assert watched.beat() is None


def test_steps_that_compute_nothing():
    watched = Watched()
    watched.give(request())
    verdicts = []
    for _ in range(7):
        for _ in range(100):
            watched.step(0)
        verdicts.append(watched.beat())
    assert verdicts[:-1] == [None] * 6 and "computed nothing" in (verdicts[-1] or "")


def test_a_step_of_half_an_hour_is_seen_when_it_ends():
    watched = Watched(timeout=3600)
    watched.give(request(num_tokens=100_000))
    assert not any(watched.beats(360))
    watched.step(2048)
    assert not any(watched.beats(360))


def test_a_long_prompt_in_many_steps():
    watched = Watched()
    watched.give(request(num_tokens=10_000))
    for _ in range(100):
        watched.step(100)
        assert not any(watched.beats(6))


def test_the_same_tokens_again_and_again():
    watched = Watched()
    watched.give(request(num_tokens=50), request("b", num_tokens=30))
    watched.step(80, [TokenDelta("a", [5])])
    assert watched.beat() is None
    for _ in range(MAX_REPEATS * 2):  # the beat with news counts 80 tokens that came, and 80 that are there
        watched.step(80)
        assert watched.beat() is None
    watched.step(80)
    assert watched.beat() == f"the engine has computed {80 * (MAX_REPEATS * 2 + 1)} tokens, and given none"


def test_progress_of_a_prompt_is_no_news():
    watched = Watched()
    watched.give(request(num_tokens=50))
    for _ in range(MAX_REPEATS):
        watched.step(50, [TokenDelta("a", num_computed_tokens=50)])
        assert watched.beat() is None
    watched.step(50, [TokenDelta("a", num_computed_tokens=50)])
    assert "and given none" in (watched.beat() or "")


def test_news_of_anybody_will_do():
    watched = Watched()
    watched.give(request(num_tokens=50), request("b", num_tokens=30))
    for _ in range(100):
        watched.step(40)
        assert watched.beat() is None
        watched.step(40, [TokenDelta("b", [5])])
        assert watched.beat() is None


def test_who_leaves_has_been_computed_too():
    """Long prompts that come and go, none of which gets to its first token, beside a short one that waits."""
    watched = Watched()
    watched.give(request(num_tokens=5))
    for number in range(50):
        watched.give(request(f"b{number}", num_tokens=1000))
        for _ in range(4):
            watched.step(250)
            assert watched.beat() is None
        watched.requests.remove([f"b{number}"])


def test_a_beam_search_has_no_news_but_its_end():
    watched = Watched()
    watched.give(make_beams("a", [1, 2, 3], BeamSearchParams(beam_width=4, max_tokens=900), max_tokens=900))
    for _ in range(900):
        watched.step(4)
        assert watched.beat() is None


def test_a_client_that_does_not_read_blames_nobody():
    watched = Watched()
    watched.give(request())
    assert not any(watched.beats(50, has_unread=True))
    for _ in range(5):
        watched.step(0)  # it reads again, and there are more replies
        assert watched.beat(has_unread=True) is None
    watched.step(0)
    assert "computed nothing" in (watched.beat(has_unread=True) or "")


def test_without_a_timeout_nothing_is_wrong():
    watched = Watched(timeout=0.0)
    watched.give(request())
    assert not any(watched.beats(100, was_heard=False))


def test_a_short_timeout_has_short_beats():
    assert Watch(0.4).beat_seconds == pytest.approx(0.1)
    assert Watch(120.0).beat_seconds == Watch(0.0).beat_seconds == BEAT_SECONDS


@pytest.mark.parametrize("seed", range(40))
def test_short_memory_is_no_fault(seed):
    """Requests that give way to each other, with a beat after every step, which is the strictest watch there can be."""
    rng = random.Random(seed)
    engine = make_engine(
        num_blocks=rng.randint(8, 16),
        policy=rng.choice(["fcfs", "priority", "fair"]),
        max_num_batched_tokens=rng.choice([3, 8, 20]),
        max_model_len=30,
        num_slots=rng.choice([0, 4, 20]),
        preemption_mode=rng.choice(["swap", "auto", "recompute"]),
    )
    watched = Watched(timeout=0.4)
    unsent = [
        make_request(
            f"{index}",
            [rng.randrange(3) for _ in range(rng.randint(1, 12))],
            max_tokens=rng.randint(1, 18),
            ignore_eos=True,
            priority=rng.randrange(3),
            user=rng.choice("ab"),
        )
        for index in range(12)
    ]
    while unsent or engine.has_unfinished:
        if unsent and rng.random() < 0.5:
            engine.add_request(unsent[-1])
            watched.give(unsent.pop())
        deltas = engine.step()
        watched.requests.take(deltas)
        watched.watch.take(deltas, engine.stats())
        assert watched.beat() is None
