"""repetition_penalty (prompt and output), frequency_penalty and presence_penalty (output only)."""

from __future__ import annotations

from octavo.request import EngineRequest, Request, SamplingParams
from octavo.sampling.feature import Feature, SamplerRow


class Penalties(Feature):
    each_step = True

    def active(self, params: SamplingParams) -> bool:
        return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)

    def prepare(self, row: SamplerRow, source: EngineRequest) -> None:
        row.repetition_penalty = source.params.repetition_penalty
        row.frequency_penalty = source.params.frequency_penalty
        row.presence_penalty = source.params.presence_penalty

    def collect(self, row: SamplerRow, request: Request) -> None:
        row.set_history(request.token_ids, request.num_prompt_tokens)
