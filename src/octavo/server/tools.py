"""The tools of a call, whatever route it came by: what a prompt shows of them, and how calls of them are found.

Reading them from a body is the routes' (chat_tools here serves /tokenize too). Knows no HTTP and no shape of an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.errors import refuse
from octavo.server.fields import parse
from octavo.server.protocol_tools import ChatTool
from octavo.text.tool_parsers import PARSERS, choose_parser
from octavo.text.tool_parsers.base import CallBegin, ToolParser

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.config import ServerConfig
    from octavo.server.front import Front
    from octavo.server.protocol import TemplateFields

logger = logging.getLogger(__name__)

MANY_TOOL_BYTES = 64 * 1024  # of JSON: from here on, a template that writes them takes milliseconds
MAX_TOOL_BYTES = 8 * 1024 * 1024  # more than any context holds
# Levels of nesting that a template, or an answer which has the tools in it, may need around them.
SPARE_DEPTH = 200
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolCalling:
    """How this server's model calls tools."""

    name: str  # of the format
    parser: type[ToolParser]
    marker_ids: list[int]  # special tokens that belong to the format
    is_shown: bool  # the chat template writes the tools of a request

    @classmethod
    def of(cls, llm: AsyncLLM, config: ServerConfig) -> ToolCalling | None:
        """Raises ConfigError where nothing says what the format is."""
        if not config.enable_auto_tool_choice:
            return None
        source = "" if llm.chat_template is None else llm.chat_template.source
        name = choose_parser(config.tool_call_parser, source)
        parser = PARSERS[name]
        return cls(name, parser, llm.tokenizer.special_ids_of(parser.special_tokens), "tools" in source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A tool, as all routes see it."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    def shown(self) -> dict[str, Any]:
        """In OpenAI's chat shape, for which templates are written."""
        about = {} if self.description is None else {"description": self.description}
        parameters = NO_PARAMETERS if self.parameters is None else self.parameters
        return {"type": "function", "function": {"name": self.name, **about, "parameters": dict(parameters)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """`calling` None: an answer is text, whatever it says."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    num_bytes: int = 0  # of the body's tools, as JSON
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of parameters, by the functions' names
    calling: ToolCalling | None = None
    parallel: bool = True  # an answer may have several calls

    def parser(self) -> ToolParser | None:
        return None if self.calling is None else self.calling.parser(self.schemas)

    def calls_tools(self, text: str) -> bool:
        """Whether a whole text has a call."""
        parser = self.parser()
        if parser is None:
            return False
        return any(isinstance(event, CallBegin) for event in (*parser.feed(text), *parser.finish()))

    @property
    def sampling(self) -> dict[str, Any]:
        """What SamplingParams need."""
        return {} if self.calling is None else {"shown_token_ids": self.calling.marker_ids}

    @property
    def are_many(self) -> bool:
        return self.num_bytes >= MANY_TOOL_BYTES


NO_TOOLS = Tools()


def offer(front: Front, functions: Sequence[Function], *, given: Any, may_call: bool, parallel: bool = True) -> Tools:
    """`given` is the field's value, `may_call` whether its tool_choice lets the model call them."""
    num_bytes = _checked_size(given) if given else 0
    if not functions:
        return NO_TOOLS
    if may_call and front.tool_calling is None:
        refuse(
            "tools",
            given,
            "empty unless tool_choice is none (this server has no support for tool calls; it needs "
            "--enable-auto-tool-choice and, where the chat template does not show the format, --tool-call-parser)",
        )
    excluded = not may_call and front.config.exclude_tools_when_tool_choice_none
    return Tools(
        shown=[] if excluded else [each.shown() for each in functions],
        num_bytes=num_bytes,
        schemas={each.name: each.parameters or NO_PARAMETERS for each in functions},
        calling=front.tool_calling if may_call else None,
        parallel=parallel,
    )


def _checked_size(tools: Any) -> int:
    """Of the JSON. What can be read may still be nested too deeply to be written, at another depth of calls."""
    probe = tools
    for _ in range(SPARE_DEPTH):
        probe = [probe]
    try:
        num_bytes = len(msgspec.json.encode(probe))
    except RecursionError:
        refuse("tools", "…", "nested less deeply")
    if num_bytes > MAX_TOOL_BYTES:
        refuse("tools", "…", f"at most {MAX_TOOL_BYTES} bytes of JSON")
    return num_bytes


def check_choice(choice: Any, tools: Any) -> bool:
    """OpenAI's tool_choice: whether the model may call tools. What forces a call is refused."""
    if choice not in (None, "none", "auto"):
        if not tools and (choice == "required" or isinstance(choice, dict)):
            refuse("tool_choice", choice, "none, auto or null when tools is empty")
        refuse("tool_choice", choice, "none, auto or null (a forced call needs structured output: no support yet)")
    return bool(choice != "none")


def chat_tools(front: Front, asked: TemplateFields, *, parallel: bool = True) -> Tools:
    """Those of a body in OpenAI's chat shape."""
    may_call = check_choice(asked.tool_choice, asked.tools)
    functions = list(_chat_functions(asked.tools or (), front.config.allow_unknown_fields))
    return offer(front, functions, given=asked.tools, may_call=may_call, parallel=parallel)


def _chat_functions(tools: Iterable[dict[str, Any]], allow_unknown: bool) -> Iterable[Function]:
    for i, given in enumerate(tools):
        function = parse(ChatTool, given, allow_unknown=allow_unknown, path=f"tools[{i}].").function
        yield Function(name=function.name, description=function.description, parameters=function.parameters)
