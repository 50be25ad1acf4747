"""Calls that are JSON objects with a name and arguments, for the formats that differ in what stands around them.

Arguments go through as they are written, from the brace that opens them to the one that closes it; only control
characters in strings, which JSON forbids and models write, are escaped.
"""

from __future__ import annotations

import json
import re

import msgspec

from octavo.text.tool_parsers.base import NotACall, Sink, Steps, ToolParser

_OUTSIDE = re.compile(r'[^"{}\[\]]+')  # of strings, in an object or array
_IN_STRING = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[^\s,{}\[\]\"]+")
_CLOSER = {"{": "}", "[": "]"}
_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}


class JsonCalls(ToolParser):
    def call_objects(self) -> Steps[None]:
        """One object, or a list of them."""
        yield from self.skip_blanks()
        if (yield from self.peek()) != "[":
            yield from self.call_object()
            return
        self.take()
        while True:
            yield from self.skip_blanks()
            yield from self.call_object()
            yield from self.skip_blanks()
            if (yield from self.expect(",]")) == "]":
                return

    def call_object(self, *, known_only: bool = False) -> Steps[None]:
        """With `known_only`, only one of the tools can be called: what stands around the object proves nothing."""
        yield from self.expect("{")
        name: str | None = None
        held: str | None = None  # arguments that stand before the name
        has_begun = False
        while True:
            yield from self.skip_blanks()
            key = yield from self.json_string()
            yield from self.skip_blanks()
            yield from self.expect(":")
            yield from self.skip_blanks()
            if has_begun:
                yield from self._skip_value()
            elif key == "name":
                name = yield from self.json_string()
                if known_only and name not in self.tools:
                    raise NotACall
            elif key not in ("arguments", "parameters"):
                yield from self._skip_value()
            elif name is not None and (yield from self.peek()) == "{":
                has_begun = True
                self.begin(name)
                yield from self.json_value(self.arguments)
                self.rest_of_call()
            else:
                held = yield from self._held_arguments()
            yield from self.skip_blanks()
            if (yield from self.expect(",}")) == "}":
                break
        if not has_begun:
            if name is None:
                raise NotACall
            self.begin(name)
            self.arguments(held or "{}")
        self.rest_of_call()

    def _held_arguments(self) -> Steps[str]:
        """In one piece: an object, or what is one when it is read once more; null is an empty one."""
        char = yield from self.peek()
        pieces: list[str] = []
        if char == "{":
            yield from self.json_value(pieces.append)
            return "".join(pieces)
        if char != '"':
            if (yield from self.word(_SCALAR)) != "null":
                raise NotACall
            return "{}"
        text = yield from self.json_string()
        if not is_json_object(text):
            raise NotACall
        return text

    def json_string(self) -> Steps[str]:
        """What it stands for."""
        pieces: list[str] = []
        if (yield from self.peek()) != '"':
            raise NotACall
        yield from self._copy_string(pieces.append)
        try:
            return str(json.loads("".join(pieces)))
        except ValueError:
            raise NotACall from None

    def json_value(self, sink: Sink) -> Steps[None]:
        """An object or array, as it comes. NotACall where its brackets do not match."""
        closers: list[str] = []
        while True:
            char = yield from self.peek()
            if char == '"':
                yield from self._copy_string(sink)
            elif char in _CLOSER:
                closers.append(_CLOSER[char])
                sink(self.take())
            elif char in "}]":
                if closers.pop() != char:
                    raise NotACall
                sink(self.take())
                if not closers:
                    return
            else:
                yield from self.run(_OUTSIDE, sink)

    def _copy_string(self, sink: Sink) -> Steps[None]:
        sink(self.take())
        while True:
            char = yield from self.peek()
            if char == '"':
                sink(self.take())
                return
            if char == "\\":
                sink(self.take())
                yield from self.peek()
                sink(self.take())
            else:
                yield from self.run(_IN_STRING, lambda text: sink(text.translate(_ESCAPES)))

    def _skip_value(self) -> Steps[None]:
        char = yield from self.peek()
        if char == '"':
            yield from self.json_string()
        elif char in _CLOSER:
            yield from self.json_value(lambda text: None)
        else:
            yield from self.word(_SCALAR)


def is_json_object(text: str) -> bool:
    """As strictly as a body is read: no NaN, no lone surrogates."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (ValueError, RecursionError):
        return False
