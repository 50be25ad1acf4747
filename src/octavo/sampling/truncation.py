"""min_p, top_k and top_p: which tokens may be drawn at all. Each sees what the one before has left."""

from __future__ import annotations

from octavo.request import EngineRequest, SamplingParams
from octavo.sampling.feature import Feature, SamplerRow
from octavo.sampling.temperature import is_greedy


class Truncation(Feature):
    def active(self, params: SamplingParams) -> bool:
        return not is_greedy(params) and (params.min_p, params.top_k, params.top_p) != (0, 0, 1)

    def prepare(self, row: SamplerRow, source: EngineRequest) -> None:
        row.min_p = source.params.min_p
        row.top_k = source.params.top_k
        row.top_p = source.params.top_p
