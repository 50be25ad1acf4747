"""<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes 2 and 3, Qwen2.5, Qwen3, and many others."""

from __future__ import annotations

from octavo.text.tool_parsers.base import Steps
from octavo.text.tool_parsers.json_calls import JsonCalls

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(JsonCalls):
    special_tokens = (BEGIN, END)

    @classmethod
    def fits(cls, template: str) -> bool:
        return BEGIN in template and "<arg_key>" not in template

    def read(self) -> Steps[None]:
        while (yield from self.content_until(BEGIN)):
            yield from self.attempt(self._call())

    def _call(self) -> Steps[None]:
        yield from self.call_objects()
        yield from self.skip_blanks()
        yield from self.next_marker(END)  # it may be missing
