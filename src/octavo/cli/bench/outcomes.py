"""What became of the requests of `octavo bench serve`: the times that each client saw, their sums, and the shown table.

Names and table are those of `vllm bench serve`: scripts that read its files and its output can read these.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.cli.bench.report import percentile
from octavo.errors import ConfigError

TIMES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
OBJECTIVES = ("ttft", "tpot", "e2el")  # those that a request has one of
WIDTH = 50  # of the shown table


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it; times in seconds since it was sent."""

    input_len: int = 0
    output_len: int = 0
    ttft: float = 0.0  # to the first token
    gaps: list[float] = field(default_factory=list)  # between one piece of the answer and the next
    error: str | None = None

    @property
    def e2el(self) -> float:
        return self.ttft + sum(self.gaps)

    @property
    def tpot(self) -> float:
        return sum(self.gaps) / (self.output_len - 1) if self.output_len > 1 else 0.0

    def meets(self, objectives: Mapping[str, float]) -> bool:
        """Whether none of its times is over its objective, in milliseconds."""
        return all(1e3 * getattr(self, name) <= limit for name, limit in objectives.items())


def parse_objectives(words: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` to milliseconds by name."""
    objectives = {}
    for word in words:
        name, _, number = word.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = -1.0
        if name not in OBJECTIVES or not limit > 0:
            allowed = ", ".join(f"{each}:MILLISECONDS" for each in OBJECTIVES)
            raise ConfigError(f"--goodput has {word!r}; allowed: {allowed}")
        objectives[name] = limit
    return objectives


def sum_up(
    outcomes: Sequence[Outcome],
    duration: float,
    *,
    objectives: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = (99.0,),
) -> dict[str, Any]:
    """Of the requests that were answered; those that failed only count."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    num_input, num_output = sum(each.input_len for each in done), sum(each.output_len for each in done)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
    }
    if objectives:
        figures["request_goodput"] = sum(each.meets(objectives) for each in done) / duration
    times = {
        "ttft": [each.ttft for each in done],
        "tpot": [each.tpot for each in done if each.output_len > 1],
        "itl": [gap for each in done for gap in each.gaps],
        "e2el": [each.e2el for each in done],
    }
    for name, seconds in times.items():
        values = [1e3 * value for value in seconds] or [0.0]
        figures[f"mean_{name}_ms"] = statistics.mean(values)
        figures[f"median_{name}_ms"] = statistics.median(values)
        figures[f"std_{name}_ms"] = statistics.pstdev(values)
        for share in percentiles:
            figures[f"p{share:g}_{name}_ms"] = percentile(values, share)
    return figures


def show(figures: Mapping[str, Any], percentiles: Sequence[float], times: Sequence[str]) -> None:
    print(f"{' Serving Benchmark Result ':=^{WIDTH}}")
    _line("Successful requests:", figures["completed"])
    _line("Failed requests:", figures["failed"])
    if figures["max_concurrency"] is not None:
        _line("Maximum request concurrency:", figures["max_concurrency"])
    if figures["request_rate"] != "inf":
        _line("Request rate configured (RPS):", figures["request_rate"])
    _line("Benchmark duration (s):", figures["duration"])
    _line("Total input tokens:", figures["total_input_tokens"])
    _line("Total generated tokens:", figures["total_output_tokens"])
    _line("Request throughput (req/s):", figures["request_throughput"])
    if "request_goodput" in figures:
        _line("Request goodput (req/s):", figures["request_goodput"])
    _line("Output token throughput (tok/s):", figures["output_throughput"])
    _line("Total token throughput (tok/s):", figures["total_token_throughput"])
    for name in times:
        print(f"{TIMES[name]:-^{WIDTH}}")
        for kind in ("mean", "median", *(f"p{share:g}" for share in percentiles)):
            _line(f"{kind.capitalize()} {name.upper()} (ms):", figures[f"{kind}_{name}_ms"])
    print("=" * WIDTH)


def _line(name: str, value: float) -> None:
    print(f"{name:<40} {value:<10.2f}".rstrip() if isinstance(value, float) else f"{name:<40} {value}")
