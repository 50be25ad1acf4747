"""The argument parser of every subcommand: argparse, with one-line errors that name the nearest option."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from octavo.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Options have to be written out in full; `_` for `-` in a name is accepted. Raises ConfigError on a wrong line.

    `not_yet` are names that users may know from elsewhere, and that are refused in other words than a slip."""

    def __init__(self, prog: str, description: str, usage: str, not_yet: Collection[str] = ()) -> None:
        super().__init__(
            prog=prog,
            description=description,
            usage=f"{prog} {usage}",
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
        )
        self._not_yet = not_yet

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        return super().parse_args(list(self._checked(args)), namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def option(self, name: str) -> argparse.Action:
        """The option that is called so, with its dashes. Raises ConfigError where there is none."""
        dashed = name.replace("_", "-")
        if action := self._option_string_actions.get(dashed):
            return action
        if dashed.partition(".")[0] in self._not_yet:
            raise ConfigError(f"{name} is not supported yet (see `{self.prog} --help`)")
        raise ConfigError(
            f"unknown option {name}{nearest(dashed, self._option_string_actions)} (see `{self.prog} --help`)"
        )

    def _checked(self, args: Sequence[str]) -> Iterable[str]:
        """The arguments with option names normalised; an unknown option is an error before anything else is."""
        for i, word in enumerate(args):
            if word == "--":
                yield from args[i:]
                return
            if not re.match(r"--?[A-Za-z]", word):
                yield word
                continue
            name, equals, value = word.partition("=")
            self.option(name)
            yield name.replace("_", "-") + equals + value


def output_file(text: str) -> Path:
    """The type of an option that names a file to write: what is wrong with it is said before minutes go into what
    should stand there."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def nearest(word: str, words: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing where no word comes close."""
    import difflib

    close = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {close[0]}?" if close else ""
