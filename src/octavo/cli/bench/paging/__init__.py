"""`octavo bench paging`: how much KV memory octavo's blocks waste and save, beside allocators of contiguous slots.

The figures 2, 13 and 15 of the PagedAttention paper (Kwon et al., SOSP 2023; 13 is what explains its figure 12), on
lengths like those of its traces. Nothing is computed but the accounts: no model, no tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from octavo.cli.bench.common import add_count_options, parse_args
from octavo.cli.bench.paging import lengths as lengths_of
from octavo.cli.bench.paging.lengths import TRACES, Length
from octavo.cli.bench.paging.memory import (
    Buddy,
    Contiguous,
    FirstFit,
    Memory,
    Paged,
    reserve_oracle,
    reserve_pow2,
)
from octavo.cli.bench.paging.picture import draw
from octavo.cli.bench.paging.sharing import CONCENTRATION, Blocks, beams, parallel
from octavo.cli.bench.paging.steps import Account, play
from octavo.cli.bench.report import show_table, write_json
from octavo.cli.bench.svg import check_name
from octavo.cli.parser import Parser, output_file
from octavo.errors import ConfigError

PLACES = ("buddy", "first-fit")
MAX_WIDTH = 128  # beyond, the unlikeliest of the tokens looked at would have no probability in float64
PARTS = ("tokens", "reserved", "internal", "rounding", "free")


def run(argv: list[str]) -> int:
    args = _parse(argv)
    began = time.perf_counter()
    figures = {name: measure(args, *sets) for name, sets in _lengths(args).items()}
    for name, each in figures.items():
        _show(name, each)
    print(f"\nin {time.perf_counter() - began:.1f} s")
    if args.plot is not None:
        args.plot.write_text(draw(figures))
    options = ("num_blocks", "block_size", "max_model_len", "allocator", "seed")
    settings = {**{name: getattr(args, name) for name in options}, "concentration": CONCENTRATION}
    write_json(args, {**settings, "lengths": figures})
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser("octavo bench paging", "KV memory used, wasted and shared.", "[options]")
    counts = (
        ("--num-blocks", 981, "blocks of memory; the paper's OPT-13B has 15.7 k slots"),
        ("--block-size", 16, "slots of a block"),
        ("--max-model-len", 2048, "tokens of the model's context"),
        ("--num-requests", 2000, "requests that wait for memory"),
        ("--num-sampled", 400, "requests that are played with each number of samples"),
        ("--num-searches", 40, "requests that are played with each number of beams"),
        ("--widths", (2, 4, 6), "samples of a request, and beams"),
        ("--seed", 0, "of the lengths and of the beams' scores"),
    )
    group = add_count_options(parser, counts)
    group.add_argument("--lengths", type=Path, metavar="FILE", help="a CSV file with the columns input,output (tokens)")
    text = "what finds contiguous slots (default: buddy)"
    group.add_argument("--allocator", choices=PLACES, default=PLACES[0], help=text)
    group.add_argument("--plot", type=output_file, metavar="FILE", help="draw the figures into this file, .svg")
    counted = ("num_blocks", "block_size", "num_requests", "num_sampled", "num_searches")
    args = parse_args(parser, argv, {**dict.fromkeys(counted, 1), "max_model_len": 2, "widths": 2, "seed": 0})
    if args.plot is not None:
        check_name("--plot", args.plot)
    if max(args.widths) > MAX_WIDTH:
        raise ConfigError(f"--widths is {max(args.widths)}; it must be at most {MAX_WIDTH}")
    if args.num_blocks * args.block_size < args.max_model_len:
        raise ConfigError(
            f"--num-blocks is {args.num_blocks}; with --block-size {args.block_size} it must be at least "
            f"{-(-args.max_model_len // args.block_size)} for one request of --max-model-len {args.max_model_len}"
        )
    return args


def _lengths(args: argparse.Namespace) -> dict[str, list[list[Length]]]:
    """By name: the lengths of the requests that wait for memory, that are sampled, and that are searched. Of a file,
    each time the first ones."""
    counts = (args.num_requests, args.num_sampled, args.num_searches)
    if args.lengths is not None:
        given = lengths_of.read(args.lengths, args.max_model_len)
        return {args.lengths.stem: [given[:count] for count in counts]}
    return {
        trace.name: [lengths_of.draw(trace, count, args.max_model_len, args.seed) for count in counts]
        for trace in TRACES
    }


def memories(args: argparse.Namespace) -> dict[str, Memory]:
    num_slots = args.num_blocks * args.block_size
    reservations: dict[str, Callable[[Length], int]] = {
        "max": lambda length: args.max_model_len,
        "pow2": partial(reserve_pow2, max_model_len=args.max_model_len),
        "oracle": reserve_oracle,
    }
    places = Buddy if args.allocator == "buddy" else FirstFit
    contiguous = {name: Contiguous(num_slots, places(num_slots), reserve) for name, reserve in reservations.items()}
    return {**contiguous, "octavo": Paged(args.num_blocks, args.block_size)}


def measure(
    args: argparse.Namespace, waiting: list[Length], sampled: list[Length], searched: list[Length]
) -> dict[str, Any]:
    """All figures for one kind of lengths. The first quarter of those that wait warms up."""
    num_warmup = len(waiting) // 4
    played = {name: _shares(play(memory, waiting, num_warmup)) for name, memory in memories(args).items()}
    sharing = {
        "parallel": {n: parallel(sampled, n, args.block_size) for n in args.widths},
        "beam": {n: beams(searched, n, args.block_size, args.seed) for n in args.widths},
    }
    return {
        "num_requests": len(waiting),
        "mean_input": statistics.mean(length.input for length in waiting),
        "mean_output": statistics.mean(length.output for length in waiting),
        "memory": played,
        "sharing": {kind: {str(n): _saved(blocks) for n, blocks in by.items()} for kind, by in sharing.items()},
    }


def _shares(account: Account) -> dict[str, Any]:
    """Parts of the memory (0 … 1), and requests at once, as means over the steps. `external` is all that no request has
    reserved: `rounding` and `free`."""
    parts = {name: getattr(account, name) / account.num_slots for name in PARTS}
    return {
        **parts,
        "external": parts["rounding"] + parts["free"],
        "waste": 1 - parts["tokens"],
        "mean_running": account.num_running / account.num_steps,
        "num_steps": account.num_steps,
        "num_preemptions": account.num_preemptions,
    }


def _saved(blocks: Blocks) -> dict[str, Any]:
    return {**dataclasses.asdict(blocks), "saved": blocks.saved}


def _show(name: str, figures: dict[str, Any]) -> None:
    columns = ("", "token states", "reservation", "internal", "external", "of it free", "at once", "preempted")
    shown = ("tokens", "reserved", "internal", "external", "free")
    show_table(
        f"{name}: {figures['num_requests']} requests, {figures['mean_input']:.1f} tokens in and "
        f"{figures['mean_output']:.1f} out; % of the memory, requests at once",
        columns,
        [
            (
                memory,
                *(f"{100 * each[part]:.1f}" for part in shown),
                f"{each['mean_running']:.2f}",
                str(each["num_preemptions"]),
            )
            for memory, each in figures["memory"].items()
        ],
    )
    show_table(
        f"{name}: % of blocks saved by sharing",
        ("", *next(iter(figures["sharing"].values()))),
        [(kind, *(f"{100 * each['saved']:.1f}" for each in by.values())) for kind, by in figures["sharing"].items()],
    )
