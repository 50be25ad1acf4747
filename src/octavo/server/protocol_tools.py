"""The tools that bodies offer, in the manner of protocol.py: those of chat, of the Responses API, of Anthropic's.

`strict` is accepted without effect: what a model writes is not forced into a schema.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.errors import refuse
from octavo.server.fields import Record, list_of, mapping, one_of, string, wire

MAX_TOOLS = 1024  # large sets of MCP servers have some hundreds
MAX_NAME_LENGTH = 128  # characters: Anthropic's limit; OpenAI's is 64
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME_LENGTH}}}")
A_NAME = f"1 to {MAX_NAME_LENGTH} letters, digits, dots, hyphens or underscores"


def function_name(name: str, value: Any) -> Any:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        refuse(name, value, A_NAME)
    return value


def tool_list(name: str, value: Any) -> Any:
    value = list_of(dict, "tool objects")(name, value)
    if len(value) > MAX_TOOLS:
        refuse(name, value, f"a list of at most {MAX_TOOLS} tools")
    return value


@dataclass(kw_only=True)
class ChatFunction(Record):
    NO_OPS: ClassVar[frozenset[str]] = frozenset({"strict"})

    name: str = wire(function_name, required=A_NAME)
    description: str | None = wire(string)
    parameters: dict[str, Any] | None = wire(mapping)


@dataclass(kw_only=True)
class ChatTool(Record):
    """Of /v1/chat/completions."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: str = wire(one_of("function"), "function")
    function: ChatFunction = wire(ChatFunction, required="an object with a name")


@dataclass(kw_only=True)
class ResponseFunction(ChatFunction):
    """A tool of type function of /v1/responses."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"strict", "defer_loading", "output_schema", "allowed_callers"})

    type: str = wire(string)


@dataclass(kw_only=True)
class ResponseNamespace(Record):
    """A tool of type namespace: functions under a common name, as Codex sends those of an MCP server."""

    type: str = wire(string)
    name: str = wire(function_name, required=A_NAME)
    description: str | None = wire(string)
    tools: list[dict[str, Any]] = wire(tool_list, required="a list of tools")


@dataclass(kw_only=True)
class AnthropicTool(Record):
    """Of /v1/messages, defined by its client."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset(
        {"strict", "cache_control", "defer_loading", "allowed_callers", "input_examples", "eager_input_streaming"}
    )

    type: str = wire(one_of("custom"), "custom")
    name: str = wire(function_name, required=A_NAME)
    description: str | None = wire(string)
    input_schema: dict[str, Any] = wire(mapping, required="an object: the JSON schema of the tool's input")
