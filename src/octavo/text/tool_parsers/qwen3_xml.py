"""<tool_call><function=name><parameter=key>value</parameter></function></tool_call>: Qwen3-Coder.

Values are text; what JSON they stand for, the tool's schema says. Text goes through as it comes, all else when it is
complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from octavo.text.tool_parsers.base import NotACall, Steps, ToolParser

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_KEY = re.compile(r"[^<>]+")
_TYPES: Mapping[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class Qwen3XmlParser(ToolParser):
    special_tokens = (CALL, CALL_END)

    @classmethod
    def fits(cls, template: str) -> bool:
        return FUNCTION in template and PARAMETER in template

    def read(self) -> Steps[None]:
        while marker := (yield from self.content_until(CALL, FUNCTION)):
            yield from self.attempt(self._call(marker))

    def _call(self, marker: str) -> Steps[None]:
        if marker == CALL:
            yield from self.skip_blanks()
            if not (yield from self.next_marker(FUNCTION)):
                raise NotACall
        name = (yield from self.word(_KEY)).strip()
        yield from self.expect(">")
        self.begin(name)
        self.arguments("{")
        types = _types_of(self.tools.get(name, {}))
        yield from self._parameters(types)
        yield from self.skip_blanks()
        yield from self.next_marker(CALL_END)  # the model leaves it out now and then

    def _parameters(self, types: Mapping[str, frozenset[str]]) -> Steps[None]:
        separator = ""
        while True:
            self.rest_of_call()
            yield from self.skip_blanks()
            yield from self.peek()
            marker = yield from self.next_marker(PARAMETER, FUNCTION_END, CALL_END)
            if marker != PARAMETER:
                if marker or not self.is_cut:
                    self.arguments("}")
                if not marker:
                    raise NotACall
                return
            key = (yield from self.word(_KEY)).strip()
            yield from self.expect(">")
            opening = f"{separator}{_as_json(key)}: "
            separator = ", "
            allowed = types.get(key, frozenset({"string"}))
            if allowed == {"string"}:
                self.keep_no_record()
                self.arguments(opening + '"')
                yield from self._value(lambda text: self.arguments(_as_json(text)[1:-1]))
                self.arguments('"')
            else:
                pieces: list[str] = []
                yield from self._value(pieces.append)
                self.arguments(opening + as_typed("".join(pieces), allowed))

    def _value(self, sink: Callable[[str], None]) -> Steps[None]:
        """A value, without the line breaks that set it off from its markers."""
        if (yield from self.peek()) == "\n":
            self.take()
        held = ""

        def but_last_break(text: str) -> None:
            nonlocal held
            text = held + text
            held = "\n" if text.endswith("\n") else ""
            sink(text.removesuffix("\n"))

        if not (yield from self.until(but_last_break, PARAMETER_END)):
            sink(held)
            raise NotACall
        self.take(len(PARAMETER_END))


def as_typed(text: str, allowed: frozenset[str]) -> str:
    """The JSON that `text` stands for where one of the types `allowed` is wanted; else a string."""
    text = _PYTHON_WORDS.get(text.strip(), text)
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return _as_json(text)
    kinds = _TYPES[type(value)]
    return text.strip() if kinds != ("string",) and not allowed.isdisjoint(kinds) else _as_json(text)


def _types_of(schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """By parameter: the JSON types that it may have. Where a schema says none, text."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {key: _allowed(each) for key, each in properties.items()}


def _allowed(schema: Any) -> frozenset[str]:
    if not isinstance(schema, dict):
        return frozenset({"string"})
    if "$ref" in schema:
        return frozenset({"string", "object", "array"})
    kinds = schema.get("type")
    found = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else ():
            kind = option.get("type") if isinstance(option, dict) else None
            found |= {kind} if isinstance(kind, str) else set()
    return frozenset(found or {"string"})


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
