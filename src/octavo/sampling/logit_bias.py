"""logit_bias: numbers added to the logits of single tokens, -100 to 100. A bias never lifts a mask."""

from __future__ import annotations

from octavo.request import EngineRequest, SamplingParams
from octavo.sampling.feature import Feature, SamplerRow


class LogitBias(Feature):
    def active(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def prepare(self, row: SamplerRow, source: EngineRequest) -> None:
        bias = source.params.logit_bias or {}
        row.set_bias(list(bias), list(bias.values()))
