"""What the benchmarks share: their options, their random prompts, and how figures are summed up and shown."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.flags import add_config_flags, config_from_args, parse_count
from octavo.cli.parser import Parser
from octavo.cli.serve import MODEL_HELP
from octavo.config import EngineConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.request import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def make_parser(name: str, description: str, counts: Sequence[tuple[str, int, str]]) -> Parser:
    """The parser of `octavo bench NAME`. `counts` are its own options: flag, default, help."""
    parser = Parser(f"octavo bench {name}", description, "[MODEL] [options]")
    parser.add_argument("model", nargs="?", default=EngineConfig.model, metavar="MODEL", help=MODEL_HELP)
    group = parser.add_argument_group("benchmark")
    for flag, default, text in counts:
        group.add_argument(flag, type=parse_count, default=default, metavar="N", help=f"{text} (default: {default})")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write all figures to this file")
    add_config_flags(parser, EngineConfig, "engine", exclude=["model"])
    return parser


def parse(parser: Parser, argv: list[str], at_least: dict[str, int]) -> tuple[argparse.Namespace, EngineConfig]:
    args = parser.parse_args(argv)
    for name, low in at_least.items():
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least {low}")
    return args, config_from_args(args, EngineConfig)


def make_llm(config: EngineConfig) -> LLM:
    from octavo.llm import LLM

    return LLM(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def greedy(output_len: int) -> SamplingParams:
    """Greedy, and exactly `output_len` tokens."""
    from octavo.request import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)


class RandomPrompts:
    """Endless prompts of random token ids, the same for the same seed; none is seen twice, so no cache helps."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self._vocab_size = llm.get_tokenizer().vocab_size
        self._random = random.Random(seed)

    def take(self, count: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(self._vocab_size) for _ in range(length)] for _ in range(count)]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The PERCENTILES of `values` by linear interpolation, under their numbers as text."""
    if len(values) == 1:
        return {str(p): values[0] for p in PERCENTILES}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {str(p): cuts[p - 1] for p in PERCENTILES}


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int = 1) -> None:
    """Prints a table after an empty line; the first columns are text, the others are figures."""
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    print(f"\n{title}")
    for line in lines:
        cells = zip(line, widths, strict=True)
        aligned = (f"{cell:<{w}}" if i < num_text_columns else f"{cell:>{w}}" for i, (cell, w) in enumerate(cells))
        print("  ".join(aligned).rstrip())


def write_json(path: Path | None, figures: dict[str, Any], config: EngineConfig) -> None:
    if path is not None:
        path.write_text(json.dumps({**figures, "engine": dataclasses.asdict(config)}, indent=2) + "\n")
