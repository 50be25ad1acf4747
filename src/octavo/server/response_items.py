"""The input of the Responses API as plain messages: a string, or items. Of items it knows messages, of content text."""

from __future__ import annotations

from typing import Any

from octavo.server.fields import mapping, parse, refuse
from octavo.server.protocol_responses import InputMessage, InputRefusal, InputText, ResponsesRequest


def input_messages(asked: ResponsesRequest, *, allow_unknown: bool) -> list[dict[str, Any]]:
    """In OpenAI's chat shape. `instructions` and the system's messages at the beginning are one: most templates take a
    single one. Raises InvalidRequestError, which names the place."""
    messages = [] if asked.instructions is None else [{"role": "system", "content": [_text(asked.instructions)]}]
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    if not isinstance(asked.input, list) or not asked.input:
        refuse("input", asked.input, "a string, or a list of at least one item")
    for i, item in enumerate(asked.input):
        message = _message(f"input[{i}]", item, allow_unknown)
        if len(messages) == 1 and message["role"] == messages[0]["role"] == "system":
            messages[0]["content"] += message["content"]
        else:
            messages.append(message)
    return messages


def _message(place: str, given: Any, allow_unknown: bool) -> dict[str, Any]:
    item = mapping(place, given)
    if item.get("type") not in (None, "message"):
        refuse(f"{place}.type", item["type"], "'message' (octavo does not support other items yet)")
    message = parse(InputMessage, item, allow_unknown=allow_unknown, path=f"{place}.")
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": _content(f"{place}.content", message, allow_unknown)}


def _content(place: str, message: InputMessage, allow_unknown: bool) -> list[dict[str, str]]:
    content: Any = message.content
    if isinstance(content, str):
        return [_text(content)]
    if message.role == "assistant" and content in (None, []):
        return []
    if not isinstance(content, list) or not content:
        refuse(place, content, "a string, or a list of content parts")
    return [_part(f"{place}[{j}]", part, allow_unknown) for j, part in enumerate(content)]


def _part(place: str, given: Any, allow_unknown: bool) -> dict[str, str]:
    part = mapping(place, given)
    kind = part.get("type")
    if kind in ("input_text", "output_text"):
        return _text(parse(InputText, part, allow_unknown=allow_unknown, path=f"{place}.").text)
    if kind == "refusal":
        return _text(parse(InputRefusal, part, allow_unknown=allow_unknown, path=f"{place}.").refusal)
    refuse(f"{place}.type", kind, "'input_text' or 'output_text' (octavo does not support other content yet)")


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
