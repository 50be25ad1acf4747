"""What a sampling feature is: it carries its fields of SamplingParams over to a row of the native sampler.

Owns the contract only. Which features there are, and their order, stands in sampler.py; what each does to the logits,
in reference.py (the definition) and the native kernel.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from octavo.request import EngineRequest, Request, SamplingParams


class SamplerRow(Protocol):
    """One request's settings in the native sampler; as made, all are off: greedy, no logprobs."""

    num_vocab_tokens: int
    allowed_token_ids: list[int]
    banned_words: list[int]
    banned_ends: list[int]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    temperature: float  # 0: greedy
    top_k: int
    top_p: float
    min_p: float
    seed: int  # 64 bits, unsigned
    sample_index: int
    position: int  # number of output tokens so far
    num_logprobs: int  # -1: none; above the vocabulary: all
    logprobs_mode: object  # native LogprobsMode

    def set_bias(self, token_ids: Sequence[int], values: Sequence[float]) -> None: ...

    def set_history(self, token_ids: array[int], num_prompt_tokens: int) -> None:
        """The tokens that penalties count; copied."""


class Feature:
    """One feature, without state of its own. A request for which it is not `active` pays nothing for it."""

    each_step: ClassVar[bool] = False  # whether `collect` has work to do

    def active(self, params: SamplingParams) -> bool:
        raise NotImplementedError

    def prepare(self, row: SamplerRow, source: EngineRequest) -> None:
        """Write what holds for the request's whole life. Called once, when the request first samples."""

    def collect(self, row: SamplerRow, request: Request) -> None:
        """Write what holds for this step, over what held for the last. Called in each step that samples."""
