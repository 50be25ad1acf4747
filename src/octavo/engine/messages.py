"""What crosses between a client and the engine: plain records that msgspec encodes as they are. Those of every step are
arrays on the wire, as short as their news."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from octavo.core.picture import Picture as Picture
from octavo.core.store import StoreCounts
from octavo.request import BeamHypothesis, FinishReason, TokenLogprobs


def callers_id(request_id: str) -> str:
    """A caller's name for the request that the engine calls so (`InputProcessor` adds a number to it)."""
    return request_id.rpartition("#")[0] or request_id


class TokenDelta(msgspec.Struct, array_like=True):
    """News of one request after one step: usually one token, and then nothing behind it is set.

    `stop_reason` is the stop token's id where one of `stop_token_ids` ended it (stop strings are found by the front
    end, which sees the text). The counts and `first_scheduled_time` come with the first news and with the last ones;
    `prompt_logprobs` with the first: a prompt longer than one step's budget is complete by then. A beam search has no
    news but its end: `hypotheses`, best first. Nor has an embedding, whose bytes are float32, little-endian.
    `num_computed_tokens` is how much of the prompt is computed, where the request reports it: with the news before its
    first token, which have nothing else, and with that token.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # positions 1 … num_prompt_tokens - 1
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    error: str | None = None
    hypotheses: list[BeamHypothesis] | None = None
    num_computed_tokens: int | None = None
    embedding: bytes | None = None
    num_stored_tokens: int = 0  # of num_cached_tokens, those that were on disk


# Of SchedulerStats: what is so now. All else counts.
GAUGES = frozenset({"num_running", "num_waiting", "kv_cache_usage", "step_tokens"})


class SchedulerStats(msgspec.Struct, array_like=True):
    """A picture of the engine after a step; counters count from its first start, whatever happens to its process."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of blocks in use by live requests, 0 … 1
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    num_preemptions: int = 0
    num_steps: int = 0
    step_tokens: int = 0  # tokens scheduled in the last step
    num_swaps: int = 0  # preemptions that kept what was computed
    external_prefix_cache_queries: int = 0  # tokens not in the KV cache, looked up on disk
    external_prefix_cache_hits: int = 0
    num_restarts: int = 0  # of the engine's process
    store: StoreCounts | None = None  # of the prefix cache's disk tier, where there is one

    def following(self, earlier: SchedulerStats) -> SchedulerStats:
        """This picture, of an engine that has taken another's place: the counters go on from `earlier`."""
        counters = set(self.__struct_fields__) - GAUGES - {"store"}
        sums = {name: getattr(earlier, name) + getattr(self, name) for name in counters}
        store = earlier.store if self.store is None else self.store.following(earlier.store or StoreCounts())
        return replace(self, store=store, **sums)


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
    max_num_seqs: int
    hidden_size: int = 0  # of an embedding
    arithmetic: str = ""  # for people: how the weights are kept and multiplied
    cache_config: dict[str, str] = field(default_factory=dict)  # labels of vllm:cache_config_info
    loading: str = ""  # where the weights come from and what that took, for people


class EngineReply(msgspec.Struct, array_like=True):
    """One message from the engine process to its client: all the news of a step."""

    deltas: list[TokenDelta] = []
    stats: SchedulerStats | None = None
    info: EngineInfo | None = None
    fatal: str | None = None  # the engine cannot start: the message …
    fatal_kind: str | None = None  # … and the name of its class in errors.py
    picture: Picture | None = None  # where the client has asked for one


@dataclass(slots=True)
class AbortRequests:
    request_ids: list[str]


class Named(msgspec.Struct):
    """What there is to know of an EngineRequest of which nothing else can be read."""

    request_id: str


class MessageKind(enum.Enum):
    """The first byte of a message to an engine process; the rest is the body."""

    ADD = b"+"  # an EngineRequest
    ABORT = b"-"  # AbortRequests
    RESET_PREFIX_CACHE = b"0"  # None
    PICTURE = b"?"  # None
    BEAT = b"!"  # nothing; the answer is an empty message, at once
    SHUTDOWN = b"."  # None
