"""The news of one step of the engine, for those who do not follow single requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.messages import TokenDelta
    from octavo.engine.output_processor import RequestState, SampleState


@dataclass(slots=True)
class StepNews:
    """What one round of deltas did: whom to wake, what to tell the engine, and the figures for the metrics."""

    updated: list[RequestState] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)  # engine request ids that ended here, not in the engine
    finished: list[SampleState] = field(default_factory=list)
    num_prompt_tokens: int = 0  # of the requests that got their first token, or all that they wanted without one …
    num_cached_tokens: int = 0  # … and of these, those found in a cache …
    num_stored_tokens: int = 0  # … and of these, those found on disk
    num_output_tokens: int = 0
    times_to_first_token: list[float] = field(default_factory=list)  # seconds
    inter_token_latencies: list[float] = field(default_factory=list)  # seconds

    def count_prompt(self, sample: SampleState, delta: TokenDelta) -> None:
        """Once for all samples of a request. `delta`: news with the counts."""
        if sample.source.sample_index == 0:
            num_prompt_tokens = len(sample.source.prompt_token_ids)
            self.num_prompt_tokens += num_prompt_tokens
            # Who went on with an output after a crash may have found that too.
            self.num_cached_tokens += min(delta.num_cached_tokens, num_prompt_tokens)
            self.num_stored_tokens += min(delta.num_stored_tokens, num_prompt_tokens)
