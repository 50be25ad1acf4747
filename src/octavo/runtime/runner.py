"""The compute plane's step: a plan becomes a batch, the batch becomes logits, the logits become tokens.

Owns the order of these and how results find their rows. It changes no request and decides nothing: who computes what is
the plan's, how to sample is the sampler's.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from octavo.core.plan import RowResult, ScheduledRequest, StepPlan, StepResult
from octavo.errors import RequestFailedError
from octavo.ops.api import Batch, Float32Array
from octavo.runtime.batch import make_batch, wanted_rows
from octavo.runtime.program import MAX_LOGITS
from octavo.sampling.sampler import Sampler


class Executor(Protocol):
    """Runs the model: ProgramExecutor or EagerExecutor (runtime/program.py)."""

    def run(self, batch: Batch) -> None: ...

    def logits(self, first: int, count: int) -> Float32Array: ...


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
        # Logit row i belongs to request owners[i] of the plan.
        owners = [(r, i) for r, row in enumerate(plan.scheduled) for i in wanted_rows(row)]
        for first in range(0, len(owners), MAX_LOGITS):
            chunk = owners[first : first + MAX_LOGITS]
            self._read_logits(self.executor.logits(first, len(chunk)), chunk, plan, result)
        return result

    def _read_logits(
        self, logits: Float32Array, owners: list[tuple[int, int]], plan: StepPlan, result: StepResult
    ) -> None:
        """Scores and samples the rows of `logits` [len(owners), vocab], and files what comes of them."""
        scored: dict[int, list[int]] = {}  # request -> its rows of `logits` that score a prompt token
        sampled: list[int] = []
        for i, (r, token_row) in enumerate(owners):
            scheduled = plan.scheduled[r]
            if scheduled.samples and token_row == scheduled.num_tokens - 1:
                sampled.append(i)
            else:
                scored.setdefault(r, []).append(i)
        for r, rows in scored.items():  # each request has its own number of logprobs
            targets = [plan.scheduled[r].start + owners[i][1] + 1 for i in rows]
            self._score(logits[rows], targets, plan.scheduled[r], result.rows[r])
        if not sampled:
            return
        if scored:
            logits = np.ascontiguousarray(logits[sampled])
        tokens = self.sampler.sample(logits, [plan.scheduled[owners[i][0]] for i in sampled])
        for i, token in zip(sampled, tokens, strict=True):
            row = result.rows[owners[i][0]]
            row.token_id, row.logprobs, row.error = token.token_id, token.logprobs, row.error or token.error

    def _score(self, logits: Float32Array, targets: list[int], scheduled: ScheduledRequest, result: RowResult) -> None:
        """What row i of `logits` says of the prompt token at position targets[i]."""
        source = scheduled.request.source
        assert source.params.prompt_logprobs is not None
        try:
            result.prompt_logprobs += self.sampler.prompt_logprobs(
                logits,
                [source.prompt_token_ids[position] for position in targets],
                source.params.prompt_logprobs,
                num_vocab_tokens=source.num_vocab_tokens,
            )
        except RequestFailedError as error:  # logits that are no numbers: this request's misfortune alone
            result.error = error.message
