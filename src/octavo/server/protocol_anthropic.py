"""The bodies of Anthropic's routes, in the manner of protocol.py: every field of its Messages API, and vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.errors import refuse
from octavo.server.fields import (
    Record,
    anything,
    boolean,
    integer,
    list_of,
    mapping,
    number,
    one_of,
    string,
    wire,
)
from octavo.server.protocol import A_MESSAGE, ANSWER_SAMPLING, COMMON_LATER, MAX_COUNT, MESSAGES, CallFields
from octavo.server.protocol_tools import A_NAME, function_name, tool_list


@dataclass(kw_only=True)
class AnthropicMetadata(Record):
    user_id: str | None = wire(string)


@dataclass(kw_only=True)
class AnthropicMessage(Record):
    role: str = wire(one_of("user", "assistant", "system"), required="'user', 'assistant' or 'system'")
    content: str | list[dict[str, Any]] = wire(anything, required="a string or a list of content blocks")


@dataclass(kw_only=True)
class AnthropicText(Record):
    """A content block of type text."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"cache_control", "citations"})

    type: str = wire(string)
    text: str = wire(string, required="a string")


@dataclass(kw_only=True)
class AnthropicToolUse(Record):
    """A content block of type tool_use: what the model has called."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"cache_control", "caller"})

    type: str = wire(string)
    id: str = wire(string, required="a string")
    name: str = wire(function_name, required=A_NAME)
    input: dict[str, Any] = wire(mapping, required="an object")


@dataclass(kw_only=True)
class AnthropicToolResult(Record):
    """A content block of type tool_result: what came of a call. Whether that `is_error` its content has to say: chat
    templates have no place for it."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: str = wire(string)
    tool_use_id: str = wire(string, required="a string")
    content: str | list[dict[str, Any]] | None = wire(anything)
    is_error: bool = wire(boolean, False)


@dataclass(kw_only=True)
class AnthropicToolChoice(Record):
    """Types any and tool force a call, which needs structured output: no support yet."""

    type: str = wire(one_of("auto", "none"), required="'auto' or 'none' (no support for forced calls yet)")
    disable_parallel_tool_use: bool = wire(boolean, False)


def thinking(name: str, value: Any) -> Any:
    """Adaptive: as much as the model sees fit, which may be none."""
    if not isinstance(value, dict) or value.get("type") not in ("disabled", "adaptive"):
        refuse(name, value, "of type disabled or adaptive (octavo does not support a budget for thinking yet)")
    return value


def thinking_edits(name: str, value: Any) -> Any:
    """There are no thinking blocks, so nothing is lost where they are cleared. Other edits would change the prompt."""
    clears = isinstance(value, list) and all(
        isinstance(each, dict) and each.get("type") == "clear_thinking_20251015" for each in value
    )
    if not clears:
        refuse(name, value, "a list of edits of type clear_thinking_20251015 (octavo does not support others yet)")
    return value


@dataclass(kw_only=True)
class ContextManagement(Record):
    edits: list[dict[str, Any]] | None = wire(thinking_edits)


@dataclass(kw_only=True)
class OutputConfig(Record):
    NO_OPS: ClassVar[frozenset[str]] = frozenset({"effort"})
    LATER: ClassVar[Mapping[str, tuple[Any, ...]]] = {"format": (), "task_budget": ()}


@dataclass(kw_only=True)
class ConversationFields(Record):
    """How Anthropic's messages become a prompt. The lists in it are read by anthropic_messages.py."""

    messages: list[dict[str, Any]] = wire(list_of(dict, MESSAGES, min_length=1), required=A_MESSAGE)
    system: str | list[dict[str, Any]] | None = wire(anything)
    tools: list[dict[str, Any]] | None = wire(tool_list)
    tool_choice: dict[str, Any] | None = wire(mapping)
    thinking: dict[str, Any] | None = wire(thinking)
    context_management: ContextManagement | None = wire(ContextManagement)
    output_config: OutputConfig | None = wire(OutputConfig)
    chat_template_kwargs: dict[str, Any] | None = wire(mapping)


_ANTHROPIC_NO_OPS = frozenset(
    {
        "cache_control",  # what can be shared is shared anyway
        "service_tier",
        "inference_geo",
        "user_profile_id",
        "workspace_id",
        "billing_policy",
    }
)
_ANTHROPIC_LATER: Mapping[str, tuple[Any, ...]] = {
    "output_format": (),
    "mcp_servers": ([],),
    "container": (),
    "diagnostics": (),
    "compaction": (),
    "fallbacks": ([],),
    "fallback_credit_token": (),
    "thread": (),
    "speed": ("standard",),
}


@dataclass(kw_only=True)
class MessagesRequest(ConversationFields, CallFields):
    """POST /v1/messages, of Anthropic's API, with vLLM's sampling fields."""

    SAMPLING: ClassVar[frozenset[str]] = ANSWER_SAMPLING - {"temperature"}
    NO_OPS: ClassVar[frozenset[str]] = _ANTHROPIC_NO_OPS
    LATER: ClassVar[Mapping[str, tuple[Any, ...]]] = {**COMMON_LATER, **_ANTHROPIC_LATER}

    max_tokens: int = wire(integer(1, MAX_COUNT), required="an integer from 1 on")
    stop_sequences: list[str] | None = wire(list_of(str, "strings"))
    temperature: float | None = wire(number(0, 1))
    metadata: AnthropicMetadata | None = wire(AnthropicMetadata)


@dataclass(kw_only=True)
class CountTokensRequest(ConversationFields):
    """POST /v1/messages/count_tokens, of Anthropic's API."""

    NO_OPS: ClassVar[frozenset[str]] = _ANTHROPIC_NO_OPS
    LATER: ClassVar[Mapping[str, tuple[Any, ...]]] = _ANTHROPIC_LATER

    model: str | None = wire(string)
