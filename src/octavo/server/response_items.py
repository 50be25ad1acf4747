"""The input of the Responses API as plain messages: a string, or items. Of items it knows messages, of content text."""

from __future__ import annotations

from typing import Any

from octavo.errors import refuse
from octavo.server.fields import mapping, parse
from octavo.server.protocol_responses import InputMessage, InputRefusal, InputText


def input_messages(given: Any, *, allow_unknown: bool) -> list[dict[str, Any]]:
    """Those of `input`, in OpenAI's chat shape. Raises InvalidRequestError, which names the place."""
    if isinstance(given, str):
        return [{"role": "user", "content": [_text(given)]}]
    if not isinstance(given, list) or not given:
        refuse("input", given, "a string, or a list of at least one item")
    return [_message(f"input[{i}]", item, allow_unknown) for i, item in enumerate(given)]


def output_message(text: str) -> dict[str, Any]:
    """What an answer is when it comes back as input."""
    return {"role": "assistant", "content": [_text(text)]}


def with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`instructions` and the system's messages at the beginning are one: most templates take a single one."""
    head = [] if instructions is None else [_text(instructions)]
    num_leading = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    for message in messages[:num_leading]:
        head += message["content"]
    system = [{"role": "system", "content": head}] if head else []
    return [*system, *messages[num_leading:]]


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
