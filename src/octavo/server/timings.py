"""How long the phases of a call took, for clients that ask (`timings: true`). Knows no route."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.request import RequestMetrics, RequestOutput
from octavo.server import answers

if TYPE_CHECKING:
    from octavo.server.engine_call import Usage


class Timings:
    """Of a call, over all its prompts and samples: each phase ends when the first of them leaves it, the last one with
    the call. A beam search has no first token before its end.

    | queue: until the first step | prefill: until the first token | decode: until the end |
    """

    def __init__(self) -> None:
        self._requests: dict[str, RequestMetrics] = {}

    def count(self, output: RequestOutput) -> None:
        if output.metrics is not None:
            self._requests[output.request_id] = output.metrics

    def record(self, usage: Usage, num_samples: int) -> answers.Timings:
        """Seconds, and tokens for each of them: of the prompt as far as it had to be computed, and of the output after
        the first token of each sample; 0 where there were none."""
        requests = self._requests.values()
        arrival = min(metrics.arrival_time for metrics in requests)
        end = max(metrics.finished_time or arrival for metrics in requests)
        scheduled = min(metrics.first_scheduled_time or end for metrics in requests)
        first_token = min(metrics.first_token_time or end for metrics in requests)
        # The times come from two processes; a clock that is set back must not give less than nothing.
        queue, prefill, decode = (
            max(0.0, later - earlier)
            for earlier, later in ((arrival, scheduled), (scheduled, first_token), (first_token, end))
        )
        return {
            "queue_seconds": queue,
            "prefill_seconds": prefill,
            "decode_seconds": decode,
            "total_seconds": max(0.0, end - arrival),
            "cached_tokens": usage.cached_tokens,
            "prefill_tokens_per_second": _rate(usage.prompt_tokens - usage.cached_tokens, prefill),
            "tokens_per_second": _rate(usage.completion_tokens - num_samples, decode),
        }


def _rate(num_tokens: int, seconds: float) -> float:
    return num_tokens / seconds if num_tokens > 0 and seconds > 0 else 0.0
