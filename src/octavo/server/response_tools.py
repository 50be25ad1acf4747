"""The tools of the Responses API. Of its kinds octavo knows functions, alone or under a namespace's name.

Agents send others beside these (a search of the provider's, a shell of its models'), which they can do without: they
are left out, with a line in the log.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.errors import refuse
from octavo.server.fields import parse
from octavo.server.protocol_tools import ResponseFunction, ResponseNamespace
from octavo.server.tools import Function, Tools, check_choice, offer

if TYPE_CHECKING:
    from octavo.server.front import Front
    from octavo.server.protocol_responses import ResponsesRequest

logger = logging.getLogger(__name__)

LEFT_OUT = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
JOINT = "__"  # between a namespace and a function


@dataclass(slots=True)
class ResponseTools:
    functions: list[Function] = field(default_factory=list)
    names: dict[str, tuple[str, str]] = field(default_factory=dict)  # (namespace, name) of those that have one
    left_out: Counter[str] = field(default_factory=Counter)  # by type


def flat_name(namespace: str | None, name: str) -> str:
    """What the model knows a function as. Some namespaces end as they are joined."""
    if namespace is None:
        return name
    return namespace + name if namespace.endswith(JOINT) else f"{namespace}{JOINT}{name}"


def response_tools(front: Front, asked: ResponsesRequest) -> tuple[Tools, dict[str, tuple[str, str]]]:
    """What is offered, and `ResponseTools.names`."""
    may_call = check_choice(asked.tool_choice, asked.tools)
    found = ResponseTools()
    for i, given in enumerate(asked.tools or ()):
        _read(found, f"tools[{i}]", given, front.config.allow_unknown_fields)
    if found.left_out:
        kinds = ", ".join(f"{count} of type {kind}" for kind, count in sorted(found.left_out.items()))
        logger.info("tools that are no functions are left out: %s", kinds)
    parallel = asked.parallel_tool_calls
    tools = offer(front, found.functions, given=asked.tools, may_call=may_call, parallel=parallel)
    return tools, found.names


def _read(found: ResponseTools, place: str, given: Any, allow_unknown: bool, namespace: str | None = None) -> None:
    kind = given.get("type")
    if kind == "function":
        tool = parse(ResponseFunction, given, allow_unknown=allow_unknown, path=f"{place}.")
        name = flat_name(namespace, tool.name)
        if namespace is not None:
            found.names[name] = (namespace, tool.name)
        found.functions.append(Function(name=name, description=tool.description, parameters=tool.parameters))
    elif kind == "namespace" and namespace is None:
        group = parse(ResponseNamespace, given, allow_unknown=allow_unknown, path=f"{place}.")
        for j, inner in enumerate(group.tools):
            _read(found, f"{place}.tools[{j}]", inner, allow_unknown, group.name)
    elif isinstance(kind, str) and kind in LEFT_OUT:
        found.left_out[kind] += 1
    else:
        refuse(f"{place}.type", kind, "'function', 'namespace' or another type of tool of the Responses API")
