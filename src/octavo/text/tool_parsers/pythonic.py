"""[f(a=1), g(b="x")]: a Python list of calls with keywords, which is the whole answer (Llama 3.2 and 4, ToolACE).

A call is held until its parenthesis closes: only then is it known what Python makes of it. It is read as a syntax tree
whose values must be literals; nothing is ever evaluated. Nothing marks a call but its form, so that its name must be
that of a tool.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from octavo.text.tool_parsers.base import NotACall, Steps, ToolParser

MAX_DEPTH = 64  # of brackets; Python's own parser has a limit too, but a stack that ends is no good place to meet it
_NAME = re.compile(r"[\w.]+")
_PLAIN = re.compile(r"[^\"'()\[\]{}]+")
_CLOSER = {"(": ")", "[": "]", "{": "}"}
_IN_STRING = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_JSON_WORDS = {"true": True, "false": False, "null": None}  # models write them too


class PythonicParser(ToolParser):
    def read(self) -> Steps[None]:
        yield from self.skip_leading_blanks()
        if (yield from self.more()) and (yield from self.peek()) == "[":
            yield from self.attempt(self._calls())
        yield from self.content_to_end()

    def _calls(self) -> Steps[None]:
        yield from self.expect("[")
        while True:
            yield from self.skip_blanks()
            name = yield from self.word(_NAME)
            if name not in self.tools:
                raise NotACall
            text = yield from self._parenthesis()
            arguments = json_arguments(text)
            self.begin(name)
            self.arguments(arguments)
            self.rest_of_call()
            yield from self.skip_blanks()
            if (yield from self.expect(",]")) == "]":
                return

    def _parenthesis(self) -> Steps[str]:
        """From its opening to its end."""
        pieces: list[str] = []
        closers: list[str] = []
        if (yield from self.peek()) != "(":
            raise NotACall
        while True:
            char = yield from self.peek()
            if char in _IN_STRING:
                yield from self._string(char, pieces)
            elif char in _CLOSER:
                closers.append(_CLOSER[char])
                pieces.append(self.take())
                if len(closers) > MAX_DEPTH:
                    raise NotACall
            elif char in ")]}":
                if closers.pop() != char:
                    raise NotACall
                pieces.append(self.take())
                if not closers:
                    return "".join(pieces)
            else:
                yield from self.run(_PLAIN, pieces.append)

    def _string(self, quote: str, pieces: list[str]) -> Steps[None]:
        pieces.append(self.take())
        while True:
            char = yield from self.peek()
            if char == quote:
                pieces.append(self.take())
                return
            if char == "\\":
                pieces.append(self.take())
                yield from self.peek()
                pieces.append(self.take())
            else:
                yield from self.run(_IN_STRING[quote], pieces.append)


def json_arguments(parenthesis: str) -> str:
    """The keywords of a call as a JSON object. NotACall for what is none, or has values that JSON cannot hold."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of backslashes that mean nothing
            call = ast.parse(f"f{parenthesis}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            raise NotACall
        values = {str(each.arg): _literal(each.value) for each in call.keywords}
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        text.encode()  # not the half of a surrogate pair
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise NotACall from None
    return text


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):  # a bool is an int
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=word) if word in _JSON_WORDS:
            return _JSON_WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            names = [key.value for key in keys if isinstance(key, ast.Constant)]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_literal, values), strict=True))
    raise NotACall
