"""An engine around the fake runner, all that was ever asked of it, and what it must never do.

What happens, and when, is decided by who uses it (tests/engine/test_engine_random.py). Whatever that is, every answer
is that of a plain loop (support/fake_runner.py), the books balance after every step, and no block is shared by requests
that do not agree on what is in it.
"""

from __future__ import annotations

from typing import Any

from octavo.core.plan import StepPlan
from octavo.engine.engine import as_delta
from octavo.engine.messages import TokenDelta
from octavo.errors import InvalidRequestError
from octavo.pooling import PoolingParams, PoolingType
from octavo.request import BeamSearchParams, EngineRequest, FinishReason, Request
from support.fake_runner import (
    Answer,
    FakeRunner,
    FakeStore,
    expected_answer,
    expected_beams,
    make_beams,
    make_embedding,
    make_engine,
    make_request,
)


class World:
    """Options are those of `make_engine`; `store` outlives the engine."""

    def __init__(self, *, store: FakeStore | None = None, **options: Any) -> None:
        self.options, self.store = options, store
        self.max_request_tokens = min(options["max_model_len"], options["num_blocks"] * options["block_size"] + 1)
        self.sources: dict[str, EngineRequest] = {}
        self.answers: dict[str, Answer] = {}
        self.aborted: set[str] = set()
        self.failed: set[str] = set()
        self._start_engine()

    def _start_engine(self) -> None:
        self.engine = make_engine(**self.options, store=self.store)
        self.scheduler = self.engine.scheduler
        assert isinstance(self.engine.runner, FakeRunner)
        self.runner = self.engine.runner

    def unfinished(self) -> list[str]:
        return [i for i, answer in self.answers.items() if answer.finish_reason is None]

    # ── What may happen ──────────────────────────────────────────────────────────────────────────────────────────

    def add_samples(self, prompt: list[int], n: int, max_tokens: int | None, min_tokens: int, **fields: Any) -> None:
        first_id, arrival_time = f"r{len(self.sources)}", self._now()
        if max_tokens is not None:
            min_tokens = min(min_tokens, max_tokens)
        for index in range(n):
            if index:
                fields |= {"fork_of": first_id, "prompt_logprobs": None}
            source = make_request(
                first_id if index == 0 else f"{first_id}.{index}",
                prompt,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                arrival_time=arrival_time,
                sample_index=index,
                **fields,
            )
            self._add(source, self._fits(prompt, int(max_tokens != 0)))

    def add_beams(self, prompt: list[int], beams: BeamSearchParams, **fields: Any) -> None:
        source = make_beams(f"b{len(self.sources)}", prompt, beams, arrival_time=self._now(), **fields)
        self._add(source, self._fits(prompt, 1) and beams.beam_width <= self.options["max_num_seqs"])

    def add_embedding(self, prompt: list[int], pooling_type: PoolingType, **fields: Any) -> None:
        pooling = PoolingParams(pooling_type=pooling_type, normalize=False)
        source = make_embedding(f"e{len(self.sources)}", prompt, pooling, arrival_time=self._now(), **fields)
        self._add(source, self._fits(prompt, 0))

    def _now(self) -> float:
        return float(len(self.sources) // 2)  # ties included

    def _fits(self, prompt: list[int], num_more_tokens: int) -> bool:
        fits_alone = len(prompt) <= self.scheduler.kv.max_tokens
        return fits_alone and len(prompt) + num_more_tokens <= self.max_request_tokens

    def _add(self, source: EngineRequest, fits: bool) -> None:
        try:
            self.engine.add_request(source)
        except InvalidRequestError:
            assert not fits
        else:
            assert fits
            self.sources[source.request_id], self.answers[source.request_id] = source, Answer()

    def step(self) -> None:
        self._take(self.engine.step())

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()
        self.engine.check_integrity()

    def abort(self, request_ids: list[str]) -> None:
        self.aborted.update(request_ids)
        self._take(self.engine.abort([*request_ids, "nobody"]))

    def abort_in_a_step(self, request_id: str) -> None:
        """What `Engine.step` does, with an abort in the middle."""
        plan = self.scheduler.schedule()
        result = self.runner.execute(plan)
        self.aborted.add(request_id)
        last_words = self.engine.abort([request_id])
        self.engine.check_integrity()
        self._take(last_words + [as_delta(update) for update in self.scheduler.update(plan, result)])

    def fail_row(self, request_id: str) -> None:
        self.runner.failing = {request_id}
        self._take(self.engine.step(), may_fail={request_id})
        self.runner.failing = set()

    def fail_step(self) -> None:
        self.runner.explodes = True
        self._take(self.engine.step(), may_fail=set(self.sources))
        self.runner.explodes = False

    def preempt(self, request_id: str) -> None:
        """As if blocks had run short just now."""
        for request in [r for r in self.scheduler.running if r.request_id == request_id]:
            self.scheduler._preempt(request)
        self.step()

    def restart(self, is_orderly: bool, damage: int) -> None:
        """All that is left of an engine is what the store has, and of that one block may be damaged."""
        self.abort(self.unfinished())
        if is_orderly:
            self.engine.close()
        if self.store is not None and self.store.blocks:
            self.store.damaged.add(sorted(self.store.blocks)[damage % len(self.store.blocks)])
        self._start_engine()

    def finish(self) -> None:
        """Nobody starves: with no newcomers, everybody ends within a bounded number of steps."""
        for _ in range(20_000):
            if not self.engine.has_unfinished:
                break
            self.step()
        assert not self.unfinished()
        self.check()
        assert self.scheduler.kv.pool.num_used == 0
        assert self.scheduler.kv.swap.num_free == self.options["num_slots"]

    # ── What must hold ───────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, deltas: list[TokenDelta], may_fail: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        for delta in deltas:
            self.answers[delta.request_id].take(delta)
            if delta.finish_reason is FinishReason.ERROR:
                assert delta.request_id in may_fail, delta.error
                self.failed.add(delta.request_id)
            if delta.finish_reason is not None:
                self._check_answer(delta.request_id)
        self.check()

    def _check_answer(self, request_id: str) -> None:
        answer, source = self.answers[request_id], self.sources[request_id]
        is_whole = request_id not in self.failed | self.aborted
        if source.beams is None:
            expected = expected_answer(source, self.max_request_tokens)
            assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
            assert answer == expected or not is_whole
        elif is_whole:
            num_blocks, block_size = self.options["num_blocks"], self.options["block_size"]
            assert answer == expected_beams(source, num_blocks, block_size, self.options["max_model_len"])

    def check(self) -> None:
        self.engine.check_integrity()
        queues, pool = self.scheduler.queues, self.scheduler.kv.pool
        assert pool.num_free + pool.num_used == pool.num_blocks
        assert queues.num_seats_taken <= queues.max_num_seqs
        assert self.engine.has_unfinished == bool(self.unfinished())
        order = [*map(queues.policy.order, self.scheduler.waiting)]
        assert order == sorted(order)
        for plan in self.runner.plans:
            self._check_plan(plan)
        self.runner.plans.clear()
        self._check_who_shares_blocks()

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_scheduled_tokens <= self.scheduler.max_num_batched_tokens
        rows = [request for row in plan.scheduled for request in (row.request, *row.forks)]
        assert len(rows) <= self.scheduler.queues.max_num_seqs
        assert len(set(rows)) == len(rows)
        assert all(row.num_tokens > 0 for row in plan.scheduled)
        scheduled = {row.request.request_id for row in plan.scheduled}
        assert not scheduled & {request.request_id for request in (*plan.preempted, *plan.outgrown)}
        assert scheduled or plan.outgrown, "a step without work"

    def _check_who_shares_blocks(self) -> None:
        """What two tables hold of a block that is in both is the same, as far as each has computed it."""
        rows = self.scheduler.rows
        contents: dict[int, tuple[Any, list[Any]]] = {}
        for row in (row for request in self.scheduler.running for row in rows.with_blocks(request)):
            for index, block_id in enumerate(self.scheduler.kv.block_table(row)):
                before, computed = self._content(row, index)
                other_before, other_computed = contents.setdefault(block_id, (before, computed))
                shorter, longer = sorted((computed, other_computed), key=len)
                assert before == other_before and longer[: len(shorter)] == shorter
                contents[block_id] = before, longer

    def _content(self, row: Request, index: int) -> tuple[Any, list[Any]]:
        """What precedes a block and what the row has computed of it."""
        start, size = index * self.options["block_size"], self.options["block_size"]
        computed = row.token_ids[start : min(start + size, row.num_computed_tokens)].tolist()
        return (row.source.cache_salt, row.token_ids[:start].tolist()), computed or [id(row)]
