"""`octavo complete`: continues a text as it stands, without a chat template; once, or text by text in the terminal."""

from __future__ import annotations

import sys

from octavo.cli.parser import Parser
from octavo.cli.sources import Source, add_sampling_options, add_source_options, open_source, sampling_from_args
from octavo.cli.terminal import Style, show_answer
from octavo.errors import OctavoError


def run(argv: list[str]) -> int:
    parser = Parser("octavo complete", "Continue a text.", "[PROMPT] [options]")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="continue this and leave; also read from a pipe")
    parser.add_argument("--prompt", dest="prompt_option", metavar="TEXT", help="the same")
    add_source_options(parser)
    add_sampling_options(parser)
    args = parser.parse_args(argv)
    prompt = args.prompt if args.prompt_option is None else args.prompt_option
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    source = open_source(args)
    try:
        if prompt is not None:
            _complete(source, prompt, sampling_from_args(args))
        else:
            _loop(source, sampling_from_args(args))
    finally:
        source.close()
    return 0


def _complete(source: Source, prompt: str, sampling: dict[str, object]) -> None:
    answer = show_answer(source.complete(prompt, sampling), sys.stdout)
    if sys.stdout.isatty():
        Style().line(f"  {answer.figures()}", "dim")


def _loop(source: Source, sampling: dict[str, object]) -> None:
    style = Style()
    style.line(f"octavo complete · {source.where}", "bold")
    style.line("Each line is continued by itself; Ctrl-C stops one, Ctrl-D leaves.", "dim")
    while True:
        style.line("")
        try:
            prompt = input(style.prompt("> "))
            if prompt:
                _complete(source, prompt, sampling)
        except OctavoError as error:
            style.line(f"  {error.message}", "red")
        except (EOFError, KeyboardInterrupt):
            style.line("")
            return
