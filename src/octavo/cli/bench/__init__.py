"""`octavo bench …`: the table of benchmarks."""

from __future__ import annotations

from octavo.cli.dispatch import Command, dispatch

COMMANDS = (
    Command("latency", "octavo.cli.bench.latency", "seconds that one batch takes"),
    Command("throughput", "octavo.cli.bench.throughput", "tokens per second of many requests at once"),
    Command("serve", "octavo.cli.bench.serve", "a load for a running server, of any make"),
    Command("startup", "octavo.cli.bench.startup", "seconds from a fresh process to the first token"),
    Command("step", "octavo.cli.bench.step", "where the time of a decoding step goes"),
    Command("kernels", "octavo.cli.bench.kernels", "a model's matrix products and attention, against the machine"),
    Command("sharing", "octavo.cli.bench.sharing", "what a cached prompt, and samples and beams of one prompt, save"),
    Command("quality", "octavo.cli.bench.quality", "distance of the next-token distribution from float32's"),
    Command("paging", "octavo.cli.bench.paging", "KV memory used, wasted and shared, beside contiguous allocators"),
    Command("table", "octavo.cli.bench.table", "engines side by side, from their JSON"),
    Command("plot", "octavo.cli.bench.plot", "a picture of what `step` measured"),
)


def run(argv: list[str]) -> int:
    return dispatch("octavo bench", "Measure octavo, the machine under it, or a server.", COMMANDS, argv)
