"""allowed_token_ids: all other tokens are masked."""

from __future__ import annotations

from octavo.request import EngineRequest, SamplingParams
from octavo.sampling.feature import Feature, SamplerRow


class AllowedTokens(Feature):
    def active(self, params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def prepare(self, row: SamplerRow, source: EngineRequest) -> None:
        row.allowed_token_ids = source.params.allowed_token_ids or []
