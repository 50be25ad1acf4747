"""The compute plane's step: a plan becomes a batch, the batch becomes logits, the logits become tokens.

Owns the order of these and how results find their rows. It changes no request and decides nothing: who computes what is
the plan's, how to sample is the sampler's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.core.plan import RowResult, ScheduledRequest, StepPlan, StepResult
from octavo.errors import RequestFailedError
from octavo.ops.api import Batch, Float32Array
from octavo.runtime.batch import make_batch, num_scored
from octavo.runtime.program import MAX_LOGITS
from octavo.sampling.sampler import Sampler


class Executor(Protocol):
    """Runs the model: ProgramExecutor or EagerExecutor (runtime/program.py)."""

    def run(self, batch: Batch) -> None: ...

    def logits(self, first: int, count: int) -> Float32Array: ...


@dataclass(slots=True, frozen=True)
class _LogitRow:
    """Whose logits a row of the step is, and what for."""

    index: int  # of the request in the plan
    target: int | None  # the prompt token to score; None: sample


class Runner:
    def __init__(self, executor: Executor, sampler: Sampler, block_size: int) -> None:
        self.executor = executor
        self.sampler = sampler
        self.block_size = block_size

    def execute(self, plan: StepPlan) -> StepResult:
        """One RowResult for each scheduled request, in order."""
        batch = make_batch(plan, self.block_size)
        self.executor.run(batch)
        result = StepResult([RowResult() for _ in plan.scheduled])
        wanted = [row for i, scheduled in enumerate(plan.scheduled) for row in _logit_rows(i, scheduled)]
        for first in range(0, len(wanted), MAX_LOGITS):
            chunk = wanted[first : first + MAX_LOGITS]
            self._read_logits(self.executor.logits(first, len(chunk)), chunk, plan, result)
        return result

    def _read_logits(self, logits: Float32Array, chunk: list[_LogitRow], plan: StepPlan, result: StepResult) -> None:
        """Scores and samples the rows of `logits` [len(chunk), vocab], and files what comes of them."""
        scored = [i for i, row in enumerate(chunk) if row.target is not None]
        sampled = [i for i, row in enumerate(chunk) if row.target is None]
        for index in dict.fromkeys(chunk[i].index for i in scored):  # each request has its own number of logprobs
            rows = [i for i in scored if chunk[i].index == index]
            self._score(logits[rows], [chunk[i] for i in rows], plan.scheduled[index], result.rows[index])
        if not sampled:
            return
        if scored:
            logits = np.ascontiguousarray(logits[sampled])
        tokens = self.sampler.sample(logits, [plan.scheduled[chunk[i].index] for i in sampled])
        for i, token in zip(sampled, tokens, strict=True):
            row = result.rows[chunk[i].index]
            row.token_id, row.logprobs, row.error = token.token_id, token.logprobs, row.error or token.error

    def _score(
        self, logits: Float32Array, rows: list[_LogitRow], scheduled: ScheduledRequest, result: RowResult
    ) -> None:
        source = scheduled.request.source
        assert source.params.prompt_logprobs is not None
        targets = [row.target for row in rows if row.target is not None]
        try:
            result.prompt_logprobs += self.sampler.prompt_logprobs(
                logits, targets, source.params.prompt_logprobs, num_vocab_tokens=source.num_vocab_tokens
            )
        except RequestFailedError as error:  # logits that are no numbers: this request's misfortune alone
            result.error = error.message


def _logit_rows(index: int, scheduled: ScheduledRequest) -> list[_LogitRow]:
    """In the order of batch.wanted_rows."""
    tokens, start = scheduled.request.token_ids, scheduled.start
    rows = [_LogitRow(index, tokens[start + i + 1]) for i in range(num_scored(scheduled))]
    return [*rows, _LogitRow(index, None)] if scheduled.samples else rows
