"""From a word to a subcommand's module, imported only then. Used for `octavo …` and for `octavo bench …`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import NamedTuple

import octavo
from octavo.cli.parser import nearest
from octavo.errors import ConfigError


class Command(NamedTuple):
    """`module` has `run(argv: list[str]) -> int`, an exit code."""

    name: str
    module: str
    help: str


def dispatch(prog: str, summary: str, commands: Sequence[Command], argv: Sequence[str]) -> int:
    """Calls the command that argv[0] names with the rest. Without a name, or with --help, lists the commands."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview(prog, summary, commands))
        return 0
    if argv[0] == "--version":
        print(f"octavo {octavo.__version__}")
        return 0
    for command in commands:
        if command.name == argv[0]:
            return int(importlib.import_module(command.module).run(list(argv[1:])))
    hint = nearest(argv[0], [command.name for command in commands])
    raise ConfigError(f"`{prog}` has no command {argv[0]!r}{hint} (see `{prog} --help`)")


def _overview(prog: str, summary: str, commands: Sequence[Command]) -> str:
    width = max(len(command.name) for command in commands)
    rows = [f"  {command.name:{width}}  {command.help}" for command in commands]
    lines = [f"usage: {prog} COMMAND [options]", "", summary, "", *rows, "", f"{prog} COMMAND --help says more."]
    return "\n".join(lines)
