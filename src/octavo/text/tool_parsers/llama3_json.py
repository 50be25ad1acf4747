"""{"name": …, "parameters": {…}}, several separated by semicolons, with or without <|python_tag|> before: Llama 3.1 and
3.2.

Without the tag an answer that is such an object from its first character on is a call, if its name is a tool's: any
other is an answer in JSON.
"""

from __future__ import annotations

from octavo.text.tool_parsers.base import Steps
from octavo.text.tool_parsers.json_calls import JsonCalls

BEGIN = "<|python_tag|>"


class Llama3JsonParser(JsonCalls):
    special_tokens = (BEGIN,)

    @classmethod
    def fits(cls, template: str) -> bool:
        return '"parameters": dictionary of argument name' in template

    def read(self) -> Steps[None]:
        yield from self.skip_leading_blanks()
        if (yield from self.more()) and (yield from self.peek()) == "{":
            yield from self.attempt(self._calls(known_only=True))
        while (yield from self.content_until(BEGIN)):
            yield from self.attempt(self._calls(known_only=False))

    def _calls(self, *, known_only: bool) -> Steps[None]:
        yield from self.skip_blanks()
        yield from self.call_object(known_only=known_only)
        yield from self.skip_blanks()
        while (yield from self.next_marker(";")):
            yield from self.skip_blanks()
            yield from self.call_object(known_only=known_only)
            yield from self.skip_blanks()
