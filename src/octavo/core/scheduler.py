"""Who computes how many tokens in each step, and what a step's result does to the requests.

Owns the requests from `add` to their end, the waiting queue and the running set. Only this file changes a Request
(its block hashes apart, which are the KV manager's).
Knows nothing of block ids (kv_manager.py), of who goes first (policy.py), of tensors and text.

There is no prefill and no decode. Each step hands out a budget of tokens so that `num_computed_tokens` catches up with
`num_tokens`; the row that catches up samples one more:

    token_ids    |<---------------- prompt ---------------->|<-- output -->|
                 |<- num_computed_tokens ->|<- this step ->|<--- later --->|
                 0                       start    start + num_tokens   num_tokens

    a chunk of a prompt     start + num_tokens < num_tokens of the request: nothing sampled yet
    a decode                num_computed_tokens = num_tokens - 1
    after a prefix hit      num_computed_tokens starts at the cached tokens
    after a preemption      num_computed_tokens is 0 again, the output stays: it is computed like a prompt
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable

from octavo.core.kv_manager import KVManager
from octavo.core.plan import RequestUpdate, RowResult, ScheduledRequest, StepPlan, StepResult
from octavo.core.policy import Policy
from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.request import FinishReason, Request, RequestStatus

# Prompt tokens of a step that several prompts share. Their ends come one after the other then, and the mean first token
# sooner, where one large step would give all of them last. Fewer would cost more than they gain: each step reads all
# weights.
MAX_SHARED_TOKENS = 1024


class Scheduler:
    def __init__(
        self,
        kv: KVManager,
        policy: Policy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.long_prefill_token_threshold = long_prefill_token_threshold
        # The pool's last token can still sample one more, which will never be computed.
        self.max_request_tokens = min(max_model_len, kv.max_tokens + 1)
        self.waiting: list[Request] = []  # in the policy's order
        self.running: list[Request] = []  # in the policy's order
        self.num_preemptions = 0
        self.num_steps = 0
        self.step_tokens = 0  # tokens scheduled in the last step
        self._requests: dict[str, Request] = {}  # by request_id: waiting and running

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    # ── Requests come and go ─────────────────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> None:
        """Queue a request. InvalidRequestError where it could never run, with the numbers."""
        num_prompt_tokens = request.num_prompt_tokens
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use", param="request_id")
        if num_prompt_tokens == 0:
            raise InvalidRequestError("prompt has no tokens; at least 1 is needed", param="prompt")
        num_needed = num_prompt_tokens + (0 if request.params.max_tokens == 0 else 1)
        if num_needed > self.max_model_len:
            raise ContextLengthError(
                f"prompt has {num_prompt_tokens} tokens and needs {num_needed} with its output; "
                f"max_model_len is {self.max_model_len}",
                param="prompt",
            )
        if num_prompt_tokens > self.kv.max_tokens:
            raise InvalidRequestError(
                f"prompt has {num_prompt_tokens} tokens, but the whole KV cache holds {self.kv.max_tokens} "
                f"({self.kv.pool.num_blocks} blocks of {self.kv.block_size})",
                param="prompt",
            )
        self._requests[request.request_id] = request
        self.policy.arrive(request)
        self._insert(self.waiting, request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """End these requests, wherever they are, and give their blocks back; unknown and finished ids are ignored."""
        aborted = [self._requests[i] for i in dict.fromkeys(request_ids) if i in self._requests]
        for request in aborted:
            self._finish(request, FinishReason.ABORT)
        return aborted

    # ── Before the step ──────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> StepPlan:
        """The next step's work. It is empty only when no request is unfinished."""
        plan = StepPlan(scheduled=[])
        budget = self._schedule_running(plan, self.max_num_batched_tokens)
        if not plan.preempted:  # blocks are short: whoever came now would be the next victim
            self._schedule_waiting(plan, budget)
        self.num_steps += 1
        self.step_tokens = plan.num_scheduled_tokens
        return plan

    def _schedule_running(self, plan: StepPlan, budget: int) -> int:
        """Decodes first, one token each, so that no stream stalls behind a prompt. Returns what is left of `budget`."""
        unscheduled = deque(request for request in self.running if request.num_left == 1)
        num_decodes = len(unscheduled)
        unscheduled.extend(request for request in self.running if request.num_left > 1)
        num_seats = self.max_num_seqs - len(self.running)
        if len(unscheduled) - num_decodes + min(num_seats, len(self.waiting)) > 1:
            budget = min(budget, num_decodes + MAX_SHARED_TOKENS)
        while unscheduled and budget > 0:
            request = unscheduled[0]
            if self._make_room(request, unscheduled, plan):
                unscheduled.popleft()
                budget -= self._schedule(request, budget, bool(unscheduled) or self._may_admit(), plan)
        return budget

    def _schedule_waiting(self, plan: StepPlan, budget: int) -> None:
        """Admit whoever fits, strictly in the policy's order: a small request does not starve a big one."""
        while self._may_admit() and budget > 0:
            request = self.waiting[0]
            cached = self.kv.lookup(request)
            # All blocks for what a request holds, and a spare one for every request already running: so a prompt never
            # stops halfway for want of blocks, and who was preempted does not come back only to be preempted again.
            if not self.kv.admit(request, cached, num_spare_blocks=len(self.running)):
                return
            del self.waiting[0]
            self._start(request, num_cached_tokens=len(cached) * self.kv.block_size)
            budget -= self._schedule(request, budget, self._may_admit(), plan)

    def _may_admit(self) -> bool:
        return bool(self.waiting) and len(self.running) < self.max_num_seqs

    def _start(self, request: Request, num_cached_tokens: int) -> None:
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached_tokens
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.time()
            request.num_cached_tokens = num_cached_tokens
            self.policy.start(request)
        self._insert(self.running, request)

    def _insert(self, queue: list[Request], request: Request) -> None:
        """Where the policy's order puts it, behind its equals."""
        queue.insert(bisect_right(queue, self.policy.order(request), key=self.policy.order), request)

    def _schedule(self, request: Request, budget: int, others_wait: bool, plan: StepPlan) -> int:
        """Put the request into the plan with as much of `budget` as it may have. Returns how much that is."""
        start, num_tokens = request.num_computed_tokens, request.num_left
        if others_wait and self.long_prefill_token_threshold:
            budget = min(budget, self.long_prefill_token_threshold)
        elif others_wait and num_tokens > budget:
            # Half of what is left, so that a short request overtakes any number of long ones; and no crumbs.
            budget = min(budget, max(budget // 2, self.kv.block_size))
        samples = num_tokens <= budget and request.params.max_tokens != 0  # 0: only the prompt is wanted
        num_tokens = min(num_tokens, budget)
        row = ScheduledRequest(request, start, num_tokens, self.kv.block_table(request), samples)
        if request.wants_prompt_logprobs:
            row.num_scored = min(start + num_tokens, request.num_prompt_tokens - 1) - start
        plan.scheduled.append(row)
        return num_tokens

    def _make_room(self, request: Request, unscheduled: deque[Request], plan: StepPlan) -> bool:
        """Blocks for all tokens of a running request. Where there are too few, some of `unscheduled`, to which it
        belongs, are preempted and leave that queue. False if the request had to give way itself."""
        while not self.kv.allocate(request, request.num_tokens):
            victim = self.policy.victim(unscheduled)
            unscheduled.remove(victim)
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Take the blocks away. The request waits before its equals, keeps its output, and is computed again."""
        self.kv.free(request)
        self.running.remove(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.insert(bisect_left(self.waiting, self.policy.order(request), key=self.policy.order), request)

    # ── After the step ───────────────────────────────────────────────────────────────────────────────────────────

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take in what was computed: one update for each request that has a new token or has ended."""
        updates = []
        for row, outcome in zip(plan.scheduled, result.rows, strict=True):
            if row.request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran: its blocks are free, its token is nobody's
            update = self._update_request(row, outcome)
            if update is not None:
                updates.append(update)
        return updates

    def _update_request(self, row: ScheduledRequest, outcome: RowResult) -> RequestUpdate | None:
        request = row.request
        if outcome.error is not None:  # nothing it computed in this step becomes known to others
            self._finish(request, FinishReason.ERROR, error=outcome.error)
            return RequestUpdate(request, [])
        request.num_computed_tokens = row.start + row.num_tokens
        self.kv.publish(request)
        prompt_logprobs = None
        if request.wants_prompt_logprobs:
            prompt_logprobs = request.prompt_logprobs
            # Entry i is position i + 1: a chunk that is computed again after a preemption replaces its own.
            prompt_logprobs[row.start :] = outcome.prompt_logprobs
        if request.num_left > 0:
            return None
        token_id = outcome.token_id
        if not row.samples:
            self._finish(request, FinishReason.LENGTH)
            return RequestUpdate(request, [], None, prompt_logprobs)
        assert token_id is not None, f"request {request.request_id}: a row that samples has a token"
        request.token_ids.append(token_id)
        self._finish_if_due(request, token_id)
        return RequestUpdate(
            request, [token_id], None if outcome.logprobs is None else [outcome.logprobs], prompt_logprobs
        )

    def _finish_if_due(self, request: Request, token_id: int) -> None:
        """End the request if its newest token does. Stop beats length on the same token."""
        params, num_output_tokens = request.params, request.num_output_tokens
        may_stop = num_output_tokens >= params.min_tokens
        if may_stop and not params.ignore_eos and token_id in request.source.eos_token_ids:
            self._finish(request, FinishReason.STOP)
        elif may_stop and params.stop_token_ids and token_id in params.stop_token_ids:
            self._finish(request, FinishReason.STOP, stop_reason=token_id)
        elif num_output_tokens == params.max_tokens or request.num_tokens == self.max_request_tokens:
            self._finish(request, FinishReason.LENGTH)

    def _finish(
        self, request: Request, reason: FinishReason, *, stop_reason: int | None = None, error: str | None = None
    ) -> None:
        self.kv.free(request)
        (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason, request.error = reason, stop_reason, error
        self.policy.finish(request)

    def check_integrity(self) -> None:
        """AssertionError unless queues, statuses and blocks agree."""
        self.kv.check_integrity()
        assert all(r.status is RequestStatus.RUNNING for r in self.running), "a request that runs has another status"
        assert not any(r.status in (RequestStatus.RUNNING, RequestStatus.FINISHED) for r in self.waiting)
        assert len(self.running) + len(self.waiting) == len(self._requests), "a request is in no queue, or in two"
        assert self.running or self.kv.pool.num_used == 0, "blocks are in use, but nothing runs"
