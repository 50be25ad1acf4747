"""Flags generated from the dataclasses of config.py: `max_model_len` becomes `--max-model-len`.

Only flags that were given reach the dataclass: the defaults, the choices and the ranges live there alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar, cast

from octavo.config import union_members
from octavo.errors import ConfigError

Config = TypeVar("Config")

JSON = "JSON"  # metavar of options that are objects

# As in vLLM, lower-case letters count in thousands and upper-case ones in 1024s: 8k tokens are 8000, 8K are 8192.
_FACTORS = types.MappingProxyType(
    {
        **{letter: 1000**power for power, letter in enumerate("kmgt", 1)},
        **{letter: 1024**power for power, letter in enumerate("KMGT", 1)},
        **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
        **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    }
)


def add_config_flags(parser: argparse.ArgumentParser, cls: type, title: str, exclude: Collection[str] = ()) -> None:
    """Adds a group `title` with one flag for each field of `cls` that is not in `exclude`."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name not in exclude:
            _add_flag(group, field, hints[field.name])


def config_from_args(args: argparse.Namespace, cls: type[Config], **given: Any) -> Config:
    """The dataclass made of the flags that were given, and of `given`. Raises ConfigError naming the flag."""
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    try:
        return cls(**{**values, **given})
    except ConfigError as error:
        if error.param is None:
            raise
        raise ConfigError(f"{flag_name(error.param)}: {error.message}", param=error.param) from None


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_count(text: str) -> int:
    """A whole number, perhaps with a unit: 4096, 8k, 8K, 512MiB, 1.5GiB."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    factor = _FACTORS.get(match[2]) if match and match[2] else 1
    if match is None or factor is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (such as 4096, 8k or 2GiB)")
    number = float(match[1]) * factor if "." in match[1] else int(match[1]) * factor
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(number)


def parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


class _Extend(argparse.Action):
    """A list, by repetition, blanks, commas, or as JSON. Of several words in a row `swallowed` keeps a note: the last
    may have been meant for something else. None at all is refused: an empty key, say, must not open a server."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        words = [word for value in values for word in self._split(value)]
        if not words:
            raise argparse.ArgumentError(self, "it is empty")
        if len(values) > 1:
            namespace.swallowed = f"{option_string} {' '.join(values)}"
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *words])

    def _split(self, value: str) -> list[str]:
        if not value.startswith("["):
            return [word.strip() for word in value.split(",") if word.strip()]
        try:
            words = json.loads(value)
        except ValueError:
            words = None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise argparse.ArgumentError(self, f"{value!r} is not a JSON list of strings")
        return words


def _add_flag(group: Any, field: dataclasses.Field[Any], hint: Any) -> None:
    flag, kind = flag_name(field.name), _kind(hint)
    names = [flag, *filter(None, [field.metadata["short"]])]
    common = {"dest": field.name, "default": argparse.SUPPRESS, "help": _help(field)}
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        if field.name.startswith("enable_"):
            short = flag.replace("--enable-", "--no-", 1)
            group.add_argument(
                short, dest=field.name, action="store_false", default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )
    elif kind is list:
        group.add_argument(flag, action=_Extend, nargs="+", metavar="TEXT", **common)
    else:
        group.add_argument(*names, type=_converter(hint), metavar=_metavar(field, hint), **common)


def _members(hint: Any) -> list[Any]:
    """The types that a hint allows, without None."""
    return [member for member in union_members(hint) if member is not types.NoneType]


def _kind(hint: Any) -> type:
    """bool, int, float, str or list."""
    main = next(member for member in _members(hint) if typing.get_origin(member) is not Literal)
    return cast(type, typing.get_origin(main) or main)


def _converter(hint: Any) -> Callable[[str], Any]:
    literals = [member for member in _members(hint) if typing.get_origin(member) is Literal]
    words = {word for literal in literals for word in typing.get_args(literal)}
    converters: dict[type, Callable[[str], Any]] = {int: parse_count, float: parse_number, str: str}
    convert = converters[_kind(hint)]
    return lambda text: text if text in words else convert(text)


def _metavar(field: dataclasses.Field[Any], hint: Any) -> str:
    choices, unit = field.metadata.get("choices"), field.metadata.get("unit")
    if choices:
        return "{" + ",".join(choices) + "}"
    if any(typing.get_origin(member) is dict for member in _members(hint)):
        return JSON
    return str(unit).upper() if unit else {int: "N", float: "X", str: "TEXT"}[_kind(hint)]


def _help(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata["help"]).replace("%", "%%")
    default = field.default
    if default in (None, dataclasses.MISSING) or "default:" in text:
        return text
    return f"{text} (default: {str(default).lower() if isinstance(default, bool) else default})"
