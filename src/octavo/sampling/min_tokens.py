"""min_tokens: until that many tokens are out, every token that would end the request is masked."""

from __future__ import annotations

from octavo.request import Request, SamplingParams
from octavo.sampling.feature import Feature, SamplerRow


def banned_ends(request: Request) -> list[int]:
    """The tokens that must not come yet. Under `ignore_eos`, end tokens end nothing and are not masked."""
    params = request.params
    if request.num_output_tokens >= params.min_tokens:
        return []
    end_tokens = [] if params.ignore_eos else request.source.eos_token_ids
    return [*end_tokens, *(params.stop_token_ids or ())]


class MinTokens(Feature):
    each_step = True

    def active(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def collect(self, row: SamplerRow, request: Request) -> None:
        row.banned_ends = banned_ends(request)
