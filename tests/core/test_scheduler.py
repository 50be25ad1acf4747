"""What a step contains. That the tokens come out right is tests/engine/test_engine*.py's matter."""

from __future__ import annotations

import pytest

from octavo.core.kv_manager import Prefix
from octavo.core.plan import RequestUpdate, RowResult, StepPlan, StepResult
from octavo.core.policy import FCFS
from octavo.core.scheduler import Scheduler
from octavo.errors import InvalidRequestError
from octavo.request import FinishReason, Request, RequestStatus, TokenLogprobs
from support.fake_runner import make_engine, make_request


def make_scheduler(**options: object) -> Scheduler:
    return make_engine(**options).scheduler  # type: ignore[arg-type]


def add(scheduler: Scheduler, request_id: str, num_prompt_tokens: int, **fields: object) -> Request:
    """A request whose prompt no other request shares."""
    prompt = [sum(map(ord, request_id))] * num_prompt_tokens
    request = Request.from_source(make_request(request_id, prompt, **{"ignore_eos": True, **fields}))
    scheduler.add(request)
    return request


def shares(plan: StepPlan) -> dict[str, int]:
    """Tokens by request_id, in the order of the plan."""
    return {row.request.request_id: row.num_tokens for row in plan.scheduled}


def update(scheduler: Scheduler, plan: StepPlan, token_id: int = 7) -> list[RequestUpdate]:
    return scheduler.update(plan, StepResult([RowResult(token_id if row.samples else None) for row in plan.scheduled]))


def step(scheduler: Scheduler) -> dict[str, int]:
    plan = scheduler.schedule()
    update(scheduler, plan)
    return shares(plan)


# ── Budget and seats ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    request = add(scheduler, "a", 19, max_tokens=2)
    assert [step(scheduler)["a"] for _ in range(4)] == [8, 8, 3, 1]
    assert request.status is RequestStatus.FINISHED and request.num_output_tokens == 2


def test_only_the_chunk_that_reaches_the_last_token_samples():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "a", 9)
    plan = scheduler.schedule()
    assert not plan.scheduled[0].samples and update(scheduler, plan) == []
    plan = scheduler.schedule()
    assert plan.scheduled[0].samples
    assert [news.token_ids for news in update(scheduler, plan)] == [[7]]


def test_running_requests_come_before_waiting_ones_and_decodes_before_prompts():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "long", 30)
    step(scheduler)
    add(scheduler, "short", 2)
    assert step(scheduler) == {"long": 4, "short": 2}
    add(scheduler, "new", 2)
    assert step(scheduler) == {"short": 1, "long": 4, "new": 2}


def test_the_budget_is_shared_out_to_the_last_token():
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=8)
    for i in range(10):
        add(scheduler, str(i), 1)
    assert sum(step(scheduler).values()) == 8
    assert sum(step(scheduler).values()) == 8
    assert (len(scheduler.running), len(scheduler.waiting)) == (8, 2)


def test_seats_are_limited():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 3, max_tokens=2)
    assert [step(scheduler) for _ in range(3)] == [{"a": 3, "b": 3}, {"a": 1, "b": 1}, {"c": 3}]


def test_a_lone_prompt_takes_the_whole_budget_and_half_of_it_while_another_waits():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    add(scheduler, "long", 60)
    assert step(scheduler) == {"long": 16}
    add(scheduler, "short", 5)
    assert step(scheduler) == {"long": 8, "short": 5}
    assert step(scheduler) == {"short": 1, "long": 15}


def test_several_prompts_share_small_steps_and_end_one_after_the_other():
    scheduler = make_scheduler(max_num_batched_tokens=2048, num_blocks=2000, max_model_len=2000)
    for name in "abcde":
        add(scheduler, name, 128)
    assert step(scheduler) == {"a": 128, "b": 128, "c": 128, "d": 128}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1, "d": 1, "e": 128}
    add(scheduler, "long", 1500)
    assert step(scheduler)["long"] == 1500  # nobody else waits for it to end


def test_a_prompt_that_fits_is_not_cut():
    scheduler = make_scheduler(max_num_batched_tokens=20)
    add(scheduler, "a", 15)
    add(scheduler, "b", 15)
    assert [step(scheduler) for _ in range(2)] == [{"a": 15, "b": 5}, {"a": 1, "b": 10}]


def test_a_short_request_overtakes_any_number_of_long_prompts():
    scheduler = make_scheduler(max_num_batched_tokens=64, num_blocks=200)
    for name in ("long 1", "long 2", "long 3"):
        add(scheduler, name, 200)
    short = add(scheduler, "short", 6)
    assert step(scheduler) == {"long 1": 32, "long 2": 16, "long 3": 8, "short": 6}
    assert short.num_output_tokens == 1


def test_the_threshold_limits_a_prompt_only_while_others_wait():
    scheduler = make_scheduler(max_num_batched_tokens=32, long_prefill_token_threshold=5, num_blocks=200)
    add(scheduler, "a", 100)
    assert step(scheduler) == {"a": 32}
    add(scheduler, "b", 100)
    assert step(scheduler) == {"a": 5, "b": 27}


@pytest.mark.parametrize(("threshold", "expected_steps"), [(0, 66), (8, 125)])
def test_one_huge_prompt_starves_no_short_one_and_is_not_starved_by_them(threshold, expected_steps):
    scheduler = make_scheduler(
        max_num_batched_tokens=32,
        long_prefill_token_threshold=threshold,
        num_blocks=300,
        max_model_len=2000,
    )
    huge = add(scheduler, "huge", 1000, max_tokens=1)
    num_steps = 0
    while huge.finish_reason is None:
        newcomers = [add(scheduler, f"{num_steps}{name}", 3, max_tokens=2) for name in "ab"]
        step(scheduler)
        assert all(request.num_output_tokens == 1 for request in newcomers)
        num_steps += 1
    # Half of the 30 tokens that two decodes leave in each step but the first (16) and the last (24); or the threshold.
    assert num_steps == expected_steps


def test_who_waits_for_a_seat_does_not_slow_down_those_who_have_one():
    scheduler = make_scheduler(max_num_batched_tokens=16, max_num_seqs=1)
    add(scheduler, "a", 40)
    add(scheduler, "b", 40)
    assert [step(scheduler) for _ in range(3)] == [{"a": 16}, {"a": 16}, {"a": 8}]


def test_cached_tokens_are_not_scheduled():
    scheduler = make_scheduler(block_size=4)
    first = add(scheduler, "a", 10, max_tokens=1)
    step(scheduler)
    second = Request.from_source(make_request("b", first.source.prompt_token_ids))
    scheduler.add(second)
    assert step(scheduler) == {"b": 1}
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 9)


# ── Admission ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_queue_follows_the_policy():
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    for name, priority in (("a", 2), ("b", 1), ("c", 1), ("d", 0)):
        add(scheduler, name, 2, max_tokens=1, priority=priority)
    assert [list(step(scheduler)) for _ in range(4)] == [["d"], ["b"], ["c"], ["a"]]


def test_users_take_turns_under_the_fair_policy():
    scheduler = make_scheduler(policy="fair", max_num_seqs=1)
    for i in range(4):
        add(scheduler, f"a{i}", 2, max_tokens=1, user="a", arrival_time=float(i))
    assert list(step(scheduler)) == ["a0"]
    for i in range(2):
        add(scheduler, f"b{i}", 2, max_tokens=1, user="b", arrival_time=float(4 + i))
    assert [list(step(scheduler)) for _ in range(5)] == [["b0"], ["a1"], ["b1"], ["a2"], ["a3"]]


def test_the_policy_hears_of_each_request_once_whatever_becomes_of_it():
    news: list[str] = []

    class Listening(FCFS):
        def arrive(self, request: Request) -> None:
            news.append(f"{request.request_id} arrives")

        def start(self, request: Request) -> None:
            news.append(f"{request.request_id} starts")

        def finish(self, request: Request) -> None:
            news.append(f"{request.request_id} ends by {request.finish_reason}")

    scheduler = make_scheduler(num_blocks=6, block_size=4)
    scheduler.queues.policy = Listening()
    add(scheduler, "a", 7, max_tokens=8)
    add(scheduler, "b", 7, max_tokens=8)
    add(scheduler, "c", 9)
    with pytest.raises(InvalidRequestError):
        add(scheduler, "c", 1)
    step(scheduler)
    scheduler.abort(["c"])
    while scheduler.has_unfinished:
        step(scheduler)
    assert scheduler.num_preemptions == 1
    assert news == [
        *("a arrives", "b arrives", "c arrives", "a starts", "b starts", "c ends by abort"),
        *("a ends by length", "b ends by length"),
    ]


def test_a_request_that_does_not_fit_yet_is_not_passed_by_a_smaller_one():
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    add(scheduler, "a", 16, max_tokens=3)
    step(scheduler)
    add(scheduler, "big", 24, max_tokens=1)
    add(scheduler, "small", 2, max_tokens=1)
    assert [list(step(scheduler)) for _ in range(3)] == [["a"], ["a"], ["big", "small"]]


def test_admission_leaves_a_spare_block_for_everyone_who_runs():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    add(scheduler, "a", 8)
    add(scheduler, "b", 8)
    assert step(scheduler) == {"a": 8}


def test_a_used_request_id_is_refused():
    scheduler = make_scheduler()
    add(scheduler, "a", 2)
    with pytest.raises(InvalidRequestError, match="request_id 'a' is in use"):
        add(scheduler, "a", 2)


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequestError, match="prompt has no tokens"):
        add(make_scheduler(), "a", 0)


# ── Preemption ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_victim_waits_before_all_others_and_keeps_its_output():
    scheduler = make_scheduler(num_blocks=6, block_size=4)
    a, b = add(scheduler, "a", 7), add(scheduler, "b", 7)
    for _ in range(5):
        step(scheduler)
    add(scheduler, "c", 1)  # no block is free for it
    assert scheduler.kv.pool.num_free == 0 and [r.num_tokens for r in (a, b)] == [12, 12]
    step(scheduler)
    plan = scheduler.schedule()
    assert shares(plan) == {"a": 1} and plan.preempted == [b]
    assert b.status is RequestStatus.PREEMPTED and b.num_computed_tokens == 0 and b.num_output_tokens == 6
    assert [r.request_id for r in scheduler.waiting] == ["b", "c"]
    assert (b.num_preemptions, scheduler.num_preemptions) == (1, 1)
    scheduler.check_integrity()


def test_who_comes_back_computes_its_output_like_a_prompt_and_goes_on():
    scheduler = make_scheduler(num_blocks=6, block_size=4, enable_prefix_caching=False)
    add(scheduler, "a", 7, max_tokens=8)
    b = add(scheduler, "b", 7, max_tokens=8)
    history = [step(scheduler) for _ in range(10)]
    assert history[5:] == [{"a": 1, "b": 1}, {"a": 1}, {"a": 1}, {"b": 13}, {"b": 1}]
    assert b.finish_reason is FinishReason.LENGTH and b.num_output_tokens == 8


def test_the_lowest_priority_gives_way_even_to_a_later_one():
    scheduler = make_scheduler(num_blocks=6, block_size=4, policy="priority")
    a = add(scheduler, "a", 7, priority=1)
    add(scheduler, "b", 7, priority=0)
    while not scheduler.num_preemptions:
        step(scheduler)
    assert scheduler.waiting == [a]


def test_who_came_later_but_is_more_urgent_takes_the_blocks_of_who_runs():
    scheduler = make_scheduler(num_blocks=6, block_size=4, policy="priority")
    low = add(scheduler, "low", 7, priority=5, max_tokens=12)
    step(scheduler)
    step(scheduler)
    high = add(scheduler, "high", 7, priority=-1, max_tokens=12)
    while high.finish_reason is None:
        step(scheduler)
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)
    assert (low.status, high.num_output_tokens) == (RequestStatus.PREEMPTED, 12)
    while scheduler.has_unfinished:
        step(scheduler)
    assert low.num_output_tokens == 12


def test_a_request_that_outgrows_the_pool_alone_ends_with_length():
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    request = add(scheduler, "a", 5, max_tokens=100)
    while scheduler.has_unfinished:
        step(scheduler)
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_tokens == 13  # 12 in the pool, and the one that the last of them gave
    assert request.num_preemptions == 0


# ── The end of a request ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, None)),
        ({"eos_token_ids": [3, 7]}, (FinishReason.STOP, None)),
        ({"eos_token_ids": [7], "ignore_eos": True}, (None, None)),
        ({"stop_token_ids": [7]}, (FinishReason.STOP, 7)),
        ({"stop_token_ids": [7], "eos_token_ids": [7]}, (FinishReason.STOP, None)),
        ({"stop_token_ids": [7], "eos_token_ids": [7], "ignore_eos": True}, (FinishReason.STOP, 7)),
        ({"stop_token_ids": [7], "min_tokens": 1}, (FinishReason.STOP, 7)),
        ({"stop_token_ids": [7], "min_tokens": 2}, (None, None)),
        ({"max_tokens": 1}, (FinishReason.LENGTH, None)),
        ({"max_tokens": 1, "stop_token_ids": [7]}, (FinishReason.STOP, 7)),
        ({"max_tokens": 1, "eos_token_ids": [7]}, (FinishReason.STOP, None)),
    ],
)
def test_what_ends_a_request(fields, expected):
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3, **{"ignore_eos": False, **fields})
    update(scheduler, scheduler.schedule(), token_id=7)
    assert (request.finish_reason, request.stop_reason) == expected
    assert list(request.token_ids)[3:] == [7]  # the token that ends it belongs to it


def test_a_failed_row_ends_its_request_and_nothing_it_computed_becomes_known():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 9)
    (news,) = scheduler.update(scheduler.schedule(), StepResult([RowResult(error="NaN")]))
    assert (news.token_ids, request.finish_reason, request.error) == ([], FinishReason.ERROR, "NaN")
    assert scheduler.kv.lookup(Request.from_source(request.source)) == Prefix()
    scheduler.check_integrity()


def test_abort_while_waiting_running_and_preempted():
    scheduler = make_scheduler(num_blocks=6, block_size=4)
    a, b = add(scheduler, "a", 7), add(scheduler, "b", 7)
    while not scheduler.num_preemptions:
        step(scheduler)
    c = add(scheduler, "c", 3)
    assert scheduler.abort(["c", "b", "unknown", "a", "a"]) == [c, b, a]
    assert all(r.finish_reason is FinishReason.ABORT for r in (a, b, c))
    assert not scheduler.has_unfinished and scheduler.kv.pool.num_used == 0
    scheduler.check_integrity()


def test_the_result_of_a_request_that_was_aborted_meanwhile_is_dropped_even_if_its_id_is_back():
    scheduler = make_scheduler()
    old = add(scheduler, "a", 3)
    plan = scheduler.schedule()
    scheduler.abort(["a"])
    new = add(scheduler, "a", 3)
    assert update(scheduler, plan) == []
    assert (old.num_output_tokens, new.num_output_tokens, new.status) == (0, 0, RequestStatus.WAITING)
    scheduler.check_integrity()


def test_scoring_samples_nothing():
    scheduler = make_scheduler()
    add(scheduler, "a", 5, max_tokens=0, prompt_logprobs=0)
    plan = scheduler.schedule()
    (row,) = plan.scheduled
    assert (row.samples, row.num_scored) == (False, 4)
    (news,) = scheduler.update(plan, prompt_logprobs_result(plan))
    assert (news.token_ids, news.request.finish_reason) == ([], FinishReason.LENGTH)
    assert news.prompt_logprobs is not None and len(news.prompt_logprobs) == 4


# ── Prompt logprobs ──────────────────────────────────────────────────────────────────────────────────────────────────


def prompt_logprobs_result(plan: StepPlan) -> StepResult:
    """As the runner does: entry p for each prompt position p whose predecessor is scored."""
    (row,) = plan.scheduled
    logprobs = [TokenLogprobs([row.start + i + 1], [-1.0], 1) for i in range(row.num_scored)]
    return StepResult([RowResult(7 if row.samples else None, prompt_logprobs=logprobs)])


def test_prompt_logprobs_are_gathered_over_chunks_and_given_out_once_with_the_first_token():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, "a", 10, prompt_logprobs=0)
    news = []
    for _ in range(4):
        plan = scheduler.schedule()
        news += scheduler.update(plan, prompt_logprobs_result(plan))
    assert [n.token_ids for n in news] == [[7], [7]]
    assert news[0].prompt_logprobs is not None and news[1].prompt_logprobs is None
    assert [entry.token_ids for entry in news[0].prompt_logprobs] == [[p] for p in range(1, 10)]


def test_a_prompt_of_one_token_has_prompt_logprobs_and_they_are_empty():
    scheduler = make_scheduler()
    add(scheduler, "a", 1, prompt_logprobs=0)
    (news,) = update(scheduler, scheduler.schedule())
    assert news.prompt_logprobs == []


@pytest.mark.parametrize("num_steps_before", [1, 2, 3, 4])
def test_a_preempted_request_gives_its_prompt_logprobs_once(num_steps_before):
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = add(scheduler, "a", 10, prompt_logprobs=0, max_tokens=3)
    news, num_scored = [], 0
    for i in range(12):
        if i == num_steps_before:
            scheduler._preempt(request)
        if scheduler.has_unfinished:
            plan = scheduler.schedule()
            num_scored += sum(row.num_scored for row in plan.scheduled)
            news += scheduler.update(plan, prompt_logprobs_result(plan))
    given = [n.prompt_logprobs for n in news if n.prompt_logprobs is not None]
    assert [[entry.token_ids for entry in entries] for entries in given] == [[[p] for p in range(1, 10)]]
    assert num_scored == 9 + (4 * num_steps_before if num_steps_before < 3 else 0)  # and not again for the output
    assert [n.token_ids for n in news] == [[7]] * 3
