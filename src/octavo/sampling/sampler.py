"""The sampler of the compute plane: logits in, a RowResult for each row out.

Owns the pipeline: which features there are, and when each writes into the native sampler's rows. The arithmetic is the
kernel's (native/kernels/sampler.cpp), its definition is in reference.py. Changes no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from octavo.core.plan import RowResult
from octavo.errors import RequestFailedError
from octavo.request import INT32_MAX, BeamSearchParams, Request, TokenLogprobs
from octavo.sampling.allowed_tokens import AllowedTokens
from octavo.sampling.bad_words import BadWords
from octavo.sampling.feature import Feature, SamplerRow
from octavo.sampling.logit_bias import LogitBias
from octavo.sampling.logprobs import Logprobs, native_count
from octavo.sampling.min_tokens import MinTokens
from octavo.sampling.penalties import Penalties
from octavo.sampling.seed import Seed
from octavo.sampling.temperature import Temperature
from octavo.sampling.truncation import Truncation

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Logits: TypeAlias = npt.NDArray[np.float32] | Any  # an array, or the program's own rows (native LogitRows)

# What the native sampler gives: the token of each row (-1: none), and by row whatever has logprobs or an error.
Drawn: TypeAlias = tuple[list[int], dict[int, Any]]

# In the order in which they act on a row.
PIPELINE: tuple[Feature, ...] = (
    AllowedTokens(),
    BadWords(),
    MinTokens(),
    LogitBias(),
    Penalties(),
    Temperature(),
    Truncation(),
    Seed(),
    Logprobs(),
)


@dataclass(slots=True)
class _PreparedRow:
    """A request's row of the native sampler, and the features that write to it in each step."""

    native: SamplerRow
    each_step: list[Feature]


class Sampler:
    """`native` is a module of ops/isa.py and `pool` its ThreadPool; `logprobs_mode` as in EngineConfig."""

    def __init__(self, native: ModuleType, pool: Any, *, logprobs_mode: str = "raw_logprobs") -> None:
        self._native = native
        self._pool = pool
        self._mode = getattr(native.LogprobsMode, logprobs_mode)
        self._normalised = logprobs_mode.endswith("_logprobs")

    def sample(self, logits: npt.NDArray[np.float32], requests: Sequence[Request]) -> list[RowResult]:
        """float32 [L, V] -> one result for each of the L rows; `logits` may be overwritten.

        A row without finite logits, or whose masks leave nothing, has an `error` and no token. Logprobs are finite:
        tokens of probability 0 are left out.
        """
        return as_results(self._native.sample(self._pool, logits, self.rows(requests)))

    def rows(self, requests: Sequence[Request]) -> list[SamplerRow]:
        """How each of these requests samples its next token, for the native sampler."""
        return [self._row(request) for request in requests]

    def prompt_logprobs(
        self,
        logits: Logits,
        target_token_ids: Sequence[int],
        num_logprobs: int,
        *,
        num_vocab_tokens: int | None = None,
    ) -> list[TokenLogprobs]:
        """float32 [L, V], L token ids -> what row i says of token i, and its `num_logprobs` (-1: all) likeliest tokens.

        Prompts are not sampled, so this is always of the raw logits. Raises RequestFailedError where they are not
        finite.
        """
        results = self._native.token_logprobs(
            self._pool,
            logits,
            list(target_token_ids),
            native_count(num_logprobs),
            INT32_MAX if num_vocab_tokens is None else num_vocab_tokens,
            self._normalised,
        )
        for result in results:
            if result.error is not None:
                raise RequestFailedError(result.error)
        return [_token_logprobs(result.logprobs) for result in results]

    def _row(self, request: Request) -> SamplerRow:
        """What is prepared lives as long as the request."""
        row = request.sampling
        if row is None:
            row = request.sampling = self._prepare(request)
        assert isinstance(row, _PreparedRow)
        for feature in row.each_step:
            feature.collect(row.native, request)
        return row.native

    def _prepare(self, request: Request) -> _PreparedRow:
        source = request.source
        native: SamplerRow = self._native.SamplerRow()
        native.logprobs_mode = self._mode if source.beams is None else self._beams_mode(source.beams)
        if source.num_vocab_tokens is not None:
            native.num_vocab_tokens = source.num_vocab_tokens
        active = [feature for feature in PIPELINE if feature.active(source.params)]
        for feature in active:
            feature.prepare(native, source)
        return _PreparedRow(native, [feature for feature in active if feature.each_step])

    def _beams_mode(self, beams: BeamSearchParams) -> Any:
        """Beams are scored by logprobs, whatever logprobs requests get to see."""
        modes = self._native.LogprobsMode
        return modes.raw_logprobs if beams.temperature in (0.0, 1.0) else modes.processed_logprobs


def as_results(drawn: Drawn) -> list[RowResult]:
    token_ids, details = drawn
    results = [RowResult(token_id) for token_id in token_ids]
    for i, sampled in details.items():
        results[i] = _row_result(sampled)
    return results


def _row_result(sampled: Any) -> RowResult:
    if sampled.error is not None:
        return RowResult(error=sampled.error)
    logprobs = sampled.logprobs
    return RowResult(token_id=sampled.token_id, logprobs=None if logprobs is None else _token_logprobs(logprobs))


def _token_logprobs(native: Any) -> TokenLogprobs:
    return TokenLogprobs(token_ids=native.token_ids, logprobs=native.logprobs, rank=native.rank)
