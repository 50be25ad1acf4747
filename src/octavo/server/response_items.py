"""The input of the Responses API as plain messages: a string, or items. Of items it knows messages, of content text."""

from __future__ import annotations

from typing import Any

from octavo.server.fields import refuse
from octavo.server.protocol import ResponsesRequest

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> the key of its text
# What items and parts have beside their text, when an answer's output comes back as input.
_ITEM_FIELDS = {"type", "role", "content", "id", "status", "phase"}
_PART_FIELDS = {"type", "annotations", "logprobs", "prompt_cache_breakpoint"}


def input_messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    """In OpenAI's chat shape. `instructions` and the system's messages at the beginning are one: most templates take a
    single one. Raises InvalidRequestError, which names the place."""
    messages = [] if asked.instructions is None else [{"role": "system", "content": _text(asked.instructions)}]
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    if not isinstance(asked.input, list) or not asked.input:
        refuse("input", asked.input, "a string, or a list of at least one item")
    for i, item in enumerate(asked.input):
        message = _message(f"input[{i}]", item)
        is_at_start = len(messages) == 1 and messages[0]["role"] == "system"
        if is_at_start and message["role"] == "system":
            messages[0]["content"] += message["content"]
        else:
            messages.append(message)
    return messages


def _message(place: str, item: Any) -> dict[str, Any]:
    if not isinstance(item, dict):
        refuse(place, item, "an item, such as {'role': 'user', 'content': …}")
    if item.get("type", "message") != "message":
        refuse(f"{place}.type", item["type"], "'message' (octavo does not support other items yet)")
    for name in item:
        if name not in _ITEM_FIELDS:
            refuse(f"{place}.{name}", item[name], f"absent; a message has {', '.join(sorted(_ITEM_FIELDS))}")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        refuse(f"{place}.role", role, "'user', 'assistant', 'system' or 'developer'")
    return {"role": _ROLES[role], "content": _content(f"{place}.content", item.get("content"), role)}


def _content(place: str, content: Any, role: str) -> list[dict[str, str]]:
    if isinstance(content, str):
        return _text(content)
    if not isinstance(content, list) or not (content or role == "assistant"):
        refuse(place, content, "a string, or a list of content parts")
    return [_part(f"{place}[{j}]", part) for j, part in enumerate(content)]


def _part(place: str, part: Any) -> dict[str, str]:
    if not isinstance(part, dict):
        refuse(place, part, "a content part, such as {'type': 'input_text', 'text': …}")
    kind = part.get("type")
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        allowed = "'input_text' or 'output_text' (octavo does not support other content yet)"
        refuse(f"{place}.type", kind, allowed)
    if not isinstance(part.get(key), str):
        refuse(f"{place}.{key}", part.get(key), "a string")
    for name, value in part.items():
        if name not in _PART_FIELDS | {key}:
            refuse(f"{place}.{name}", value, f"absent; a part has {', '.join(sorted(_PART_FIELDS | {key}))}")
    return {"type": "text", "text": part[key]}


def _text(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
