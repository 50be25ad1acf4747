"""The engine: one step is three calls. Owns nothing but the loop's body; knows neither blocks nor tensors nor text.

A step that fails takes down the requests it computed, nobody else: their blocks were not published, so nothing of what
the failed step wrote is ever read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from octavo.core.picture import Painter, Picture
from octavo.core.plan import EvictBlock, RequestUpdate, RowResult, StepPlan, StepResult
from octavo.core.scheduler import Scheduler
from octavo.engine.messages import EngineInfo, SchedulerStats, TokenDelta, callers_id
from octavo.request import EngineRequest, Request

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """The compute plane (runtime/runner.py), as the engine sees it."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a plan. One row of the result for each scheduled request, in order."""

    def close(self, evictions: Sequence[EvictBlock]) -> None:
        """An orderly end: these blocks are of use to the next engine, if there is a place to keep them."""


class Engine:
    def __init__(self, scheduler: Scheduler, runner: Runner, info: EngineInfo) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.info = info
        self._painter = Painter(scheduler)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def add_request(self, source: EngineRequest) -> None:
        """Queue one sample. InvalidRequestError where it could never run (`Scheduler.add`)."""
        self.scheduler.add(Request.from_source(source))

    def abort(self, request_ids: Iterable[str]) -> list[TokenDelta]:
        """End these requests at once, at any moment. Returns their last words; unknown ids are ignored."""
        return [as_delta(RequestUpdate(request, [])) for request in self.scheduler.abort(request_ids)]

    def step(self) -> list[TokenDelta]:
        """Compute one step: the news of every request that has any. Does nothing when no request is unfinished."""
        if not self.has_unfinished:
            return []
        plan = self.scheduler.schedule()
        try:
            result = self.runner.execute(plan)
        except Exception as error:
            result = _failed(plan, error)
        updates = self.scheduler.update(plan, result)
        return [as_delta(update) for update in updates]

    def reset_prefix_cache(self) -> None:
        """Forget all that is cached; between two steps, whatever runs."""
        self.scheduler.kv.reset_prefix_cache()

    def close(self) -> None:
        """Keep what the next engine can use. Nothing may be called afterwards; without this, only that is lost."""
        self.runner.close(self.scheduler.kv.evictions())

    def stats(self) -> SchedulerStats:
        scheduler, kv = self.scheduler, self.scheduler.kv
        return SchedulerStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=kv.usage,
            prefix_cache_queries=kv.num_lookup_tokens,
            prefix_cache_hits=kv.num_hit_tokens,
            external_prefix_cache_queries=kv.num_store_lookup_tokens,
            external_prefix_cache_hits=kv.num_store_hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_swaps=scheduler.num_swaps,
            num_steps=scheduler.num_steps,
            step_tokens=scheduler.step_tokens,
            store=None if kv.store is None else kv.store.counts,
        )

    def picture(self) -> Picture:
        """Where every request and every block stands; between two steps."""
        return self._painter.paint()

    def check_integrity(self) -> None:
        """AssertionError if the books do not balance. Cheap enough for every moment the engine falls idle."""
        self.scheduler.check_integrity()


def _failed(plan: StepPlan, error: Exception) -> StepResult:
    request_ids = [callers_id(row.request.request_id) for row in plan.scheduled]
    about = {"request_ids": request_ids}
    logger.error("a step of %d requests failed", len(request_ids), exc_info=error, extra=about)
    message = f"the step that computed this request failed: {type(error).__name__}: {error}"
    rows = [RowResult(error=message, forks=[RowResult(error=message) for _ in row.forks]) for row in plan.scheduled]
    return StepResult(rows, failed=True)


def as_delta(update: RequestUpdate) -> TokenDelta:
    request = update.request
    delta = TokenDelta(request.request_id, update.token_ids, update.logprobs)
    if request.num_output_tokens <= 1 or request.finish_reason is not None:
        delta.finish_reason, delta.stop_reason, delta.error = request.finish_reason, request.stop_reason, request.error
        delta.prompt_logprobs = update.prompt_logprobs
        delta.num_cached_tokens, delta.num_stored_tokens = request.num_cached_tokens, request.num_stored_tokens
        delta.num_preemptions = request.num_preemptions
        delta.first_scheduled_time = request.first_scheduled_time
        delta.hypotheses = request.hypotheses
        if request.source.reports_progress and request.num_output_tokens <= 1:
            delta.num_computed_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        delta.embedding = update.embedding
    return delta
