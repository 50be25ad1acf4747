"""`octavo`: the table of subcommands, and what becomes of errors: one line on stderr and an exit code, no traceback.

Exit codes: 0 done, 1 it failed, 2 the command line is wrong, 130 interrupted. OCTAVO_DEBUG=1 shows tracebacks.
Nothing heavy is imported here: a subcommand's module is imported when it is called.
"""

from __future__ import annotations

import os
import sys

from octavo.cli.dispatch import Command, dispatch
from octavo.config import environment
from octavo.errors import OctavoError

COMMANDS = (
    Command("serve", "octavo.cli.serve", "serve a model over the OpenAI HTTP API"),
    Command("chat", "octavo.cli.chat", "chat with a model in the terminal"),
    Command("complete", "octavo.cli.complete", "continue a text"),
    Command("top", "octavo.cli.top", "watch what a server does"),
    Command("dashboard", "octavo.cli.dashboard", "print a Grafana dashboard for /metrics"),
    Command("bench", "octavo.cli.bench", "measure an engine, its parts, or a server"),
    Command("inspect", "octavo.cli.inspect", "show a model, its memory plan and its native program"),
    Command("collect-env", "octavo.cli.collect_env", "describe this machine, for a bug report"),
)


def main(argv: list[str] | None = None) -> int:
    """Runs one command line (default: the process's) and returns the exit code."""
    try:
        code = dispatch("octavo", "LLM inference and serving.", COMMANDS, sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has left; without this, the interpreter would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OctavoError as error:
        if environment("DEBUG"):
            raise
        print(f"octavo: error: {error.message}", file=sys.stderr)
        return error.exit_code
