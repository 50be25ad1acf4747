"""The words of a request: what a caller asks (SamplingParams), what the engine keeps (Request), what comes back.

A leaf: imported by every layer, imports none of them. It knows no tensors and no text beyond the strings it carries.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from octavo.pooling import PoolingParams

OutputKind = Literal["cumulative", "delta", "final_only"]


class RequestOutputKind:
    """vLLM's names for `SamplingParams.output_kind`."""

    CUMULATIVE: OutputKind = "cumulative"
    DELTA: OutputKind = "delta"
    FINAL_ONLY: OutputKind = "final_only"


INT32_MAX = 2**31 - 1  # token ids and counts cross into the kernels as int32

# Of the fields of SamplingParams that are one number: the least and the largest.
INTEGER_RANGES: Mapping[str, tuple[int, int]] = {
    "n": (1, 128),
    "max_tokens": (0, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
    "seed": (-(2**63), 2**64 - 1),
    "top_k": (-1, INT32_MAX),
    "logprobs": (-1, INT32_MAX),
    "prompt_logprobs": (-1, INT32_MAX),
    "truncate_prompt_tokens": (-1, INT32_MAX),
}
NUMBER_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to sample; vLLM's names, ranges and defaults. `sampling/validate.py` checks every field on construction.

    Counts are in tokens; `seed` None means: drawn at admission and kept for the request's life.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    bad_words: list[str] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = "cumulative"
    truncate_prompt_tokens: int | None = None
    # Written by the front end, never by a caller: `bad_words` as token ids, each with and without a leading blank.
    bad_words_token_ids: list[list[int]] | None = None
    shown_token_ids: list[int] | None = None  # … and special tokens that show whatever skip_special_tokens is

    def __post_init__(self) -> None:
        from octavo.sampling.validate import validate

        validate(self)


@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    """How to search with beams; vLLM's names and defaults, and transformers' meaning.

    A beam's score is the sum of its tokens' logprobs over the number of its tokens to the power of `length_penalty`.
    `early_stopping`: True ends the search when `beam_width` beams have ended; False when no running beam's present
    score could replace one of those; "never" when none could at its best length. `temperature` 0 or 1: the model's own
    distribution. Raises InvalidRequestError for a field out of its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False  # the end token's text, where skip_special_tokens is off

    def __post_init__(self) -> None:
        from octavo.sampling.validate import validate_beams

        validate_beams(self)


@dataclass(slots=True)
class BeamHypothesis:
    """A beam that has ended. `token_ids`: of its output, the end token included."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True)
class EngineRequest:
    """One sample of one prompt on its way into the engine (n > 1 is n of these): all that decides its bytes.

    `seed` is already resolved; sample `sample_index` of it draws its random numbers from (seed, sample_index,
    position). `eos_token_ids` end the request unless `params.ignore_eos`. `request_id` is unique for the engine's life.
    `fork_of` names the sample of the same prompt that computes it for all. With `beams` the request is a beam search,
    and `params` are those of its steps (`BeamSearch` in core/beams.py). With `pooling` it wants an embedding of its
    prompt and no token (`params.max_tokens` is 0).

    `output_token_ids` are what the request has said already, to an engine that is no more: it goes on behind them, with
    the bytes that it would have had. A beam search has none, it begins again.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    sample_index: int = 0
    eos_token_ids: list[int] = field(default_factory=list)
    num_vocab_tokens: int | None = None  # ids from here on have no token: never sampled. None: every row has one
    cache_salt: str | None = None
    priority: int = 0
    user: str | None = None  # whom a fair share counts it to; None: to all who have no name
    arrival_time: float = 0.0  # time.time(), seconds
    fork_of: str | None = None
    beams: BeamSearchParams | None = None
    output_token_ids: list[int] = field(default_factory=list)
    reports_progress: bool = False  # news after each part of its prompt, until it has an output
    pooling: PoolingParams | None = None  # with its pooling_type and normalize decided


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of an EngineRequest. After `Scheduler.add`, only the scheduler and its parts write to it, but
    for the fields that others keep here.

    |<------------------- token_ids: prompt + output ------------------->|
    |<-- num_computed_tokens: KV exists -->|<-- still to be computed ---->|
    """

    source: EngineRequest
    token_ids: array[int]  # 'i': prompt, then output
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # found in the prefix cache at first admission …
    num_stored_tokens: int = 0  # … and of these, those that were on disk
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token's id; stop strings are the front end's
    first_scheduled_time: float | None = None  # time.time(), seconds
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of positions 1 … as far as computed
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as known; the KV manager's
    sampling: object = None  # how it samples, from its first token on; the sampler's
    pooled: object = None  # the sum of its hidden states, as far as computed; runtime/pooling.py's
    forks: list[Request] = field(default_factory=list)  # samples that wait for this one to compute their prompt
    fork_from: Request | None = None  # the one that this one waits for
    awaited: bytes | None = None  # the last block that others are about to compute for it
    is_swapped_out: bool = False
    hypotheses: list[BeamHypothesis] | None = None  # of a beam search, when it is over: best first
    num_search_steps: int = 0  # that it took
    # Of `source`, for those who ask in every step.
    request_id: str = field(init=False)
    params: SamplingParams = field(init=False)
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.source.request_id
        self.params = self.source.params
        self.num_prompt_tokens = len(self.source.prompt_token_ids)

    @classmethod
    def from_source(cls, source: EngineRequest) -> Request:
        return cls(source=source, token_ids=array("i", (*source.prompt_token_ids, *source.output_token_ids)))

    @property
    def num_seats(self) -> int:
        """Rows that it may have in a step."""
        return 1 if self.source.beams is None else self.source.beams.beam_width

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reports_progress(self) -> bool:
        """Its caller hears of parts of the prompt, until the first output token."""
        return self.source.reports_progress and self.num_output_tokens == 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They are given out with the first output token: then the prompt is never scored again."""
        return self.params.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def reads_prefix_cache(self) -> bool:
        """Not where something is wanted of each token of the prompt: it is there only when that token is computed."""
        pooling = self.source.pooling
        return not self.wants_prompt_logprobs and (pooling is None or pooling.pooling_type != "mean")

    @property
    def end_without_output(self) -> FinishReason:
        """Of a request that samples nothing, when its prompt is computed."""
        return FinishReason.LENGTH if self.source.pooling is None else FinishReason.STOP


@dataclass(slots=True)
class TokenLogprobs:
    """Logprobs at one position, as they cross the wire. Entry 0 is the token itself, then the most likely ones in
    order (the token itself again where it is among them). `rank` is the token's rank, 1 = most likely."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(slots=True)
class Logprob:
    """vLLM's entry of a position's dict {token id: Logprob}."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None  # of a beam

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class BeamSearchSequence:
    """A beam that `LLM.beam_search` found. `tokens` are those of prompt and output, `text` is theirs; `score` is
    `cum_logprob`, which sums the output's logprobs, with the length penalty."""

    text: str
    tokens: list[int]
    cum_logprob: float
    score: float
    finish_reason: str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds since the epoch; None until it happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    def note_scheduled(self, when: float) -> None:
        """A sample was first scheduled then."""
        if self.first_scheduled_time is None or when < self.first_scheduled_time:
            self.first_scheduled_time = when


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far a prompt has been computed: `num_computed_tokens`, those of the cache included, `seconds` after its first
    step began."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    seconds: float


@dataclass(slots=True)
class RequestOutput:
    """What `LLM.generate` returns and `AsyncLLM.generate` yields. `prompt_logprobs[0]` is None: nothing precedes it.
    `prompt_progress` is there where it is asked for and new; then `outputs` may have no news."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
    seed: int | None = None
    error: str | None = None  # why a sample ended with the finish reason "error"
    prompt_progress: PromptProgress | None = None
    embedding: bytes | None = None  # float32, little-endian, of a request that wants one
