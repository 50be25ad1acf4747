"""The compute plane's step: blocks move, a plan becomes a batch, the batch becomes logits, the logits become tokens.

Owns the order of these and how results find their rows. It changes no request and decides nothing: who computes what is
the plan's, how to sample is the sampler's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from octavo.checkpoint.packed_cache import MatrixStore, NoStore
from octavo.core.plan import EvictBlock, RowResult, ScheduledRequest, StepPlan, StepResult
from octavo.errors import RequestFailedError
from octavo.request import Request
from octavo.runtime.kv_cache import KVStorage
from octavo.runtime.pooling import pool
from octavo.runtime.program import MAX_LOGITS
from octavo.sampling.feature import SamplerRow
from octavo.sampling.sampler import Drawn, Sampler, as_results


class Executor(Protocol):
    """Runs the model: ProgramExecutor or EagerExecutor (runtime/program.py)."""

    def batch(self, plan: StepPlan) -> Any:
        """`make_batch` of the plan, in the executor's own form."""

    def run(self, batch: Any, rows: Sequence[SamplerRow] = ()) -> Drawn:
        """Compute the batch, and sample the first len(rows) of its logit rows."""

    def logits(self, first: int, count: int) -> Any:
        """float32 [count, vocab] of the batch's logit rows [first, first + count), at most MAX_LOGITS. The next call
        may overwrite them."""

    def final_states(self, rows: Any) -> Any:
        """int32 [n] -> float32 [n, hidden]: the hidden states of these token rows of the batch, after the last norm."""


class Runner:
    def __init__(
        self, executor: Executor, sampler: Sampler, storage: KVStorage, weights: MatrixStore | None = None
    ) -> None:
        """`weights`: what still has them to keep for the next start."""
        self.executor = executor
        self.sampler = sampler
        self.storage = storage
        self.weights = weights or NoStore()

    def execute(self, plan: StepPlan) -> StepResult:
        """One RowResult for each scheduled request, in order."""
        start = time.perf_counter()
        self.storage.carry_out(plan.transfers)
        moved = time.perf_counter()
        result = StepResult(self._compute(plan) if plan.scheduled else [])
        result.transfer_seconds, result.compute_seconds = moved - start, time.perf_counter() - moved
        return result

    def close(self, evictions: Sequence[EvictBlock]) -> None:
        self.storage.close(evictions)
        self.weights.close()

    def _compute(self, plan: StepPlan) -> list[RowResult]:
        batch = self.executor.batch(plan)
        # Its logit rows: one for each request that samples, then those that score prompts.
        sampling: list[Request] = []
        is_plain = True  # one token for each row, and nothing else
        for row in plan.scheduled:
            if row.samples and not row.forks:
                sampling.append(row.request)
            else:
                sampling += row.sampling
                is_plain = False
            is_plain = is_plain and not row.num_scored
        sampled = as_results(self.executor.run(batch, self.sampler.rows(sampling)))
        if is_plain:
            return sampled
        tokens = iter(sampled)
        results = []
        for scheduled in plan.scheduled:
            result = next(tokens) if scheduled.samples else RowResult()
            if scheduled.forks:
                result.forks = [next(tokens) for _ in scheduled.forks]
            results.append(result)
        first = len(sampling)
        for scheduled, result in zip(plan.scheduled, results, strict=True):
            if scheduled.num_scored:
                self._score(first, scheduled, result)
                first += scheduled.num_scored
        pool(self.executor.final_states, plan.scheduled, results)
        return results

    def _score(self, first: int, scheduled: ScheduledRequest, result: RowResult) -> None:
        """What the logit rows from `first` on say of the request's prompt: that of position p of the token at p + 1."""
        source, start = scheduled.request.source, scheduled.start + 1
        assert source.params.prompt_logprobs is not None
        scores = []
        for offset in range(0, scheduled.num_scored, MAX_LOGITS):
            targets = source.prompt_token_ids[start + offset : start + min(offset + MAX_LOGITS, scheduled.num_scored)]
            logits = self.executor.logits(first + offset, len(targets))
            try:
                scores += self.sampler.prompt_logprobs(
                    logits, targets, source.params.prompt_logprobs, num_vocab_tokens=source.num_vocab_tokens
                )
            except RequestFailedError as error:  # logits that are no numbers: this request's misfortune alone
                result.error = result.error or error.message
                return
        result.prompt_logprobs = scores
