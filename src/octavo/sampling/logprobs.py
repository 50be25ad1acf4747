"""logprobs: how many of the likeliest tokens are reported beside the sampled one; -1 is the whole vocabulary."""

from __future__ import annotations

from octavo.request import INT32_MAX, EngineRequest, SamplingParams
from octavo.sampling.feature import Feature, SamplerRow


def native_count(num_logprobs: int) -> int:
    """The native sampler reads -1 as none, and cuts at the vocabulary."""
    return INT32_MAX if num_logprobs == -1 else num_logprobs


class Logprobs(Feature):
    def active(self, params: SamplingParams) -> bool:
        return params.logprobs is not None

    def prepare(self, row: SamplerRow, source: EngineRequest) -> None:
        if source.params.logprobs is not None:
            row.num_logprobs = native_count(source.params.logprobs)
