"""Which way out of the pool, and that both lead to the same answers."""

from __future__ import annotations

import pytest

from octavo.core.plan import CopyBlock, RestoreBlock, RowResult, SaveBlock, ScheduledRequest, StepPlan, StepResult
from octavo.core.preemption import Auto, make_preemption
from octavo.engine.engine import Engine
from octavo.errors import ConfigError
from octavo.request import FinishReason, Request
from support.fake_runner import Answer, FakeRunner, expected_answer, make_engine, make_request


def step_of(num_tokens: int, *transfers: object) -> StepPlan:
    request = Request.from_source(make_request("a", [1] * num_tokens))
    row = ScheduledRequest(request, 0, num_tokens, request.token_ids, samples=False)
    return StepPlan([row], transfers=list(transfers))  # type: ignore[arg-type]


def seconds(compute: float = 0.0, transfer: float = 0.0, *, failed: bool = False) -> StepResult:
    return StepResult([RowResult()], failed=failed, transfer_seconds=transfer, compute_seconds=compute)


def test_auto_swaps_until_it_knows_both_costs_and_then_takes_the_smaller():
    auto = Auto()
    assert auto.swaps(100, 7)
    auto.observe(step_of(100), seconds(compute=0.5))  # 5 ms a token
    assert auto.swaps(1, 1000)
    auto.observe(step_of(1, SaveBlock(0, 0), RestoreBlock(1, 1)), seconds(transfer=0.04))  # 20 ms a block, one way
    assert not auto.swaps(80, 10)  # out and in: 0.4 s, as long as the tokens take
    assert auto.swaps(81, 10)
    assert not auto.swaps(79, 10)


def test_auto_follows_what_it_measures():
    auto = Auto()
    for compute in (1.0, 2.0):
        auto.observe(step_of(100), seconds(compute))
    assert auto.seconds_per_token == pytest.approx(0.01 + 0.2 * 0.01)
    for transfer in (0.1, 0.3):
        auto.observe(step_of(1, SaveBlock(0, 0), CopyBlock(1, 2, 3)), seconds(transfer=transfer))
    assert auto.seconds_per_block == pytest.approx(0.05 + 0.2 * 0.1)


def test_auto_learns_nothing_from_small_steps_copies_and_failures():
    auto = Auto()
    auto.observe(step_of(15), seconds(compute=1.0))
    auto.observe(step_of(1, CopyBlock(0, 1, 2)), seconds(transfer=1.0))
    auto.observe(step_of(100, SaveBlock(0, 0)), seconds(1.0, 1.0, failed=True))
    assert (auto.seconds_per_token, auto.seconds_per_block) == (None, None)


def test_the_modes_by_name():
    assert not make_preemption("recompute").swaps(1000, 1)
    assert make_preemption("swap").swaps(1, 1000)
    assert isinstance(make_preemption("auto"), Auto)
    with pytest.raises(ConfigError, match="preemption_mode is 'both'; allowed: recompute, swap, auto"):
        make_preemption("both")


# ── In the scheduler ─────────────────────────────────────────────────────────────────────────────────────────────────


def two_that_do_not_fit(**options: object) -> tuple[Engine, dict[str, Answer]]:
    """Six blocks of four tokens; both want 15. After six steps b has given way to a."""
    engine = make_engine(num_blocks=6, **options)  # type: ignore[arg-type]
    expected = {}
    for seed, name in enumerate("ab"):
        source = make_request(name, [seed + 1] * 7, max_tokens=8, seed=seed, ignore_eos=True)
        engine.add_request(source)
        expected[name] = expected_answer(source, 25)
    return engine, expected


def finish(engine: Engine, answers: dict[str, Answer]) -> dict[str, Answer]:
    while engine.has_unfinished:
        for delta in engine.step():
            answers.setdefault(delta.request_id, Answer()).take(delta)
        engine.check_integrity()
    kv = engine.scheduler.kv
    assert (kv.pool.num_used, kv.swap.num_free) == (0, kv.swap.num_slots)
    return answers


@pytest.mark.parametrize(
    ("mode", "num_slots", "num_swaps"), [("recompute", 9, 0), ("swap", 9, 1), ("swap", 3, 1), ("swap", 2, 0)]
)
def test_who_is_swapped_out_computes_nothing_twice(mode, num_slots, num_swaps):
    """Without slots enough it is recomputed. b holds 12 computed tokens, and 3 blocks, when it has to go."""
    engine, expected = two_that_do_not_fit(
        num_slots=num_slots, preemption_mode=mode, enable_prefix_caching=False, max_num_batched_tokens=99
    )
    assert finish(engine, {}) == expected
    assert (engine.stats().num_preemptions, engine.stats().num_swaps) == (1, num_swaps)
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    b_tokens = [row.num_tokens for plan in runner.plans for row in plan.scheduled if row.request.request_id == "b"]
    # 7 of the prompt, one for each output token but the last, and what was computed before and is again.
    assert sum(b_tokens) == 14 + (0 if num_swaps else 12)
    transfers = [type(each) for plan in runner.plans for each in plan.transfers]
    assert transfers == [SaveBlock] * 3 * num_swaps + [RestoreBlock] * 3 * num_swaps


def test_a_step_that_fails_loses_nothing_of_those_who_gave_way_in_it():
    engine, expected = two_that_do_not_fit(num_slots=9, preemption_mode="swap")
    answers: dict[str, Answer] = {}
    for _ in range(6):
        for delta in engine.step():
            answers.setdefault(delta.request_id, Answer()).take(delta)
    assert isinstance(engine.runner, FakeRunner) and engine.scheduler.num_swaps == 0
    engine.runner.explodes = True
    (delta,) = engine.step()
    plan = engine.runner.plans[-1]
    assert [request.request_id for request in plan.preempted] == ["b"] and delta.request_id == "a"
    assert not plan.preempted[0].is_swapped_out and engine.scheduler.kv.swap.num_free == 9  # nothing was saved
    finish(engine, answers)
    assert answers["b"] == expected["b"]


def test_aborted_while_swapped_out():
    engine, expected = two_that_do_not_fit(num_slots=9, preemption_mode="swap")
    answers: dict[str, Answer] = {}
    while not engine.scheduler.num_swaps:
        for delta in engine.step():
            answers.setdefault(delta.request_id, Answer()).take(delta)
    assert engine.scheduler.kv.swap.num_free == 6
    for delta in engine.abort(["b"]):
        answers[delta.request_id].take(delta)
    assert engine.scheduler.kv.swap.num_free == 9
    finish(engine, answers)
    assert answers["a"] == expected["a"] and answers["b"].finish_reason is FinishReason.ABORT


def test_auto_measures_swapping_again_now_and_then():
    auto = Auto()
    auto.seconds_per_token, auto.seconds_per_block = 0.001, 1.0
    choices = [auto.swaps(num_tokens=100, num_blocks=7) for _ in range(2 * 51)]
    assert [i for i, swaps in enumerate(choices) if swaps] == [50, 101]
