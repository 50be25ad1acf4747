"""Requests that share: samples of one prompt, beams, equal prompts that come together. What a step contains, and that
the answers come out right; thoroughly so in tests/engine/test_engine_random.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from octavo.core.plan import CopyBlock, StepPlan
from octavo.core.prefix_index import common_prefix
from octavo.engine.engine import Engine
from octavo.request import BeamSearchParams, FinishReason, RequestStatus
from support.fake_runner import (
    Answer,
    FakeRunner,
    expected_answer,
    expected_beams,
    make_beams,
    make_engine,
    make_request,
)

PROMPT = list(range(1, 11))


def add_samples(engine: Engine, n: int, prompt: list[int] = PROMPT, **fields: Any) -> dict[str, Answer]:
    """Samples a0 … of one prompt. What they should get."""
    max_request_tokens = engine.scheduler.max_request_tokens
    expected = {}
    for index in range(n):
        fork_of = {"fork_of": "a0"} if index else {}
        source = make_request(f"a{index}", prompt, sample_index=index, ignore_eos=True, **fork_of, **fields)
        engine.add_request(source)
        expected[source.request_id] = expected_answer(source, max_request_tokens)
    return expected


def add_beams(engine: Engine, beam_width: int, max_tokens: int, prompt: list[int] = PROMPT, **fields: Any) -> Answer:
    source = make_beams("b", prompt, BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens), **fields)
    engine.add_request(source)
    pool, block_size = engine.scheduler.kv.pool, engine.scheduler.kv.block_size
    return expected_beams(source, pool.num_blocks, block_size, engine.scheduler.max_model_len)


class Steps:
    """Steps of an engine, one at a time: the plan of the last one, and all answers so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, Answer] = {}

    def take(self, deltas: list[Any]) -> None:
        for delta in deltas:
            self.answers.setdefault(delta.request_id, Answer()).take(delta)
        self.engine.check_integrity()

    def next(self) -> list[tuple[str, int, int]]:
        """(request_id, tokens, forks that join) of each row."""
        self.take(self.engine.step())
        return [(row.request.request_id, row.num_tokens, len(row.forks)) for row in self.plan.scheduled]

    def to_end(self) -> int:
        """How many tokens are computed until then."""
        num_tokens = 0
        while self.engine.has_unfinished:
            num_tokens += sum(row[1] for row in self.next())
        assert self.engine.scheduler.kv.pool.num_used == 0
        return num_tokens

    @property
    def plan(self) -> StepPlan:
        assert isinstance(self.engine.runner, FakeRunner)
        return self.engine.runner.plans[-1]


def runner_of(engine: Engine) -> FakeRunner:
    assert isinstance(engine.runner, FakeRunner)
    return engine.runner


# ── Samples of one prompt ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_prompt_is_computed_once_and_its_samples_join_in_that_step():
    engine = make_engine(enable_prefix_caching=False)
    expected, steps = add_samples(engine, 4, max_tokens=3), Steps(engine)
    assert steps.next() == [("a0", 10, 3)]
    assert all(len(answer.token_ids) == 1 for answer in steps.answers.values()) and len(steps.answers) == 4
    assert engine.scheduler.kv.pool.num_used == 3
    assert steps.next() == [(f"a{i}", 1, 0) for i in range(4)]
    assert steps.plan.transfers == [CopyBlock(2, 3, 2), CopyBlock(2, 4, 2), CopyBlock(2, 5, 2)]  # the last: in place
    assert engine.scheduler.kv.pool.num_used == 6
    assert steps.next() == [(f"a{i}", 1, 0) for i in range(4)] and steps.plan.transfers == []
    assert steps.answers == expected and not engine.has_unfinished


@pytest.mark.parametrize("threshold", [0, 3])
def test_who_waits_for_its_prompt_does_not_slow_it_down(threshold):
    engine = make_engine(max_num_batched_tokens=8, long_prefill_token_threshold=threshold)
    add_samples(engine, 3, prompt=[*range(1, 11), *range(1, 11)], max_tokens=1)
    steps = Steps(engine)
    assert [steps.next() for _ in range(3)] == [[("a0", 8, 0)], [("a0", 8, 0)], [("a0", 4, 2)]]


def test_samples_for_which_there_is_no_seat_find_the_blocks_of_the_first():
    engine = make_engine(max_num_seqs=3)
    expected, steps = add_samples(engine, 5, max_tokens=4), Steps(engine)
    assert steps.next() == [("a0", 10, 2)]
    assert [r.request_id for r in engine.scheduler.waiting] == ["a3", "a4"]
    assert [steps.next() for _ in range(3)] == [[(f"a{i}", 1, 0) for i in range(3)]] * 3
    assert steps.next() == [("a3", 1, 0), ("a4", 1, 0)]  # nine tokens found, the part-filled block's one too
    steps.to_end()
    assert steps.answers == expected


def test_samples_report_what_the_first_found_in_the_cache():
    engine = make_engine()
    engine.add_request(make_request("before", PROMPT[:6], max_tokens=1))
    engine.step()
    add_samples(engine, 3, max_tokens=2)
    assert {delta.request_id: delta.num_cached_tokens for delta in engine.step()} == {"a0": 6, "a1": 6, "a2": 6}


@pytest.mark.parametrize("when", ["waiting", "in its prompt", "in the step"])
def test_the_first_may_be_aborted_at_any_moment(when):
    engine = make_engine(max_num_batched_tokens=8, enable_prefix_caching=when != "waiting")
    expected, steps = add_samples(engine, 3, max_tokens=4), Steps(engine)
    if when != "waiting":
        assert steps.next() == [("a0", 8, 0)]
    if when == "in the step":
        plan = engine.scheduler.schedule()
        assert len(plan.scheduled[0].forks) == 2
        result = engine.runner.execute(plan)
        steps.take(engine.abort(["a0"]))
        assert [u.request.request_id for u in engine.scheduler.update(plan, result)] == ["a1", "a2"]
        assert all(r.num_output_tokens == 1 for r in engine.scheduler.running)
        return
    steps.take(engine.abort(["a0"]))
    assert all(request.fork_from is None for request in engine.scheduler.waiting)
    steps.to_end()
    assert steps.answers.pop("a0").finish_reason is FinishReason.ABORT
    assert steps.answers == {name: expected[name] for name in ("a1", "a2")}


def test_a_sample_may_be_aborted_while_it_waits_for_the_first():
    engine = make_engine(max_num_batched_tokens=8)
    expected, steps = add_samples(engine, 3, max_tokens=4), Steps(engine)
    steps.next()
    steps.take(engine.abort(["a1"]))
    assert steps.next() == [("a0", 2, 1)]
    steps.to_end()
    assert steps.answers["a2"] == expected["a2"] and steps.answers["a1"].finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("failing", ["a0", "a1"])
def test_a_sample_that_fails_in_the_step_in_which_they_join_takes_nobody_with_it(failing):
    engine = make_engine()
    expected, steps = add_samples(engine, 3, max_tokens=4), Steps(engine)
    runner_of(engine).failing = {failing}
    assert steps.next() == [("a0", 10, 2)]
    steps.to_end()
    assert steps.answers.pop(failing) == Answer(finish_reason=FinishReason.ERROR)
    assert steps.answers == {name: answer for name, answer in expected.items() if name != failing}


def test_a_step_that_fails_takes_those_who_join_with_it():
    engine = make_engine()
    add_samples(engine, 3, max_tokens=4)
    runner_of(engine).explodes = True
    assert [delta.finish_reason for delta in engine.step()] == [FinishReason.ERROR] * 3
    assert engine.scheduler.kv.pool.num_used == 0
    engine.check_integrity()


def test_what_a_step_that_fails_was_to_copy_is_not_found_later():
    engine = make_engine()
    add_samples(engine, 2, max_tokens=4)
    engine.step()
    runner_of(engine).explodes = True
    assert [delta.finish_reason for delta in engine.step()] == [FinishReason.ERROR] * 2
    assert runner_of(engine).plans[-1].transfers == [CopyBlock(2, 3, 2)]
    again = make_request("again", [*PROMPT, 1], max_tokens=4)
    engine.add_request(again)
    steps = Steps(engine)
    assert steps.next() == [("again", 3, 0)]  # the two full blocks were known before
    steps.to_end()
    assert steps.answers["again"] == expected_answer(again, 256)


def test_a_prompt_that_is_only_scored_leaves_its_samples_to_themselves():
    engine = make_engine()
    expected, steps = add_samples(engine, 3, max_tokens=0), Steps(engine)
    steps.to_end()
    assert steps.answers == expected


# ── Beams ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_beam_search_takes_a_seat_for_each_beam_and_one_token_a_beam_of_the_budget():
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=10)
    expected, steps = add_beams(engine, 4, 5), Steps(engine)
    engine.add_request(make_request("other", [7], max_tokens=1))
    assert [[(name, tokens) for name, tokens, _ in steps.next()] for _ in range(3)] == [
        [("b", 10)],
        *([("b", 1)] * 4 for _ in range(2)),
    ]
    steps.to_end()
    assert steps.answers["b"] == expected
    engine = make_engine(max_num_batched_tokens=3)
    expected, steps = add_beams(engine, 4, 5), Steps(engine)
    assert [len(steps.next()) for _ in range(8)] == [1] * 4 + [3, 1, 3, 1]  # a step of the search is two of the engine
    steps.to_end()
    assert steps.answers["b"] == expected


def test_a_beam_search_wider_than_all_seats_is_refused():
    engine = make_engine(max_num_seqs=3)
    with pytest.raises(ValueError, match=r"beam_width is 4; at most 3 \(max_num_seqs\) run at once"):
        add_beams(engine, 4, 5)
    assert not engine.has_unfinished


def test_beams_that_give_way_are_rebuilt_by_forks_and_nothing_that_they_share_is_computed_twice():
    engine = make_engine(enable_prefix_caching=False)
    expected, steps = add_beams(engine, 4, 9), Steps(engine)
    for _ in range(5):
        steps.next()
    scheduler = engine.scheduler
    (request,) = scheduler.running
    rows = [row.token_ids[:] for row in scheduler.rows.all(request)]
    assert {len(row) for row in rows} == {15}
    scheduler._preempt(request)
    assert scheduler.kv.pool.num_used == 0 and request.status is RequestStatus.PREEMPTED
    engine.check_integrity()
    lacking = [15]
    for i in range(1, 4):
        shared = max(common_prefix(rows[i], other) for other in rows[:i])
        lacking.append(15 - min(shared, 14))
    assert sum(lacking) < 4 * 15 / 2  # not much of a test if they shared little
    assert [steps.next() for _ in range(4)] == [[("b", num_tokens, 0)] for num_tokens in lacking]
    assert [len(steps.next()) for _ in range(2)] == [4, 4]
    steps.to_end()
    assert steps.answers["b"] == expected


@pytest.mark.parametrize("num_slots", [0, 20])
def test_beams_may_give_way_between_two_steps_that_share_their_rows(num_slots):
    """Three of four have their next tokens."""
    engine = make_engine(max_num_batched_tokens=3, num_slots=num_slots, preemption_mode="swap")
    expected, steps = add_beams(engine, 4, 5), Steps(engine)
    while len(steps.next()) < 3:
        pass
    (request,) = engine.scheduler.running
    assert [row.num_left for row in engine.scheduler.rows.all(request)] == [0, 0, 0, 1]
    engine.scheduler._preempt(request)
    steps.to_end()
    assert steps.answers["b"] == expected


def test_beams_that_are_swapped_out_come_back_as_they_were():
    engine = make_engine(num_slots=20, preemption_mode="swap")
    expected, steps = add_beams(engine, 4, 9), Steps(engine)
    for _ in range(3):
        steps.next()  # 12 computed: the next token begins a block
    for _ in range(2):
        steps.next()  # 14 computed, in a block that beams share
    (request,) = engine.scheduler.running
    num_used = engine.scheduler.kv.pool.num_used
    engine.scheduler._preempt(request)
    assert request.is_swapped_out and engine.scheduler.kv.swap.num_free == 20 - num_used
    assert steps.next() == [("b", 1, 0)] * 4
    steps.to_end()
    assert steps.answers["b"] == expected and engine.scheduler.kv.swap.num_free == 20


def test_beams_that_give_way_while_they_are_rebuilt_are_not_swapped_out():
    engine = make_engine(num_slots=20, preemption_mode="swap")
    expected, steps = add_beams(engine, 4, 9), Steps(engine)
    for _ in range(5):
        steps.next()
    (request,) = engine.scheduler.running
    for row in engine.scheduler.rows.all(request)[1:]:
        engine.scheduler.kv.free(row)
        row.num_computed_tokens = 0
    engine.scheduler._preempt(request)  # only its first row is there
    assert not request.is_swapped_out
    steps.to_end()
    assert steps.answers["b"] == expected


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", [5, 6, 7, 8, 9, 10, 11, 12, 13])
def test_beams_that_outgrow_the_pool_alone_end_with_length_whoever_was_there_before(num_blocks, mode):
    """Never for ever: beams that do not fit any more are not waited for."""
    engine = make_engine(num_blocks=num_blocks, num_slots=40, preemption_mode=mode)
    other = make_request("other", [7] * 6, max_tokens=14, ignore_eos=True)
    engine.add_request(other)
    expected, steps = add_beams(engine, 4, 30, prompt=[1, 2, 3, 4, 5], arrival_time=1.0), Steps(engine)
    assert expected.finish_reason is FinishReason.LENGTH and expected.hypotheses is not None
    assert all(beam.finish_reason is FinishReason.LENGTH for beam in expected.hypotheses)
    steps.to_end()
    assert steps.answers["b"] == expected
    assert steps.answers["other"] == expected_answer(other, engine.scheduler.max_request_tokens)


@pytest.mark.parametrize(("num_blocks", "beam_width", "max_tokens"), [(12, 3, 5), (12, 3, 9), (12, 3, 20), (16, 6, 5)])
def test_beams_do_not_starve_however_many_younger_requests_come(num_blocks, beam_width, max_tokens):
    """Nor are they put off again and again."""
    engine = make_engine(num_blocks=num_blocks, max_num_seqs=16)
    names = (str(number) for number in itertools.count())

    def add_small() -> None:
        name = next(names)
        fields = {"max_tokens": max_tokens, "ignore_eos": True, "arrival_time": float(name)}
        engine.add_request(make_request(name, [int(name) % 13, int(name) // 13 % 13, 5], **fields))

    for _ in range(3):
        add_small()
    prompt = [1, 3, 4, 8, 2, 7, 3, 11, 5]
    expected, steps = add_beams(engine, beam_width, 30, prompt, arrival_time=2.5, ignore_eos=True), Steps(engine)
    for _ in range(100):
        for _ in range(3 if len(engine.scheduler.waiting) < 8 else 0):
            add_small()
        steps.next()
    assert steps.answers["b"] == expected


def test_who_decodes_goes_on_while_beams_are_rebuilt():
    engine = make_engine(enable_prefix_caching=False, max_num_batched_tokens=8)
    expected, steps = add_beams(engine, 3, 9), Steps(engine)
    for _ in range(5):
        steps.next()
    for name in "xy":
        engine.add_request(make_request(name, [1, 2], max_tokens=20, ignore_eos=True, arrival_time=1.0))
    steps.next()
    (group,) = [request for request in engine.scheduler.running if request.source.beams]
    engine.scheduler._preempt(group)
    rebuilding = 0
    while "b" not in steps.answers:
        rebuilding += engine.scheduler.rows.are_rebuilt(group)
        rows = steps.next()
        assert ("x", 1, 0) in rows and ("y", 1, 0) in rows
    assert rebuilding > 2 and steps.answers["b"] == expected


def test_hits_of_a_beam_search_are_counted_once():
    engine = make_engine()
    add_beams(engine, 4, 9)
    for _ in range(5):
        engine.step()
    (request,) = engine.scheduler.running
    engine.scheduler._preempt(request)
    Steps(engine).to_end()
    assert (engine.stats().prefix_cache_queries, engine.stats().prefix_cache_hits) == (10, 0)


# ── Equal prompts that come together ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("num_tokens", "num_left"), [(12, 1), (11, 3), (13, 1)])
def test_of_equal_prompts_one_is_computed_the_others_wait_and_another_passes_them(num_tokens, num_left):
    """Then all of them at once: what each of them lacks is in no full block."""
    engine = make_engine(max_num_batched_tokens=32)
    prompt = list(range(1, num_tokens + 1))
    sources = [make_request(name, prompt, max_tokens=2, seed=i) for i, name in enumerate("abc")]
    sources.append(make_request("other", [9, 8, 7], max_tokens=2))
    for source in sources:
        engine.add_request(source)
    steps = Steps(engine)
    assert steps.next() == [("a", num_tokens, 0), ("other", 3, 0)]
    assert [r.request_id for r in engine.scheduler.waiting] == ["b", "c"]
    assert sorted(steps.next()) == [
        *(("a", 1, 0), ("b", num_left, 0), ("c", num_left, 0), ("other", 1, 0)),
    ]
    steps.to_end()
    assert steps.answers == {source.request_id: expected_answer(source, 256) for source in sources}


def test_who_waits_for_one_that_is_aborted_computes_the_prompt():
    engine = make_engine(max_num_batched_tokens=8)
    for name in "abc":
        engine.add_request(make_request(name, list(range(1, 13)), max_tokens=2))
    steps = Steps(engine)
    assert steps.next()[0][0] == "a" and len(engine.scheduler.waiting) == 2
    steps.take(engine.abort(["a"]))
    assert steps.next() == [("b", 8, 0)]
    assert [r.request_id for r in engine.scheduler.waiting] == ["c"]
    steps.to_end()
    assert all(steps.answers[name].finish_reason is FinishReason.LENGTH for name in "bc")


def test_who_lacks_more_than_is_in_progress_does_not_wait():
    engine = make_engine()
    stem = list(range(1, 9))
    engine.add_request(make_request("a", [*stem, 1]))
    engine.add_request(make_request("b", [*stem, *range(1, 10)]))  # 8 of 17 in progress
    engine.add_request(make_request("c", [*stem, *range(2, 9)]))  # 8 of 15
    assert [name for name, _, _ in Steps(engine).next()] == ["a", "b"]
