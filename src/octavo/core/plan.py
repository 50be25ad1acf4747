"""The records of a step: StepPlan and StepResult cross between the control plane and the compute plane,
RequestUpdate is what the control plane made of them.

A plan first moves blocks, then computes. Each transfer was decided on what the ones before it leave behind, so they are
carried out in their order:

    CopyBlock      block ──► block           a shared block is written to, or only begins as wanted
    SaveBlock      block ──► slot            preempted: to the swap space …
    RestoreBlock   slot  ──► block           … and back
    EvictBlock     block ──► store           evicted: to a tier that outlives the pool (if there is one) …
    LoadBlock      payload from it ──► block           … and back
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from octavo.request import Request, TokenLogprobs


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """The first `num_tokens` tokens of a block; what the destination holds behind them is finite and never read."""

    from_block: int
    to_block: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SaveBlock:
    block_id: int
    slot: int


@dataclass(frozen=True, slots=True)
class RestoreBlock:
    slot: int
    block_id: int


@dataclass(frozen=True, slots=True)
class EvictBlock:
    block_id: int
    content_hash: bytes


@dataclass(frozen=True, slots=True)
class LoadBlock:
    payload: bytes | memoryview  # what the store gave
    block_id: int


Transfer: TypeAlias = CopyBlock | SaveBlock | RestoreBlock | EvictBlock | LoadBlock


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: tokens [start, start + num_tokens) of `request.token_ids`.

    `block_table[i]` is the block that holds tokens [i * block_size, (i + 1) * block_size). What is wanted of the share:
    its first `num_scored` tokens each score the prompt token after them; its last one `samples` the next token, if it
    is the last that the request holds. `forks` sample theirs from the same logits: they begin as copies of the request.
    """

    request: Request
    start: int
    num_tokens: int
    block_table: array[int]
    samples: bool
    num_scored: int = 0
    forks: Sequence[Request] = ()

    @property
    def sampling(self) -> Sequence[Request]:
        """Who samples from the row's logits, in order."""
        return (self.request, *self.forks) if self.samples else ()


@dataclass(slots=True)
class StepPlan:
    """One step's work, until its results are taken in: the next plan may be this one, moved on (steady.py)."""

    scheduled: list[ScheduledRequest]
    preempted: list[Request] = field(default_factory=list)
    outgrown: list[Request] = field(default_factory=list)  # ended: alone they need more than the whole pool
    transfers: list[Transfer] = field(default_factory=list)
    num_scheduled_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_scheduled_tokens = sum(row.num_tokens for row in self.scheduled)

    def add(self, row: ScheduledRequest) -> None:
        self.scheduled.append(row)
        self.num_scheduled_tokens += row.num_tokens


@dataclass(slots=True)
class RowResult:
    """What one scheduled request got. `prompt_logprobs` has an entry for each of the `num_scored` tokens, in order."""

    token_id: int | None = None  # None: the row did not sample
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    error: str | None = None  # this row failed alone (NaN logits, an empty mask …)
    embedding: bytes | None = None  # float32, little-endian; with the last token of a prompt that wants one
    forks: Sequence[RowResult] = ()  # of ScheduledRequest.forks, in order


@dataclass(slots=True)
class StepResult:
    rows: list[RowResult]  # aligned with StepPlan.scheduled
    failed: bool = False  # the step itself: no transfer of its plan can be relied on
    transfer_seconds: float = 0.0
    compute_seconds: float = 0.0


@dataclass(slots=True)
class RequestUpdate:
    """News of one request after a step. Its end, if it ended, stands in `request.finish_reason`."""

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first news only, where the request asked for them
    embedding: bytes | None = None  # with the last news of a request that wants one
