"""Thousands of random schedules: whatever happens around a request, its answer is that of a plain loop."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.engine.engine import as_delta
from octavo.errors import InvalidRequestError
from octavo.request import EngineRequest, FinishReason
from support.fake_runner import Answer, FakeRunner, expected_answer, make_engine, make_request

STEMS = ([0, 1, 2, 3] * 5, [0, 1, 2, 3, 4] * 4)
# A piece of a common stem and a tail of few tokens, so that prefixes meet and part at any place.
PROMPTS = st.builds(
    lambda stem, length, tail: [*stem[:length], *tail],
    st.sampled_from(STEMS),
    st.integers(0, 20),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "max_tokens": st.sampled_from([20, None, 9, 4, 2, 1, 0]),
        "min_tokens": st.sampled_from([0, 0, 2, 5]),
        "eos_token_ids": st.sampled_from([[], [], [], [3]]),
        "stop_token_ids": st.sampled_from([[], [], [], [5]]),
        "ignore_eos": st.booleans(),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "logprobs": st.sampled_from([None, 0]),
        "cache_salt": st.sampled_from([None, None, "salt"]),
        "priority": st.integers(0, 2),
        "user": st.sampled_from([None, "a", "b"]),
        "seed": st.integers(0, 3),
    }
)


class RandomSchedules(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.sampled_from([4, 2, 1]),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        max_num_seqs=st.sampled_from([5, 4, 3, 2, 1]),
        max_num_batched_tokens=st.sampled_from([24, 12, 7, 4, 2, 1]),
        max_model_len=st.sampled_from([40, 30, 16, 4]),
        long_prefill_token_threshold=st.sampled_from([0, 0, 1, 5]),
        enable_prefix_caching=st.sampled_from([True, True, False]),
    )
    def start(self, **options):
        self.engine = make_engine(**options)
        self.scheduler = self.engine.scheduler
        self.pool = self.scheduler.kv.pool
        self.runner: FakeRunner = self.engine.runner
        self.max_request_tokens = min(options["max_model_len"], options["num_blocks"] * options["block_size"] + 1)
        self.sources: dict[str, EngineRequest] = {}
        self.answers: dict[str, Answer] = {}
        self.failed: set[str] = set()
        self.aborted: set[str] = set()

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, requests):
        for fields in requests:
            self.add_one(**fields)

    def add_one(self, prompt, max_tokens, min_tokens, **fields):
        request_id = f"r{len(self.sources)}"
        if max_tokens is not None:
            min_tokens = min(min_tokens, max_tokens)
        arrival_time = float(len(self.sources) // 2)  # ties included
        source = make_request(
            request_id, prompt, max_tokens=max_tokens, min_tokens=min_tokens, arrival_time=arrival_time, **fields
        )
        fits = (
            len(prompt) + (max_tokens != 0) <= self.max_request_tokens and len(prompt) <= self.scheduler.kv.max_tokens
        )
        try:
            self.engine.add_request(source)
        except InvalidRequestError:
            assert not fits
        else:
            assert fits
            self.sources[request_id], self.answers[request_id] = source, Answer()

    @precondition(lambda self: self.engine.has_unfinished)
    @rule(num_steps=st.integers(1, 12))
    def steps(self, num_steps):
        for _ in range(num_steps):
            self.take(self.engine.step())

    @rule()
    def reset_prefix_cache(self):
        self.engine.reset_prefix_cache()

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data(), trouble=st.sampled_from(["abort", "abort in a step", "row fails", "step fails"]))
    def trouble(self, data, trouble):
        victim = data.draw(st.sampled_from([*self.scheduler.running, *self.scheduler.waiting])).request_id
        match trouble:
            case "abort":
                self.aborted.add(victim)
                self.take(self.engine.abort([victim, "nobody"]))
            case "abort in a step":
                self.abort_while_the_step_runs(victim)
            case "row fails":
                self.runner.failing = {victim}
                self.take(self.engine.step())
                self.runner.failing = set()
            case "step fails":
                self.runner.explodes = True
                self.take(self.engine.step())

    def abort_while_the_step_runs(self, victim):
        """What `Engine.step` does, with an abort in the middle."""
        plan = self.scheduler.schedule()
        result = self.runner.execute(plan)
        self.aborted.add(victim)
        self.take(self.engine.abort([victim]))
        self.take([as_delta(update) for update in self.scheduler.update(plan, result)])

    def teardown(self):
        """Nobody starves: with no newcomers, everybody ends within a bounded number of steps."""
        for _ in range(20_000):
            if not self.engine.has_unfinished:
                break
            self.take(self.engine.step())
        self.books_balance()
        assert not self.unfinished()
        assert self.pool.num_used == 0

    def unfinished(self) -> set[str]:
        return {i for i, answer in self.answers.items() if answer.finish_reason is None}

    def take(self, deltas):
        for delta in deltas:
            self.answers[delta.request_id].take(delta)
            if delta.finish_reason is FinishReason.ERROR:
                self.failed.add(delta.request_id)
            self.check_if_finished(delta.request_id)

    def check_if_finished(self, request_id):
        answer = self.answers[request_id]
        if answer.finish_reason is None:
            return
        expected = expected_answer(self.sources[request_id], self.max_request_tokens)
        if request_id in self.failed | self.aborted:
            assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
        else:
            assert answer == expected

    @invariant()
    def books_balance(self):
        self.engine.check_integrity()
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks
        assert len(self.scheduler.running) <= self.scheduler.queues.max_num_seqs
        assert self.engine.has_unfinished == bool(self.unfinished())
        assert [*map(self.scheduler.queues.policy.order, self.scheduler.waiting)] == sorted(
            map(self.scheduler.queues.policy.order, self.scheduler.waiting)
        )
        for plan in self.runner.plans:
            assert plan.num_scheduled_tokens <= self.scheduler.max_num_batched_tokens
            assert len(plan.scheduled) <= self.scheduler.queues.max_num_seqs
            assert all(row.num_tokens > 0 for row in plan.scheduled)
            assert len({row.request.request_id for row in plan.scheduled}) == len(plan.scheduled)
            assert not {row.request for row in plan.scheduled} & set(plan.preempted)
        self.runner.plans.clear()
        self.check_who_shares_blocks()

    def check_who_shares_blocks(self):
        """No block is in two tables, unless it is full, computed, and has one content in both."""
        size = self.scheduler.kv.block_size
        contents: dict[int, tuple] = {}
        for request in self.scheduler.running:
            for index, block_id in enumerate(self.scheduler.kv.block_table(request)):
                full = (index + 1) * size <= request.num_computed_tokens
                prefix = (request.source.cache_salt, request.token_ids[: (index + 1) * size].tolist())
                content = (full, prefix if full else request.request_id)
                assert contents.setdefault(block_id, content) == content


RandomSchedules.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestRandomSchedules = RandomSchedules.TestCase
