"""temperature, and what counts as greedy: then the likeliest token is taken and nothing is drawn."""

from __future__ import annotations

from octavo.request import EngineRequest, SamplingParams
from octavo.sampling.feature import Feature, SamplerRow

GREEDY_BELOW = 1e-5  # vLLM's bound: from here on, logits over temperature still are ordinary floats


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW or params.top_p == 0


class Temperature(Feature):
    def active(self, params: SamplingParams) -> bool:
        return not is_greedy(params)

    def prepare(self, row: SamplerRow, source: EngineRequest) -> None:
        row.temperature = source.params.temperature
