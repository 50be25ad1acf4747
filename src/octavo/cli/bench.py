"""`octavo bench …`: the table of benchmarks."""

from __future__ import annotations

from octavo.cli.dispatch import Command, dispatch

COMMANDS = (
    Command("latency", "octavo.cli.bench_latency", "seconds that one batch takes"),
    Command("throughput", "octavo.cli.bench_throughput", "tokens per second of many requests at once"),
)


def run(argv: list[str]) -> int:
    return dispatch("octavo bench", "Measure an engine in this process, on prompts of random tokens.", COMMANDS, argv)
