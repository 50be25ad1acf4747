"""From what a caller gives (a prompt and SamplingParams) to what the engine takes (EngineRequests).

Owns tokenising, every check that needs the model, the resolution of open values (seed, max_tokens, bad words as token
ids) and the fan-out of n. It knows no text after the prompt and no engine beyond its EngineInfo.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from octavo.core.beams import num_candidates
from octavo.engine.pooling import PoolingDefaults, decided, no_output
from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.pooling import PoolingParams
from octavo.request import BeamSearchParams, EngineRequest, OutputKind, SamplingParams
from octavo.sampling.validate import validate_for_model

if TYPE_CHECKING:
    from octavo.engine.messages import EngineInfo
    from octavo.text.tokenizer import Tokenizer

# A text, token ids, or a dict: the text under "prompt", or the ids under "prompt_token_ids" (then "prompt" is only the
# text that the output shows), and a "cache_salt" if wanted.
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]

CallsTools: TypeAlias = Callable[[str], bool]  # whether a whole text calls tools

SEED_BITS = 53  # what a JSON number carries exactly, so that a reported seed can be sent back


def random_seed() -> int:
    return secrets.randbits(SEED_BITS)


def repeatable_seeds(seed: int) -> Iterator[int]:
    """The seeds of LLM's seedless requests: the k-th depends on `seed` and k alone.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), started at `seed`.
    """
    mask = 2**64 - 1
    state = seed & mask
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield (z ^ (z >> 31)) >> (64 - SEED_BITS)


@dataclass(slots=True)
class ProcessedRequest:
    """One prompt, ready for the engine: `samples` are its n EngineRequests, in the order of their sample_index. Those
    of a beam search are one request to the engine, with one id."""

    request_id: str
    prompt: str | None  # None: token ids were given
    samples: list[EngineRequest]
    calls_tools: CallsTools | None = None  # None: none does

    @property
    def for_engine(self) -> list[EngineRequest]:
        return self.samples[:1] if self.samples[0].beams is not None else self.samples


class InputProcessor:
    """Raises InvalidRequestError (ContextLengthError for lengths) before anything has reached the engine.

    Each sample gets an engine request id that no other ever has, whatever ids callers choose: news of a request that
    ended here may still be on their way when its caller's next one, of the same name, has begun.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: EngineInfo,
        *,
        eos_token_ids: Sequence[int],
        max_logprobs: int,
        next_seed: Callable[[], int] = random_seed,
        pooling_defaults: PoolingDefaults | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = info.max_model_len
        self._max_cache_tokens = info.num_blocks * info.block_size
        self._max_num_seqs = info.max_num_seqs
        # An id needs a row of the embedding and a token in the tokenizer; either may have spare ones.
        self._num_vocab_tokens = min(info.vocab_size, tokenizer.vocab_size)
        # An end token without a row can never be sampled.
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < info.vocab_size]
        self._max_logprobs = max_logprobs
        self._next_seed = next_seed
        self._pooling_defaults = pooling_defaults or PoolingDefaults()
        self._hidden_size = info.hidden_size
        self._no_output = no_output()
        self._sample_numbers = itertools.count()

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        user: str | None = None,
        reports_progress: bool = False,
        calls_tools: CallsTools | None = None,
    ) -> ProcessedRequest:
        text, first = self._first_sample(
            request_id, prompt, params, cache_salt, priority=priority, user=user, reports_progress=reports_progress
        )
        samples = [first]
        if first.params.n > 1:
            # The first computes the prompt for all of them, and scores it.
            others = dataclasses.replace(
                first, params=copy.copy(first.params), fork_of=first.request_id, reports_progress=False
            )
            others.params.prompt_logprobs = None
            samples += [
                dataclasses.replace(others, request_id=self._engine_id(request_id), sample_index=index)
                for index in range(1, first.params.n)
            ]
        return ProcessedRequest(request_id, text, samples, calls_tools)

    def process_beams(
        self,
        request_id: str,
        prompt: Prompt,
        beams: BeamSearchParams,
        *,
        num_beams: int | None = None,
        output_kind: OutputKind = "final_only",
        priority: int = 0,
        cache_salt: str | None = None,
        user: str | None = None,
    ) -> ProcessedRequest:
        """A beam search: one sample for each of the best `num_beams` beams (default: all). The engine gets the first,
        for all."""
        if beams.beam_width > self._max_num_seqs:
            raise InvalidRequestError(
                f"beam_width is {beams.beam_width}; at most {self._max_num_seqs} (max_num_seqs) run at once",
                param="beam_width",
            )
        steps = SamplingParams(
            n=num_beams or beams.beam_width,
            max_tokens=beams.max_tokens,
            temperature=beams.temperature,
            ignore_eos=beams.ignore_eos,
            skip_special_tokens=beams.skip_special_tokens,
            include_stop_str_in_output=beams.include_stop_str_in_output,
            output_kind=output_kind,
        )
        text, first = self._first_sample(request_id, prompt, steps, cache_salt, priority=priority, user=user)
        num_ends = 0 if beams.ignore_eos else len(self._eos_token_ids)
        first.params.logprobs = min(num_candidates(beams.beam_width, num_ends), self._num_vocab_tokens)
        first.beams = beams
        samples = [dataclasses.replace(first, sample_index=index) for index in range(steps.n)]
        return ProcessedRequest(request_id, text, samples)

    def process_pooling(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams | None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        user: str | None = None,
    ) -> ProcessedRequest:
        """For an embedding of the prompt."""
        pooling = decided(params, self._pooling_defaults, self._hidden_size)
        sampling = copy.copy(self._no_output)
        sampling.truncate_prompt_tokens = pooling.truncate_prompt_tokens
        fields: dict[str, Any] = {"pooling": pooling, "priority": priority, "user": user}
        text, request = self._first_sample(request_id, prompt, sampling, cache_salt, **fields)
        return ProcessedRequest(request_id, text, [request])

    def _first_sample(
        self, request_id: str, prompt: Prompt, params: SamplingParams, cache_salt: str | None, **fields: Any
    ) -> tuple[str | None, EngineRequest]:
        """The prompt's text, if it was given, and the EngineRequest of sample 0; `fields` are its own."""
        text, token_ids, salt = _read_prompt(prompt, cache_salt)
        if token_ids is None:
            token_ids = self._tokenizer.encode(text or "")
        self._check_ids(token_ids)
        token_ids = self._truncate(token_ids, params)
        if len(token_ids) > self._max_cache_tokens:
            raise InvalidRequestError(
                f"prompt has {len(token_ids)} tokens, but the whole KV cache holds {self._max_cache_tokens}",
                param="prompt",
            )
        params = self._complete(params, len(token_ids))
        return text, EngineRequest(
            request_id=self._engine_id(request_id),
            prompt_token_ids=token_ids,
            params=params,
            seed=self._next_seed() if params.seed is None else params.seed,
            eos_token_ids=self._eos_token_ids,
            num_vocab_tokens=self._num_vocab_tokens,
            cache_salt=salt,
            arrival_time=time.time(),
            **fields,
        )

    def _engine_id(self, request_id: str) -> str:
        return f"{request_id}#{next(self._sample_numbers)}"

    def _check_ids(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequestError("prompt is empty: it gives no token", param="prompt")
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._num_vocab_tokens:
            wrong = low if low < 0 else high
            raise InvalidRequestError(
                f"prompt has the token id {wrong}; ids must be in [0, {self._num_vocab_tokens - 1}]", param="prompt"
            )

    def _truncate(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        keep = params.truncate_prompt_tokens
        if keep is None:
            return token_ids
        if keep > self._max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {keep}; it must be at most the context of {self._max_model_len} tokens",
                param="truncate_prompt_tokens",
            )
        if keep == -1:  # the longest prompt that leaves room for the answer
            keep = max(1, self._max_model_len - (1 if params.max_tokens is None else params.max_tokens))
        return token_ids[-keep:]

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """A copy with nothing left open, checked against the model."""
        params = copy.copy(params)
        params.max_tokens = self._max_tokens(params, num_prompt_tokens)
        if params.min_tokens > params.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}; the context of {self._max_model_len} tokens leaves room for "
                f"{params.max_tokens} after a prompt of {num_prompt_tokens}",
                param="min_tokens",
            )
        params.bad_words_token_ids = self._bad_words(params.bad_words) if params.bad_words else None
        validate_for_model(
            params,
            num_vocab_tokens=self._num_vocab_tokens,
            max_logprobs=self._max_logprobs,
            eos_token_ids=self._eos_token_ids,
        )
        if params.logprobs == -1:
            params.logprobs = self._num_vocab_tokens
        if params.prompt_logprobs == -1:
            params.prompt_logprobs = self._num_vocab_tokens
        return params

    def _max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        room = self._max_model_len - num_prompt_tokens
        wanted = params.max_tokens
        if room >= (1 if wanted is None else wanted):
            return room if wanted is None else wanted
        if wanted == 0:
            raise ContextLengthError(
                f"prompt has {num_prompt_tokens} tokens; the context is {self._max_model_len} tokens long",
                param="prompt",
            )
        asked = "at least 1 token of output" if wanted is None else f"{wanted} in the output (max_tokens)"
        total = num_prompt_tokens + (1 if wanted is None else wanted)
        raise ContextLengthError(
            f"the context is {self._max_model_len} tokens long, but the request needs {total}: {num_prompt_tokens} in "
            f"the prompt and {asked}",
            param="prompt" if room < 1 or wanted is None else "max_tokens",
        )

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Each word as it begins a text and as it follows a blank; equal spellings once."""
        spellings: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                spellings[tuple(self._tokenizer.encode(text, add_special_tokens=False))] = None
        return [list(token_ids) for token_ids in spellings if token_ids]


def _read_prompt(prompt: Prompt, cache_salt: str | None) -> tuple[str | None, list[int] | None, str | None]:
    """The text, the token ids and the salt of any form of prompt."""
    text: Any = None
    token_ids: Any = None
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in ("prompt", "prompt_token_ids", "cache_salt")]
        if unknown:
            raise InvalidRequestError(
                f"prompt has the key {unknown[0]!r}; allowed: prompt, prompt_token_ids, cache_salt", param="prompt"
            )
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        cache_salt = prompt.get("cache_salt", cache_salt)
    elif isinstance(prompt, str):
        text = prompt
    else:
        token_ids = prompt
    if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
        raise InvalidRequestError(
            f"cache_salt is {cache_salt!r}; it must be a string, not an empty one", param="cache_salt"
        )
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"prompt is a {type(text).__name__}; it must be a string", param="prompt")
    if token_ids is None:
        if text is None:
            raise InvalidRequestError(
                f"prompt is {prompt!r}; it must be a string, a list of token ids, or a dict with one of these",
                param="prompt",
            )
        return text, None, cache_salt
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes, bytearray)):
        raise InvalidRequestError(
            f"prompt is a {type(token_ids).__name__}; it must be a string, a list of token ids, or a dict",
            param="prompt",
        )
    return text, [_token_id(value) for value in token_ids], cache_salt


def _token_id(value: Any) -> int:
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # NumPy's integers too
    except TypeError:
        raise InvalidRequestError(
            f"prompt has {value!r} among its token ids; they must be integers", param="prompt"
        ) from None
