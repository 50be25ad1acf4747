"""What crosses between a client and the engine: plain records that msgspec encodes as they are."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from octavo.config import EngineConfig
from octavo.request import FinishReason, TokenLogprobs


@dataclass(slots=True)
class TokenDelta:
    """News of one request after one step: usually one token.

    `stop_reason` is the stop token's id where one of `stop_token_ids` ended it (stop strings are found by the front
    end, which sees the text). `num_cached_tokens` and `prompt_logprobs` come with the first delta that has a token;
    a prompt longer than one step's budget is complete by then.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # positions 1 … num_prompt_tokens - 1
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    error: str | None = None


@dataclass(slots=True)
class SchedulerStats:
    """A picture of the engine after a step; counters count from the engine's start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of blocks in use by live requests, 0 … 1
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    num_preemptions: int = 0
    num_steps: int = 0
    step_tokens: int = 0  # tokens scheduled in the last step


@dataclass(slots=True)
class EngineInfo:
    """What the front end needs to know of a started engine."""

    max_model_len: int
    vocab_size: int  # rows of the output matrix
    block_size: int
    num_blocks: int
    dtype: str
    isa: str
    num_threads: int
    memory_plan: str  # the one line printed at start
    cache_config: dict[str, str] = field(default_factory=dict)  # labels of vllm:cache_config_info


@dataclass(slots=True)
class EngineReply:
    """One message from the engine process to its client."""

    deltas: list[TokenDelta] = field(default_factory=list)
    stats: SchedulerStats | None = None
    info: EngineInfo | None = None
    fatal: str | None = None  # the engine cannot start: the message …
    fatal_kind: str | None = None  # … and the name of its class in errors.py


@dataclass(slots=True)
class AbortRequests:
    request_ids: list[str]


class MessageKind(enum.Enum):
    """The first frame of a message to an engine process; the second is the body."""

    ADD = b"+"  # an EngineRequest
    ABORT = b"-"  # AbortRequests
    SHUTDOWN = b"."  # None


@dataclass(slots=True)
class StartLine:
    """What a client writes to its engine process's stdin: one line of JSON."""

    address: str  # the client listens here
    config: EngineConfig
