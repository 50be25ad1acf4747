"""An answer as parts, whether it comes whole or in pieces: text, and calls of tools with their ids.

The one place where what a parser finds becomes what routes tell. Knows no route.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field

from octavo.request import CompletionOutput
from octavo.server.tools import Tools
from octavo.text.tool_parsers.base import CallBegin, Content

_ID_LENGTH = 24  # characters behind the prefix
_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True, eq=False)
class Part:
    """Of an answer: text, or a call, which has a name and whose text is its arguments."""

    position: int  # among the parts
    name: str | None = None
    id: str = ""  # a call's
    index: int = 0  # among the calls
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class PartNews:
    part: Part
    text: str  # more of it
    is_new: bool


class AnswerReader:
    """One sample's answer; `parts` are those that have come. `id_prefix` is of the calls' ids."""

    def __init__(self, tools: Tools, id_prefix: str) -> None:
        self.parts: list[Part] = []
        self._parser = tools.parser()
        self._max_calls = None if tools.parallel else 1
        self._id_prefix = id_prefix
        self._num_calls = 0
        self._call: Part | None = None  # the one that is being read, if it is wanted

    def take(self, sample: CompletionOutput) -> list[PartNews]:
        """What a delta of the sample brings, or all of it; in order, and a part at most once in a row."""
        if self._parser is None:
            return self._more_text(sample.text, []) if sample.text else []
        events = self._parser.feed(sample.text) if sample.text else []
        if sample.finish_reason is not None:
            events += self._parser.finish()
        news: list[PartNews] = []
        for event in events:
            if isinstance(event, Content):
                self._more_text(event.text, news)
            elif isinstance(event, CallBegin):
                self._begin_call(event.name, news)
            elif self._call is not None:
                self._tell(self._call, event.text, news)
        return news

    @property
    def calls(self) -> list[Part]:
        return [part for part in self.parts if part.name is not None]

    @property
    def text(self) -> str:
        """All but the calls."""
        return "".join(part.text for part in self.parts if part.name is None)

    def _begin_call(self, name: str, news: list[PartNews]) -> None:
        index, self._call = self._num_calls, None
        if self._max_calls is None or index < self._max_calls:
            self._call = Part(len(self.parts), name, self._new_id(), index)
            self._begin(self._call, news)
        self._num_calls += 1

    def _more_text(self, text: str, news: list[PartNews]) -> list[PartNews]:
        if not self.parts or self.parts[-1].name is not None:
            self._begin(Part(len(self.parts)), news)
        self._tell(self.parts[-1], text, news)
        return news

    def _begin(self, part: Part, news: list[PartNews]) -> None:
        self.parts.append(part)
        news.append(PartNews(part, "", is_new=True))

    def _tell(self, part: Part, text: str, news: list[PartNews]) -> None:
        part.pieces.append(text)
        if news and news[-1].part is part:
            news[-1].text += text
        else:
            news.append(PartNews(part, text, is_new=False))

    def _new_id(self) -> str:
        assert self._parser is not None
        length = self._parser.id_length
        prefix = self._id_prefix if length is None else ""
        return prefix + "".join(secrets.choice(_ID_LETTERS) for _ in range(length or _ID_LENGTH))
