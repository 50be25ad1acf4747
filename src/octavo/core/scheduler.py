"""Who computes how many tokens in each step, and what a step's result does to the requests.

Owns the requests from `add` to their end. Only this file and its parts change a Request (its block hashes apart, which
are the KV manager's): queues.py where it stands, rows.py and beam_group.py what its rows have computed.
Knows nothing of block ids (kv_manager.py), of who goes first (policy.py), of tensors and text.

There is no prefill and no decode. Each step hands out a budget of tokens so that `num_computed_tokens` catches up with
`num_tokens`; the row that catches up samples one more:

    token_ids    |<---------------- prompt ---------------->|<-- output -->|
                 |<- num_computed_tokens ->|<- this step ->|<--- later --->|
                 0                       start    start + num_tokens   num_tokens

    a chunk of a prompt     start + num_tokens < num_tokens of the request: nothing sampled yet
    a decode                num_computed_tokens = num_tokens - 1
    after a prefix hit      num_computed_tokens starts at the cached tokens
    after a preemption      num_computed_tokens is 0 again, the output stays: it is computed like a prompt; or, swapped
                            out and in, it is what it was

Most requests are one row of a step. Further samples of a prompt wait for the first to compute it, and fork from its
row; a beam search is one request with a row for each beam (beam_group.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from octavo.core.admission import check_size
from octavo.core.ends import due_end
from octavo.core.kv_manager import KVManager, Prefix
from octavo.core.plan import RequestUpdate, RowResult, ScheduledRequest, StepPlan, StepResult
from octavo.core.policy import Policy
from octavo.core.preemption import Preemption, Recompute
from octavo.core.queues import Queues
from octavo.core.rows import Rows
from octavo.core.steady import is_steady, move_on
from octavo.errors import InvalidRequestError
from octavo.request import FinishReason, Request, RequestStatus, TokenLogprobs

# Prompt tokens of a step that several prompts share. Their ends come one after the other then, and the mean first token
# sooner, where one large step would give all of them last. A token of a step of 512 costs no more than of a larger one,
# of half as many a fifth more. The price: streams that run meanwhile pause more often.
MAX_SHARED_TOKENS = 512


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
        preemption: Preemption | None = None,
    ) -> None:
        self.kv = kv
        self.preemption = preemption or Recompute()
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.long_prefill_token_threshold = long_prefill_token_threshold
        # The pool's last token can still sample one more, which will never be computed.
        self.max_request_tokens = min(max_model_len, kv.max_tokens + 1)
        self.queues = Queues(policy, max_num_seqs)
        self.rows = Rows(kv)
        self.num_preemptions = 0
        self.num_swaps = 0  # preemptions that kept what was computed
        self.num_steps = 0
        self.step_tokens = 0  # tokens scheduled in the last step
        self._requests: dict[str, Request] = {}  # by request_id: waiting and running
        self._steady_plan: StepPlan | None = None  # the last step's, where the next one can be the same

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def waiting(self) -> Sequence[Request]:
        return self.queues.waiting

    @property
    def running(self) -> Sequence[Request]:
        return self.queues.running

    # ── Requests come and go ─────────────────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> None:
        """Queue a request. InvalidRequestError where it could never run, with the numbers."""
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use", param="request_id")
        check_size(request, self.kv, max_model_len=self.max_model_len, max_num_seqs=self.queues.max_num_seqs)
        first = self._requests.get(request.source.fork_of or "")
        if first is not None and first.num_output_tokens == request.num_output_tokens == 0:
            first.forks.append(request)
            request.fork_from = first
        self._requests[request.request_id] = request
        self.rows.add(request, self.max_request_tokens - request.num_prompt_tokens)
        self.queues.policy.arrive(request)
        self.queues.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """End these requests, wherever they are, and give their blocks back; unknown and finished ids are ignored."""
        aborted = [self._requests[i] for i in dict.fromkeys(request_ids) if i in self._requests]
        for request in aborted:
            self._finish(request, FinishReason.ABORT)
        return aborted

    # ── Before the step ──────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> StepPlan:
        """The next step's work. Nothing is scheduled only when no request is unfinished, or when the last one of them
        has just outgrown the pool."""
        plan, self._steady_plan = self._steady_plan, None
        if plan is None or self.queues.may_admit or not move_on(plan, self.kv):
            plan = self._make_plan()
        plan.transfers = self.kv.take_transfers()
        self.num_steps += 1
        self.step_tokens = plan.num_scheduled_tokens
        return plan

    def _make_plan(self) -> StepPlan:
        plan = StepPlan([])
        budget = self._schedule_running(plan, self.max_num_batched_tokens)
        # Where blocks are short, whoever came now would be the next victim.
        if self.queues.may_admit and not plan.preempted:
            self._schedule_waiting(plan, budget)
        return plan

    def _schedule_running(self, plan: StepPlan, budget: int) -> int:
        """Decodes first, one token each, so that no stream stalls behind a prompt. Returns what is left of `budget`.

        Beams that are computed again take what decodes leave, but choose before them: they still need blocks, and
        would wait for ever if younger requests had always taken them.
        """
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in self.running:
            (decodes if self.rows.are_decodes(request) else prompts).append(request)
        if len(prompts) + self.queues.count_seekers(at_most=2) > 1:
            budget = min(budget, len(decodes) + MAX_SHARED_TOKENS)
        rebuilt = [request for request in prompts if self.rows.are_rebuilt(request)]
        unscheduled = deque([*rebuilt, *decodes, *(request for request in prompts if request not in rebuilt)])
        while unscheduled and budget > 0:
            request = unscheduled[0]
            rows = self.rows.pending(request)
            if self._make_room(request, rows, unscheduled, plan):
                unscheduled.popleft()
                share = max(1, budget - len(decodes)) if request in rebuilt else budget
                budget -= self._schedule(rows, share, bool(unscheduled) or self.queues.may_admit, plan)
        return budget

    def _schedule_waiting(self, plan: StepPlan, budget: int) -> None:
        """Admit whoever fits, strictly in the policy's order: a small request does not starve a big one. Passed over
        are only those for whom a running request is at work."""
        for request in tuple(self.waiting):
            if budget <= 0 or not self.queues.has_seats(request):
                return
            if request.fork_from is not None or request.status is RequestStatus.RUNNING:  # it waits for, or has joined
                continue
            if request.awaited is not None and self.kv.is_in_progress(request.awaited):
                continue
            if request.is_swapped_out:
                is_admitted = self._swap_in(request)
            else:
                row = self.rows.all(request)[0]
                prefix = self.kv.lookup(row)
                # Not for little: the others may take longer than it would itself.
                waits = 2 * prefix.num_in_progress > row.num_tokens - prefix.num_tokens
                request.awaited = prefix.awaited if waits else None
                if waits:
                    continue
                is_admitted = self._admit(request, row, prefix)
            if not is_admitted:
                if self.running or not request.is_swapped_out:
                    return
                self._cut_short(request, plan)  # the whole pool is too small for it
                continue
            self.queues.start(request)
            budget -= self._schedule(self.rows.pending(request), budget, self.queues.may_admit, plan)

    def _admit(self, request: Request, row: Request, prefix: Prefix) -> bool:
        # All blocks for what a request holds, and some spare ones: so a prompt never stops halfway for want of blocks,
        # and who was preempted does not come back only to be preempted again.
        num_spare_blocks = self.kv.num_spare_blocks(self.queues.num_seats_taken)
        num_cached_tokens = self.kv.admit(row, prefix, num_spare_blocks)
        if num_cached_tokens is None:
            return False
        row.num_computed_tokens = num_cached_tokens
        if request.first_scheduled_time is None:
            request.num_cached_tokens, request.num_stored_tokens = num_cached_tokens, prefix.num_stored_tokens
        return True

    def _swap_in(self, request: Request) -> bool:
        rows = [row for row in self.rows.all(request) if row in self.kv.swap]
        if not self.kv.swap_in(rows, self.kv.num_spare_blocks(self.queues.num_seats_taken)):
            return False
        request.is_swapped_out = False
        return True

    def _schedule(self, rows: Sequence[Request], budget: int, others_wait: bool, plan: StepPlan) -> int:
        """Put a request's rows into the plan with as much of `budget` as they may have. Returns how much that is."""
        left = budget
        for row in rows:
            if left > 0:
                left -= self._schedule_row(row, left, others_wait, plan)
        return budget - left

    def _schedule_row(self, request: Request, budget: int, others_wait: bool, plan: StepPlan) -> int:
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
        if samples and request.forks:
            row.forks = self._start_forks(request)
        plan.add(row)
        return num_tokens

    def _start_forks(self, first: Request) -> list[Request]:
        """The samples that wait for this one join it, as far as there are seats; the others will find its blocks."""
        started = []
        for request in first.forks:
            request.fork_from = None
            if self.queues.has_seats(request):
                self.kv.fork(first, request, first.num_tokens)
                request.num_cached_tokens = first.num_cached_tokens
                self.queues.start(request)
                started.append(request)
        first.forks.clear()
        return started

    def _make_room(
        self, request: Request, rows: Sequence[Request], unscheduled: deque[Request], plan: StepPlan
    ) -> bool:
        """Blocks for all tokens of a running request. Where there are too few, some of `unscheduled`, to which it
        belongs, are preempted and leave that queue. False if the request had to give way itself."""
        while not self._allocate(rows):
            victim = self.queues.policy.victim(unscheduled)
            unscheduled.remove(victim)
            if len(self.running) == 1:  # beams that have outgrown the pool
                self._cut_short(victim, plan)
            else:
                self._preempt(victim)
                plan.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _allocate(self, rows: Sequence[Request]) -> bool:
        for row in rows:  # noqa: SIM110  # a generator would cost more than the work
            if not self.kv.allocate(row, len(row.token_ids)):
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Take the blocks away. The request waits before its equals, keeps its output, and what it has computed is
        swapped out, or computed again."""
        rows = self.rows.with_blocks(request)
        num_tokens = sum(row.num_computed_tokens for row in rows)
        num_blocks = sum(len(self.kv.block_table(row)) for row in rows)
        is_whole = len(rows) == len(self.rows.all(request))  # else its beams are just being computed again
        request.is_swapped_out = is_whole and self.preemption.swaps(num_tokens, num_blocks) and self.kv.swap_out(rows)
        if request.is_swapped_out:
            self.num_swaps += 1
        else:
            for row in rows:
                self.kv.free(row, publish_tail=True)
            self.rows.forget_computed(request)
        self.queues.put_back(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _cut_short(self, request: Request, plan: StepPlan) -> None:
        if request.source.beams is not None:
            self.rows.group(request).search.cut_short()
        self._finish(request, FinishReason.LENGTH)
        plan.outgrown.append(request)

    # ── After the step ───────────────────────────────────────────────────────────────────────────────────────────

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take in what was computed: an update for each request with a new token, an end, or progress to report."""
        self.preemption.observe(plan, result)
        if result.failed:
            self._forget_swaps(plan)
        updates = [RequestUpdate(request, []) for request in plan.outgrown]
        for row, outcome in zip(plan.scheduled, result.rows, strict=True):
            # A row without blocks ended while the step ran, or with an earlier row: its token is nobody's.
            if self.kv.holds_blocks(row.request):
                update = self._update_row(row, outcome)
                if update is not None:
                    updates.append(update)
            if row.forks:
                for fork, forked in zip(row.forks, outcome.forks, strict=True):
                    if self.kv.holds_blocks(fork):
                        updates.append(self._update_fork(fork, row, forked))
        self._steady_plan = plan if is_steady(plan, updates, self.running) else None
        return updates

    def _forget_swaps(self, plan: StepPlan) -> None:
        """Nothing was saved: who was swapped out has to compute again."""
        for request in plan.preempted:
            if request.is_swapped_out:
                self.kv.swap.release(self.rows.all(request))
                request.is_swapped_out = False
                self.rows.forget_computed(request)

    def _update_row(self, row: ScheduledRequest, outcome: RowResult) -> RequestUpdate | None:
        request = row.request
        if request.source.beams is not None:
            return self._update_beam(self._requests[request.request_id], row, outcome)
        if outcome.error is not None:  # nothing it computed in this step becomes known to others
            return self._fail(request, outcome.error)
        prompt_logprobs = None
        if request.wants_prompt_logprobs:
            prompt_logprobs = request.prompt_logprobs
            # Entry i is position i + 1: a chunk that is computed again after a preemption replaces its own.
            prompt_logprobs[row.start :] = outcome.prompt_logprobs
        self._note_computed(request, row)
        if row.samples:
            return self._take_token(request, outcome, prompt_logprobs)
        if request.num_left > 0:
            return RequestUpdate(request, []) if request.reports_progress else None
        self._finish(request, request.end_without_output)
        return RequestUpdate(request, [], None, prompt_logprobs, outcome.embedding)

    def _update_fork(self, request: Request, row: ScheduledRequest, outcome: RowResult) -> RequestUpdate:
        if outcome.error is not None:
            return self._fail(request, outcome.error)
        self._note_computed(request, row)
        return self._take_token(request, outcome)

    def _fail(self, request: Request, error: str) -> RequestUpdate:
        self._finish(request, FinishReason.ERROR, error=error)
        return RequestUpdate(request, [])

    def _take_token(
        self, request: Request, outcome: RowResult, prompt_logprobs: list[TokenLogprobs] | None = None
    ) -> RequestUpdate:
        token_id = outcome.token_id
        assert token_id is not None, f"request {request.request_id}: a row that samples has a token"
        request.token_ids.append(token_id)
        end = due_end(request, token_id, self.max_request_tokens)
        if end is not None:
            self._finish(request, end.reason, stop_reason=end.stop_token_id)
        logprobs = None if outcome.logprobs is None else [outcome.logprobs]
        return RequestUpdate(request, [token_id], logprobs, prompt_logprobs)

    def _update_beam(self, request: Request, row: ScheduledRequest, outcome: RowResult) -> RequestUpdate | None:
        if outcome.error is not None:
            return self._fail(request, outcome.error)
        group = self.rows.group(request)
        self._note_computed(row.request, row)
        if row.samples:
            assert outcome.logprobs is not None, "a beam's row has its likeliest tokens"
            group.take(row.request, outcome.logprobs)
        if not group.is_complete or group.advance(self.kv):
            return None
        self._finish(request, FinishReason.STOP)
        return RequestUpdate(request, [])

    def _note_computed(self, request: Request, row: ScheduledRequest) -> None:
        request.num_computed_tokens = row.start + row.num_tokens
        self.kv.publish(request)

    def _finish(
        self, request: Request, reason: FinishReason, *, stop_reason: int | None = None, error: str | None = None
    ) -> None:
        for row in self.rows.all(request):
            self.kv.free(row, publish_tail=reason is not FinishReason.ERROR)
        if request.source.beams is not None:
            search = self.rows.group(request).search
            request.hypotheses, request.num_search_steps = search.finished, search.num_steps
        for fork in request.forks:  # they go their own way
            fork.fork_from = None
        request.forks.clear()
        if request.fork_from is not None:
            request.fork_from.forks.remove(request)
        self.rows.remove(request)
        self.queues.remove(request)
        self._steady_plan = None  # it may be in it
        del self._requests[request.request_id]
        request.is_swapped_out = False
        request.finish_reason, request.stop_reason, request.error = reason, stop_reason, error
        self.queues.policy.finish(request)

    def check_integrity(self) -> None:
        """AssertionError unless queues, statuses and blocks agree."""
        self.kv.check_integrity()
        self.queues.check_integrity()
        assert len(self.running) + len(self.waiting) == len(self._requests), "a request is in no queue, or in two"
        assert self.running or self.kv.pool.num_used == 0, "blocks are in use, but nothing runs"
