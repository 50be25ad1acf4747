"""<|tool_call|>[{"name": …, "arguments": {…}}, …]: Granite 3."""

from __future__ import annotations

from octavo.text.tool_parsers.base import Steps
from octavo.text.tool_parsers.json_calls import JsonCalls

BEGIN = "<|tool_call|>"


class GraniteParser(JsonCalls):
    special_tokens = (BEGIN,)

    @classmethod
    def fits(cls, template: str) -> bool:
        return BEGIN in template

    def read(self) -> Steps[None]:
        while (yield from self.content_until(BEGIN, "<tool_call>")):
            yield from self.attempt(self.call_objects())
