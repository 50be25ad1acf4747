"""The body of /v1/responses, in the manner of protocol.py: every field of OpenAI's Responses API, and vLLM's."""

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
    mapping,
    one_of,
    string,
    wire,
)
from octavo.server.protocol import ANSWER_SAMPLING, COMMON_LATER, COMMON_NO_OPS, MAX_COUNT, CallFields
from octavo.server.protocol_tools import A_NAME, function_name, tool_list


@dataclass(kw_only=True)
class InputMessage(Record):
    """An item of type message."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})  # of an answer that comes back

    type: str | None = wire(string)
    role: str = wire(
        one_of("user", "assistant", "system", "developer"), required="'user', 'assistant', 'system' or 'developer'"
    )
    content: str | list[dict[str, Any]] | None = wire(anything)


@dataclass(kw_only=True)
class InputCall(Record):
    """An item of type function_call: what the model has called. A `namespace` is that of the tool."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"id", "status"})

    type: str = wire(string)
    call_id: str = wire(string, required="a string")
    name: str = wire(function_name, required=A_NAME)
    namespace: str | None = wire(function_name)
    arguments: str = wire(string, required="a string: an object as JSON")


@dataclass(kw_only=True)
class InputCallOutput(Record):
    """An item of type function_call_output: what came of a call."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"id", "status"})

    type: str = wire(string)
    call_id: str = wire(string, required="a string")
    output: str | list[dict[str, Any]] = wire(anything, required="a string, or a list of content parts")


@dataclass(kw_only=True)
class InputText(Record):
    """A content part of type input_text or output_text."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: str = wire(string)
    text: str = wire(string, required="a string")


@dataclass(kw_only=True)
class InputRefusal(Record):
    type: str = wire(string)
    refusal: str = wire(string, required="a string")


# Parts of outputs that octavo never has: asking for them asks nothing.
_ABSENT_OUTPUTS = (
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "message.input_image.image_url",
)


def included(name: str, value: Any) -> Any:
    if not isinstance(value, list) or not all(each in _ABSENT_OUTPUTS for each in value):
        refuse(name, value, f"a list of some of {', '.join(_ABSENT_OUTPUTS)} (octavo does not support others yet)")
    return value


@dataclass(kw_only=True)
class ReasoningOptions(Record):
    """`effort` is for the chat template, as `reasoning_effort` is in chat. Reasoning is part of the text: there is none
    to sum up."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary", "context"})
    LATER: ClassVar[Mapping[str, tuple[Any, ...]]] = {"mode": ("standard",)}

    effort: str | None = wire(string)


@dataclass(kw_only=True)
class TextOptions(Record):
    NO_OPS: ClassVar[frozenset[str]] = frozenset({"verbosity"})
    LATER: ClassVar[Mapping[str, tuple[Any, ...]]] = {"format": ({"type": "text"},)}


@dataclass(kw_only=True)
class ResponsesStreamOptions(Record):
    NO_OPS: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})


@dataclass(kw_only=True)
class ResponsesRequest(CallFields):
    """POST /v1/responses, of OpenAI's API, with vLLM's sampling fields. `store`, on unless it is false, and
    `previous_response_id` need a server with --enable-responses-store."""

    SAMPLING: ClassVar[frozenset[str]] = ANSWER_SAMPLING | {"stop"}
    NO_OPS: ClassVar[frozenset[str]] = (COMMON_NO_OPS - {"store", "metadata"}) | {
        "max_tool_calls",
        "client_metadata",
    }
    LATER: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **COMMON_LATER,
        "conversation": (),
        "background": (False,),
        "background_options": ({},),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "prompt": (),
        "context_management": ([],),
        "moderation": (),
        "image": (),
        "access_programs": (),
        "enable_response_messages": (False,),
        "previous_input_messages": ([],),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }

    input: str | list[dict[str, Any]] = wire(anything, required="a string, or a list of items")
    instructions: str | None = wire(string)
    store: bool | None = wire(boolean)
    previous_response_id: str | None = wire(string)
    max_output_tokens: int | None = wire(integer(1, MAX_COUNT))
    metadata: dict[str, Any] | None = wire(mapping)
    user: str | None = wire(string)
    stream_options: ResponsesStreamOptions | None = wire(ResponsesStreamOptions)
    include: list[str] | None = wire(included)
    reasoning: ReasoningOptions | None = wire(ReasoningOptions)
    text: TextOptions | None = wire(TextOptions)
    tools: list[dict[str, Any]] | None = wire(tool_list)
    tool_choice: str | dict[str, Any] | None = wire(anything)
    parallel_tool_calls: bool = wire(boolean, True)
    chat_template_kwargs: dict[str, Any] | None = wire(mapping)
