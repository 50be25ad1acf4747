"""Chat messages in the one plain shape that templates are written for.

Content is a string, absent values are absent, tool-call arguments are objects. Every complaint names the place
(`messages[i].content[j].type`). This file knows the OpenAI message format and nothing of templates.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import InvalidRequestError, refuse

_TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # type of a content part -> the key of its text
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names in use for one thing, the standard one first


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies: the caller's messages stay as they are. Raises InvalidRequestError."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        refuse("messages", messages, "a list of messages")
    if not messages:
        raise InvalidRequestError("messages is empty; it must hold at least one message", param="messages")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        refuse(place, message, "an object with role and content")
    plain = {key: value for key, value in message.items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        refuse(f"{place}.role", role, "a non-empty string, such as 'user'")
    plain["content"] = _plain_content(plain.get("content"), role, f"{place}.content")
    if "tool_calls" in plain:
        plain["tool_calls"] = _plain_tool_calls(plain["tool_calls"], f"{place}.tool_calls")
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain_content(content: Any, role: str, place: str) -> str:
    if isinstance(content, str):
        return content
    if role == "assistant" and content in (None, []):
        return ""  # a turn that only calls tools
    if not isinstance(content, list) or not content:
        only = "a string or a list of parts" if role == "assistant" else "a string or a non-empty list of parts"
        refuse(place, content, only)
    return "\n".join(_text_of_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _text_of_part(part: Any, place: str) -> str:
    if not isinstance(part, Mapping):
        refuse(place, part, "an object such as {'type': 'text', 'text': …}")
    kind = part.get("type")
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        refuse(f"{place}.type", kind, "'text' (this model reads text only)")
    if not isinstance(part.get(key), str):
        refuse(f"{place}.{key}", part.get(key), "a string")
    return str(part[key])


def _plain_tool_calls(calls: Any, place: str) -> list[Any]:
    if not isinstance(calls, list):
        refuse(place, calls, "a list of tool calls")
    return [_plain_tool_call(call, f"{place}[{i}]") for i, call in enumerate(calls)]


def _plain_tool_call(call: Any, place: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        refuse(place, call, "an object with a function")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # no JSON, or nested too deeply: refused below
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        refuse(f"{place}.function.arguments", function["arguments"], "an object, or a string with one as JSON")
    return {**call, "function": {**function, "arguments": arguments}}
