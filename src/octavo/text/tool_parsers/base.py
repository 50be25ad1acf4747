"""Tool calls in a model's text, found while it comes: what all formats share.

A parser is fed text in pieces of any size and says what each piece brought: content, the beginning of a call, or more
of its arguments. What it says in all does not depend on the pieces. It holds back only what may yet be a marker, or the
head of a call before its name is known. The work is linear in the text: nothing is read twice.

    I will look. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    |<-content->||<------- head ------->|             |<------>| arguments, as they come

What only looks like a call is content. A head that proves wrong is given as the text that it is; once a call has begun
its arguments are what the model wrote, also where that is broken or cut off. Blanks at the beginning of the text and
behind a call are content only where more content follows.

A format is a subclass with one generator, `read`, that goes through the whole text; it waits for more in `more` and in
what is built on it. Knows no HTTP and no request.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # what yields waits for text
Sink = Callable[[str], None]

MAX_NAME_LENGTH = 256  # characters: two names of the longest that a request may give, and what joins them
NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_BLANKS = re.compile(r"\s+")


@dataclass(slots=True)
class Content:
    text: str


@dataclass(slots=True)
class CallBegin:
    name: str


@dataclass(slots=True)
class CallArguments:
    """More of the arguments, which are JSON, of the call that began last."""

    text: str


Event = Content | CallBegin | CallArguments


class NotACall(Exception):
    """What was read is no call, or is none from here on."""


class ToolParser(ABC):
    """`tools` are those that may be called: their names, and the JSON schemas of their parameters."""

    # Markers that a vocabulary may have as special tokens: their text is to be shown.
    special_tokens: ClassVar[tuple[str, ...]] = ()
    # The ids of calls, where the model's template asks for a certain form: characters. None: any will do.
    id_length: ClassVar[int | None] = None

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.tools = tools
        self._text = ""  # not yet read from `_at` on; short but for what just came
        self._at = 0
        self._ended = False
        self._record: list[str] | None = None  # what has been read of a possible call, to be given as content
        self._blanks: list[str] = []  # content that waits for more
        self._at_edge = True  # of the text or of a call
        self._has_begun = False  # a call, ever
        self._events: list[Event] = []
        self._steps = self.read()

    @classmethod
    def fits(cls, template: str) -> bool:
        """Whether a chat template speaks of calls in this format."""
        return False

    def feed(self, text: str) -> list[Event]:
        """What more text brings."""
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._go()

    def finish(self) -> list[Event]:
        """No text follows."""
        self._ended = True
        events = self._go()
        if self._blanks and not self._has_begun:
            events.append(Content("".join(self._blanks)))
        return events

    @abstractmethod
    def read(self) -> Steps[None]:
        """Reads all there will be."""

    def _go(self) -> list[Event]:
        """The new events; of neighbours of one kind, one."""
        next(self._steps, None)
        events: list[Event] = []
        for kind, group in groupby(self._events, type):
            if kind is CallBegin:
                events += group
            else:
                events.append(kind("".join(each.text for each in group if not isinstance(each, CallBegin))))
        self._events = []
        return events

    # What comes out

    def content(self, text: str) -> None:
        if self._at_edge:
            self._blanks.append(text)
            if not text or text.isspace():
                return
            text, self._blanks, self._at_edge = "".join(self._blanks), [], False
        if text:
            self._events.append(Content(text))

    def begin(self, name: str) -> None:
        """The head is read: from here on it is a call. NotACall for what cannot be a name."""
        if len(name) > MAX_NAME_LENGTH or not NAME.fullmatch(name):
            raise NotACall
        self.keep_no_record()
        self._blanks, self._at_edge, self._has_begun = [], True, True
        self._events.append(CallBegin(name))

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(text))

    # What goes in

    def more(self) -> Steps[bool]:
        """Waits until there is a character to read; False at the end of the text."""
        while self._at == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character. NotACall at the end of the text: what is being read is incomplete."""
        if not (yield from self.more()):
            raise NotACall
        return self._text[self._at]

    def take(self, num_chars: int = 1) -> str:
        """Reads what is known to be there."""
        text = self._text[self._at : self._at + num_chars]
        self._at += num_chars
        if self._record is not None:
            self._record.append(text)
        return text

    def expect(self, characters: str) -> Steps[str]:
        """The next character, which must be one of these."""
        if (yield from self.peek()) not in characters:
            raise NotACall
        return self.take()

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Steps[None]:
        """All that matches `pattern`, a repeated set of characters, as it comes."""
        while (yield from self.more()) and (found := pattern.match(self._text, self._at)):
            sink(self.take(len(found[0])))

    def word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """The same in one piece. NotACall where there is none."""
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        if not pieces:
            raise NotACall
        return "".join(pieces)

    def skip_blanks(self) -> Steps[None]:
        yield from self.run(_BLANKS, lambda blanks: None)

    def skip_leading_blanks(self) -> Steps[None]:
        """Those are content."""
        yield from self.run(_BLANKS, self.content)

    def next_marker(self, *markers: str) -> Steps[str]:
        """Reads the one of `markers` that stands here; "" where none does."""
        while True:
            for marker in markers:
                if self._text.startswith(marker, self._at):
                    return self.take(len(marker))
            rest = self._text[self._at : self._at + max(map(len, markers))]
            if self._ended or not any(marker.startswith(rest) for marker in markers):
                return ""
            yield

    def until(self, sink: Sink, *markers: str) -> Steps[str]:
        """Gives the text before the first of `markers` away as it comes, and stops at the marker, which it returns; ""
        at the end of the text."""
        pattern = re.compile("|".join(map(re.escape, markers)))
        while True:
            found = pattern.search(self._text, self._at)
            end = self._possible_start(markers) if found is None else found.start()
            if end > self._at:
                sink(self.take(end - self._at))
            if found is not None:
                return found[0]
            if self._ended:
                if self._at < len(self._text):
                    sink(self.take(len(self._text) - self._at))
                return ""
            yield

    def _possible_start(self, markers: tuple[str, ...]) -> int:
        """Where the longest end of the text begins that is the beginning of a marker."""
        start = max(self._at, len(self._text) - max(map(len, markers)) + 1)
        while not any(marker.startswith(self._text[start:]) for marker in markers):
            start += 1
        return start

    # Calls among content

    def content_until(self, *markers: str) -> Steps[str]:
        """Content up to one of `markers`, with which a call may begin; "" when all has been read."""
        marker = yield from self.until(self.content, *markers)
        if marker:
            self._record = []
            self.take(len(marker))
        return marker

    def content_to_end(self) -> Steps[None]:
        """What is left is content."""
        while (yield from self.more()):
            self.content(self.take(len(self._text) - self._at))

    def attempt(self, call: Steps[None]) -> Steps[None]:
        """Reads one call or several; what turns out to be none is content."""
        if self._record is None:
            self._record = []
        try:
            yield from call
        except NotACall:
            record, self._record = self._record, None
            self.content("".join(record or ()))
        self._record = None

    def keep_no_record(self) -> None:
        """What is read from here on goes out as arguments."""
        self._record = None

    def rest_of_call(self) -> None:
        """From here on, what is wrong is content again."""
        self._record = []

    @property
    def is_cut(self) -> bool:
        """The text ended within what may have been a marker."""
        return self._ended
