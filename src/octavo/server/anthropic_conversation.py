"""Anthropic's messages and tools as those that templates are written for: OpenAI's. Of content blocks it knows text,
calls of tools, and what came of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from octavo.errors import refuse
from octavo.server.fields import mapping, parse
from octavo.server.protocol_anthropic import (
    AnthropicMessage,
    AnthropicText,
    AnthropicToolChoice,
    AnthropicToolResult,
    AnthropicToolUse,
    ConversationFields,
)
from octavo.server.protocol_tools import AnthropicTool
from octavo.server.tools import Function, Tools, offer

if TYPE_CHECKING:
    from octavo.server.front import Front

Turns = list[dict[str, Any]]


def anthropic_tools(front: Front, asked: ConversationFields) -> Tools:
    """What is offered."""
    allow_unknown = front.config.allow_unknown_fields
    choice = AnthropicToolChoice(type="auto")
    if asked.tool_choice is not None:
        kind = asked.tool_choice.get("type")
        if kind in ("any", "tool"):
            allowed = "'auto' or 'none' (a forced call needs structured output: no support yet)"
            refuse("tool_choice.type", kind, allowed)
        choice = parse(AnthropicToolChoice, asked.tool_choice, allow_unknown=allow_unknown, path="tool_choice.")
    functions = []
    for i, given in enumerate(asked.tools or ()):
        tool = parse(AnthropicTool, given, allow_unknown=allow_unknown, path=f"tools[{i}].")
        functions.append(Function(name=tool.name, description=tool.description, parameters=tool.input_schema))
    return offer(
        front,
        functions,
        given=asked.tools,
        may_call=choice.type != "none",
        parallel=not choice.disable_parallel_tool_use,
    )


def plain_conversation(asked: ConversationFields, *, allow_unknown: bool) -> Turns:
    """The turns, with the system prompt first. Neighbours of one role are one turn, as the API defines it; what came of
    a call is a turn of its own."""
    turns: Turns = []
    if asked.system is not None and (system := _texts("system", asked.system, allow_unknown)):
        turns.append({"role": "system", "content": system})
    for i, given in enumerate(asked.messages):
        place = f"messages[{i}]"
        message = parse(AnthropicMessage, given, allow_unknown=allow_unknown, path=f"{place}.")
        blocks = _blocks(f"{place}.content", message.content)
        if blocks:
            for j, block in enumerate(blocks):
                _add_block(turns, message.role, f"{place}.content[{j}]", block, allow_unknown)
        elif message.role == "assistant" and i == len(asked.messages) - 1:
            _turn_of(turns, message.role)
        else:
            refuse(f"{place}.content", message.content, "not empty, but for a final message of the assistant")
    return turns


def _turn_of(turns: Turns, role: str) -> dict[str, Any]:
    """The last one if it is of that role, else a new one."""
    if not turns or turns[-1]["role"] != role:
        turns.append({"role": role, "content": []})
    return turns[-1]


def _blocks(place: str, content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        refuse(place, content, "a string or a list of content blocks")
    return content


def _add_block(turns: Turns, role: str, place: str, given: Any, allow_unknown: bool) -> None:
    block = mapping(place, given)
    kind = block.get("type")
    if kind == "tool_use" and role == "assistant":
        use = parse(AnthropicToolUse, block, allow_unknown=allow_unknown, path=f"{place}.")
        function = {"name": use.name, "arguments": use.input}
        call = {"id": use.id, "type": "function", "function": function}
        _turn_of(turns, role).setdefault("tool_calls", []).append(call)
    elif kind == "tool_result" and role == "user":
        result = parse(AnthropicToolResult, block, allow_unknown=allow_unknown, path=f"{place}.")
        content = _texts(f"{place}.content", result.content or "", allow_unknown)
        turns.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": content or ""})
    else:
        own = {"assistant": "'text' or 'tool_use'", "user": "'text' or 'tool_result'"}.get(role, "'text'")
        _turn_of(turns, role)["content"].append(_text(place, block, allow_unknown, own))


def _texts(place: str, content: Any, allow_unknown: bool) -> list[dict[str, Any]]:
    """The parts of a string or of a list of blocks."""
    blocks = _blocks(place, content)
    return [
        _text(f"{place}[{j}]", mapping(f"{place}[{j}]", given), allow_unknown, "'text'")
        for j, given in enumerate(blocks)
    ]


def _text(place: str, block: dict[str, Any], allow_unknown: bool, allowed: str) -> dict[str, Any]:
    if block.get("type") != "text":
        refuse(f"{place}.type", block.get("type"), f"{allowed} (octavo does not support other content blocks yet)")
    return {"type": "text", "text": parse(AnthropicText, block, allow_unknown=allow_unknown, path=f"{place}.").text}


def input_of(arguments: str) -> Any:
    """The arguments of a call as an object, to be written as they are. Those that are none are one key's value."""
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return msgspec.Raw(arguments.encode())
    except (ValueError, RecursionError):
        pass
    return {"INVALID_JSON": arguments}
