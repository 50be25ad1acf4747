"""A plan that is moved on is the plan that would have been made."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.core.plan import RowResult, StepPlan, StepResult
from octavo.core.scheduler import Scheduler
from octavo.request import Request
from support.fake_runner import FakeRunner, make_engine, make_request

OPTIONS: dict[str, dict[str, Any]] = {
    "room for all": {"num_blocks": 64},
    "one has to give way": {"num_blocks": 12},
    "swapped": {"num_blocks": 12, "num_slots": 20, "preemption_mode": "swap"},
    "few seats": {"num_blocks": 64, "max_num_seqs": 2},
    "small budget": {"num_blocks": 64, "max_num_batched_tokens": 3},
    "no prefix cache": {"num_blocks": 12, "enable_prefix_caching": False},
}


def as_values(plan: StepPlan) -> Any:
    """All that a plan says, without its requests' identity."""
    rows = [
        (
            *(row.request.request_id, row.start, row.num_tokens, list(row.block_table), row.samples, row.num_scored),
            *(fork.request_id for fork in row.forks),
        )
        for row in plan.scheduled
    ]
    others = [[request.request_id for request in group] for group in (plan.preempted, plan.outgrown)]
    return rows, others, plan.transfers, plan.num_scheduled_tokens


def a_life(seed: int, forget: bool, **options: Any) -> tuple[list[Any], dict[str, list[int]], int]:
    """Each step's plan and everybody's tokens; how many plans were moved on. `forget`: none is."""
    engine = make_engine(block_size=4, **options)
    scheduler, runner, numbers = engine.scheduler, engine.runner, random.Random(seed)
    assert isinstance(runner, FakeRunner)
    plans, requests, num_moved_on, last = [], [], 0, None
    for number in range(120):
        if number < 90 and numbers.random() < 0.12:
            prompt = [numbers.randrange(3) for _ in range(numbers.randrange(1, 12))]
            for index in range(numbers.choice([1, 1, 1, 3])):
                fork = {"fork_of": f"{number}.0", "sample_index": index} if index else {}
                source = make_request(
                    f"{number}.{index}", prompt, max_tokens=numbers.randrange(1, 25), ignore_eos=True, **fork
                )
                requests.append(Request.from_source(source))
                scheduler.add(requests[-1])
        if numbers.random() < 0.03 and scheduler.running:
            scheduler.abort([scheduler.running[0].request_id])
        if forget:
            scheduler._steady_plan = None
        if engine.has_unfinished:
            plan = scheduler.schedule()
            num_moved_on += plan is last
            plans.append(as_values(plan))
            scheduler.update(plan, runner.execute(plan))
            last = plan
            engine.check_integrity()
    return plans, {request.request_id: list(request.token_ids) for request in requests}, num_moved_on


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_plan_that_would_have_been_made(name, seed):
    moved_on, tokens, num_moved_on = a_life(seed, False, **OPTIONS[name])
    made, expected_tokens, none = a_life(seed, True, **OPTIONS[name])
    assert moved_on == made and tokens == expected_tokens
    assert none == 0 < num_moved_on


# ── When it is not ───────────────────────────────────────────────────────────────────────────────────────────────────


def decoding(*request_ids: str, **options: Any) -> tuple[Scheduler, StepPlan]:
    """A scheduler and the plan of its last step, in which all these decoded."""
    scheduler = make_engine(**options).scheduler
    for request_id in request_ids:
        add(scheduler, request_id)
    step(scheduler)
    return scheduler, step(scheduler)


def add(scheduler: Scheduler, request_id: str, **fields: Any) -> None:
    prompt = [ord(request_id)] * 5
    scheduler.add(Request.from_source(make_request(request_id, prompt, ignore_eos=True, **fields)))


def step(scheduler: Scheduler, *failing: str) -> StepPlan:
    plan = scheduler.schedule()
    results = [
        RowResult(error="NaN") if row.request.request_id in failing else RowResult(7 if row.samples else None)
        for row in plan.scheduled
    ]
    scheduler.update(plan, StepResult(results))
    return plan


def test_steps_in_which_nobody_comes_or_goes_have_one_plan():
    scheduler, plan = decoding("a", "b")
    starts = [[row.start for row in step(scheduler).scheduled] for _ in range(3)]
    assert starts == [[6, 6], [7, 7], [8, 8]] and scheduler.schedule() is plan


def test_who_comes_is_in_the_next_plan():
    scheduler, plan = decoding("a", max_num_seqs=2)
    add(scheduler, "b")
    assert [row.request.request_id for row in step(scheduler).scheduled] == ["a", "b"]
    step(scheduler)  # both decode
    plan = step(scheduler)
    add(scheduler, "c")  # no seat for it
    assert step(scheduler) is plan


def test_who_goes_is_not_in_it():
    scheduler, _ = decoding("a", "b", "c")
    scheduler.abort(["b"])
    assert [row.request.request_id for row in step(scheduler).scheduled] == ["a", "c"]
    step(scheduler, "c")
    assert [row.request.request_id for row in step(scheduler).scheduled] == ["a"]


def test_a_plan_is_not_moved_on_before_its_results_are_in():
    scheduler, plan = decoding("a")
    assert scheduler.schedule() is plan
    again = scheduler.schedule()
    assert again is not plan and again.scheduled[0].start == plan.scheduled[0].start
