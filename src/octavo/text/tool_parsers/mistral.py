"""[TOOL_CALLS][{"name": …, "arguments": {…}}, …] of Mistral's earlier models, [TOOL_CALLS]name{…} and
[TOOL_CALLS]name[ARGS]{…} of its later ones."""

from __future__ import annotations

import re

from octavo.text.tool_parsers.base import NAME, NotACall, Steps
from octavo.text.tool_parsers.json_calls import JsonCalls

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID = re.compile(r"\w+")


class MistralParser(JsonCalls):
    special_tokens = (BEGIN, ID, ARGUMENTS)
    id_length = 9  # its templates refuse others

    @classmethod
    def fits(cls, template: str) -> bool:
        return BEGIN in template

    def read(self) -> Steps[None]:
        while (yield from self.content_until(BEGIN)):
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps[None]:
        yield from self.skip_blanks()
        if (yield from self.peek()) in "[{":
            yield from self.call_objects()
            return
        name = yield from self.word(NAME)
        if (yield from self.next_marker(ID, ARGUMENTS)) == ID:
            yield from self.word(_ID)
            yield from self.next_marker(ARGUMENTS)
        yield from self.skip_blanks()
        if (yield from self.peek()) != "{":
            raise NotACall
        self.begin(name)
        yield from self.json_value(self.arguments)
