"""The records of a step: StepPlan and StepResult cross between the control plane and the compute plane,
RequestUpdate is what the control plane made of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.request import Request, TokenLogprobs


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: tokens [start, start + num_tokens) of `request.token_ids`.

    `block_table[i]` is the block that holds tokens [i * block_size, (i + 1) * block_size). What is wanted of the share:
    its first `num_scored` tokens each score the prompt token after them; its last one `samples` the next token, if it
    is the last that the request holds.
    """

    request: Request
    start: int
    num_tokens: int
    block_table: array[int]
    samples: bool
    num_scored: int = 0


@dataclass(slots=True)
class StepPlan:
    scheduled: list[ScheduledRequest]
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(row.num_tokens for row in self.scheduled)


@dataclass(slots=True)
class RowResult:
    """What one scheduled request got. `prompt_logprobs` has an entry for each of the `num_scored` tokens, in order."""

    token_id: int | None = None  # None: the row did not sample
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    error: str | None = None  # this row failed alone (NaN logits, an empty mask …)


@dataclass(slots=True)
class StepResult:
    rows: list[RowResult]  # aligned with StepPlan.scheduled


@dataclass(slots=True)
class RequestUpdate:
    """News of one request after a step. Its end, if it ended, stands in `request.finish_reason`."""

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first news only, where the request asked for them
