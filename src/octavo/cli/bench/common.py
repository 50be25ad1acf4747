"""What the benchmarks that run an engine share: their options, their random prompts, and the way into the engine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from octavo.cli.flags import add_config_flags, config_from_args, flag_name, parse_count
from octavo.cli.parser import Parser, output_file
from octavo.cli.serve import MODEL_HELP
from octavo.config import EngineConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.llm import LLM
    from octavo.request import SamplingParams
    from octavo.runtime.runner import Runner

Counts = tuple[int, ...]


def make_parser(name: str, description: str, counts: Sequence[tuple[str, int | Counts, str]]) -> Parser:
    """The parser of `octavo bench NAME`. `counts` are its own options: flag, default (several: a list), help."""
    parser = Parser(f"octavo bench {name}", description, "[MODEL] [options]")
    parser.add_argument("model", nargs="?", default=EngineConfig.model, metavar="MODEL", help=MODEL_HELP)
    add_count_options(parser, counts)
    add_config_flags(parser, EngineConfig, "engine", exclude=["model"])
    return parser


def add_count_options(parser: Parser, counts: Sequence[tuple[str, int | Counts, str]]) -> argparse._ArgumentGroup:
    """The group of a benchmark's own options; further ones may be added to it."""
    group = parser.add_argument_group("benchmark")
    for flag, default, text in counts:
        if isinstance(default, int):
            group.add_argument(
                flag, type=parse_count, default=default, metavar="N", help=f"{text} (default: {default})"
            )
        else:
            shown = ",".join(map(str, default))
            group.add_argument(
                flag, type=parse_counts, default=default, metavar="N,N,…", help=f"{text} (default: {shown})"
            )
    group.add_argument("--output-json", type=output_file, metavar="FILE", help="write all figures to this file")
    return group


def parse_counts(text: str) -> Counts:
    """Whole numbers with commas between them, each perhaps with a unit: 1,8,1k."""
    return tuple(parse_count(word.strip()) for word in text.split(","))


def parse_args(parser: Parser, argv: list[str], at_least: dict[str, int]) -> argparse.Namespace:
    """`at_least`: the least that an option (each of a list) may be. The result's `command_line` is `argv` as typed."""
    args: argparse.Namespace = parser.parse_args(argv)
    for name, low in at_least.items():
        value = getattr(args, name)
        least = value if isinstance(value, int) else min(value)
        if least < low:
            raise ConfigError(f"{flag_name(name)} is {least}; it must be at least {low}")
    args.command_line = f"{parser.prog} {shlex.join(argv)}"
    return args


def parse(parser: Parser, argv: list[str], at_least: dict[str, int]) -> tuple[argparse.Namespace, EngineConfig]:
    args = parse_args(parser, argv, at_least)
    return args, config_from_args(args, EngineConfig)


def options_of(config: EngineConfig) -> dict[str, Any]:
    """The fields by name, as LLM takes them."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def make_llm(config: EngineConfig) -> LLM:
    from octavo.llm import LLM

    return LLM(**options_of(config))


def engine_of(llm: LLM) -> Engine:
    """The engine inside: what a benchmark measures, and a caller of LLM has no business with."""
    assert llm._engine is not None
    return llm._engine


def runner_of(engine: Engine) -> Runner:
    """The compute plane of an engine in this process."""
    return cast("Runner", engine.runner)


@contextlib.contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """(owner, name, replacement): attributes of objects, for as long as the context lasts."""
    with contextlib.ExitStack() as undo:
        for owner, name, replacement in replacements:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield


def greedy(output_len: int, *, detokenize: bool = False) -> SamplingParams:
    """Greedy, and exactly `output_len` tokens."""
    from octavo.request import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=detokenize)


class RandomPrompts:
    """Endless prompts of random token ids, the same for the same seed; none is seen twice, so no cache helps."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def take(self, count: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(self._vocab_size) for _ in range(length)] for _ in range(count)]
