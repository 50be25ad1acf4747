"""`octavo chat`: a conversation in the terminal, or one question and its answer.

octavo chat                        with the server at http://127.0.0.1:8000
octavo chat --model smollm2        with a model in this process
octavo chat "Why is the sky blue?" one question; also from a pipe
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, TextIO

from octavo.cli.parser import Parser, nearest
from octavo.cli.sources import (
    Message,
    Source,
    add_sampling_options,
    add_source_options,
    open_source,
    sampling_from_args,
)
from octavo.cli.terminal import Style, show_answer
from octavo.errors import OctavoError

# A model without sampling defaults of its own samples its whole vocabulary at temperature 1, and a small one that draws
# one unlikely token drifts off for good. The model's own defaults hold for all else; --min-p 0 turns it off.
DEFAULT_SAMPLING = {"min_p": 0.1}

COMMANDS = (
    ("/reset", "forget the conversation"),
    ("/system TEXT", "set the system prompt; without TEXT: show it"),
    ("/help", "show this"),
    ("/quit", "leave (also Ctrl-D)"),
)


def run(argv: list[str]) -> int:
    parser = Parser("octavo chat", "Chat with a model in the terminal.", "[MESSAGE] [options]")
    parser.add_argument("message", nargs="?", metavar="MESSAGE", help="answer this and leave; also read from a pipe")
    parser.add_argument("--message", dest="message_option", metavar="TEXT", help="the same")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    add_source_options(parser)
    add_sampling_options(parser)
    args = parser.parse_args(argv)
    question = args.message if args.message_option is None else args.message_option
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read().strip()
    source = open_source(args)
    try:
        conversation = Conversation(source, DEFAULT_SAMPLING | sampling_from_args(args), sys.stdout, args.system)
        if question is not None:
            conversation.answer(question)
        else:
            conversation.talk(input)
    finally:
        source.close()
    return 0


class Conversation:
    """The messages so far, and the commands that change them."""

    def __init__(self, source: Source, sampling: dict[str, Any], out: TextIO, system: str | None = None) -> None:
        self._source, self._sampling, self._out = source, sampling, out
        self._style = Style(out)
        self._system = system
        self._turns: list[Message] = []

    def talk(self, read_line: Callable[[str], str]) -> None:
        """Reads lines until /quit or the end of the input. `read_line` is input(), or a stand-in."""
        _enable_line_editing()
        self._style.line(f"octavo chat · {self._source.where}", "bold")
        self._style.line("/help lists the commands, Ctrl-C stops an answer, a \\ at its end continues a line.", "dim")
        while True:
            try:
                line = self._read(read_line)
            except EOFError:
                self._style.line("")
                return
            except KeyboardInterrupt:
                self._style.line("  /quit or Ctrl-D leaves", "dim")
                continue
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer_or_complain(line)

    def answer(self, question: str) -> None:
        """Puts the question, shows the answer, remembers both. Raises OctavoError, and then remembers neither."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        turn = {"role": "user", "content": question}
        answer = show_answer(self._source.chat([*system, *self._turns, turn], self._sampling), self._out)
        self._turns += [turn, {"role": "assistant", "content": answer.text}]
        if self._out.isatty():
            self._style.line(f"  {answer.figures()}", "dim")

    def _read(self, read_line: Callable[[str], str]) -> str:
        self._style.line("")
        lines = [read_line(self._style.prompt("> "))]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read_line(self._style.prompt("… ")))
        return "\n".join(lines).strip()

    def _answer_or_complain(self, question: str) -> None:
        try:
            self.answer(question)
        except OctavoError as error:
            self._style.line(f"  {error.message}", "red")

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/help":
            for command, text in COMMANDS:
                self._style.line(f"  {command:14}{text}", "dim")
        elif word == "/reset":
            self._turns.clear()
            self._style.line("  the conversation is forgotten", "dim")
        elif word == "/system":
            self._system = rest.strip() or self._system
            self._style.line(f"  system prompt: {self._system or 'the model’s own'}", "dim")
        else:
            self._style.line(f"  no command {word}{nearest(word, [name.split()[0] for name, _ in COMMANDS])}", "red")


def _enable_line_editing() -> None:
    """Importing readline is what gives input() its history and arrow keys; some Pythons lack it."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
