"""The input of the Responses API as plain messages: a string, or items. Of items it knows messages and calls with what
came of them, of content text. Reasoning is left out, as answers have none of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.errors import refuse
from octavo.server.fields import mapping, parse
from octavo.server.protocol_responses import InputCall, InputCallOutput, InputMessage, InputRefusal, InputText
from octavo.server.response_tools import flat_name
from octavo.text.tool_parsers.json_calls import is_json_object


def input_messages(given: Any, *, allow_unknown: bool) -> list[dict[str, Any]]:
    """Those of `input`, in OpenAI's chat shape. Raises InvalidRequestError, which names the place."""
    if isinstance(given, str):
        return [{"role": "user", "content": [_text(given)]}]
    if not isinstance(given, list) or not given:
        refuse("input", given, "a string, or a list of at least one item")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        _add(messages, f"input[{i}]", mapping(f"input[{i}]", item), allow_unknown)
    if not messages:
        refuse("input", given, "a list of items that are not all reasoning")
    return messages


def output_message(text: str, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """What an answer is when it comes back as input."""
    turn: dict[str, Any] = {"role": "assistant", "content": [_text(text)] if text or not calls else []}
    if calls:
        turn["tool_calls"] = list(calls)
    return turn


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """In OpenAI's chat shape."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`instructions` and the system's messages at the beginning are one: most templates take a single one."""
    head = [] if instructions is None else [_text(instructions)]
    num_leading = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    for message in messages[:num_leading]:
        head += message["content"]
    system = [{"role": "system", "content": head}] if head else []
    return [*system, *messages[num_leading:]]


def _add(messages: list[dict[str, Any]], place: str, item: dict[str, Any], allow_unknown: bool) -> None:
    kind = item.get("type")
    if kind in (None, "message"):
        messages.append(_message(place, item, allow_unknown))
    elif kind == "function_call":
        call = _call(place, parse(InputCall, item, allow_unknown=allow_unknown, path=f"{place}."))
        if messages and messages[-1]["role"] == "assistant":  # one turn, as the model made it
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append(output_message("", [call]))
    elif kind == "function_call_output":
        done = parse(InputCallOutput, item, allow_unknown=allow_unknown, path=f"{place}.")
        content = "" if done.output == [] else _parts(f"{place}.output", done.output, allow_unknown)
        messages.append({"role": "tool", "tool_call_id": done.call_id, "content": content})
    elif kind != "reasoning":
        allowed = "'message', 'function_call', 'function_call_output' or 'reasoning' (no support for other items yet)"
        refuse(f"{place}.type", kind, allowed)


def _call(place: str, given: InputCall) -> dict[str, Any]:
    if not is_json_object(given.arguments or "{}"):
        refuse(f"{place}.arguments", given.arguments, "a string with an object as JSON")
    return call_of(given.call_id, flat_name(given.namespace, given.name), given.arguments)


def _message(place: str, item: dict[str, Any], allow_unknown: bool) -> dict[str, Any]:
    message = parse(InputMessage, item, allow_unknown=allow_unknown, path=f"{place}.")
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if message.role == "assistant" and content in (None, []):
        return {"role": role, "content": []}
    return {"role": role, "content": _parts(f"{place}.content", content, allow_unknown)}


def _parts(place: str, content: Any, allow_unknown: bool) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [_text(content)]
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
