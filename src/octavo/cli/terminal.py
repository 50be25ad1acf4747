"""How answers look in a terminal: streamed text, a dim line of figures, colours only where a terminal shows them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TextIO

# Control characters that a model may emit but a terminal must not obey; newline and tab pass.
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


@dataclass(slots=True)
class Piece:
    """News of an answer: text, and at the end the number of tokens and why it ended."""

    text: str = ""
    num_tokens: int | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class Answer:
    text: str
    num_tokens: int
    finish_reason: str | None  # None: the user stopped it
    first_seconds: float  # from asking to the first text
    seconds: float  # from asking to the end

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first, which is a matter of the prompt."""
        rest = self.seconds - self.first_seconds
        return (self.num_tokens - 1) / rest if self.num_tokens > 1 and rest > 0 else 0.0

    def figures(self) -> str:
        parts = [f"{self.num_tokens} tokens"]
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        parts.append(f"first after {self.first_seconds:.2f} s")
        if self.finish_reason is None:
            parts.append("stopped")
        elif self.finish_reason != "stop":
            parts.append(f"ended by {self.finish_reason}")
        return " · ".join(parts)


def show_answer(pieces: Iterator[Piece], out: TextIO) -> Answer:
    """Writes an answer as it comes. Ctrl-C ends the answer, not the program: what came until then is returned."""
    began = time.monotonic()
    first, texts, num_pieces = None, [], 0
    num_tokens, finish_reason = None, None
    try:
        with closing(pieces):  # type: ignore[type-var]
            for piece in pieces:
                if piece.text:
                    first = first or time.monotonic()
                    num_pieces += 1
                    texts.append(piece.text)
                    out.write(piece.text.translate(_CONTROL) if out.isatty() else piece.text)
                    out.flush()
                num_tokens = piece.num_tokens if piece.num_tokens is not None else num_tokens
                finish_reason = piece.finish_reason or finish_reason
    except KeyboardInterrupt:
        finish_reason = None
    ended = time.monotonic()
    text = "".join(texts)
    if not text.endswith("\n"):
        out.write("\n")
        out.flush()
    return Answer(
        text=text,
        num_tokens=num_pieces if num_tokens is None else num_tokens,
        finish_reason=finish_reason,
        first_seconds=(first or ended) - began,
        seconds=ended - began,
    )


class Style:
    """Marks text for the terminal behind `out`; plain where it is none, or where NO_COLOR is set (rich decides)."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        from rich.console import Console

        self._console = Console(file=out, highlight=False)

    def line(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, soft_wrap=True)

    def prompt(self, text: str) -> str:
        """A prompt for input(), its colour marked as having no width so that line editing keeps its place."""
        if self._console.color_system is None:
            return text
        return f"\001\033[1;32m\002{text}\001\033[0m\002"
