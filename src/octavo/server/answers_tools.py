"""Tool calls in what the routes answer, as types, in the manner of answers.py."""

# No `from __future__ import annotations`: TypedDict tells which keys are required only where it sees them itself.

from typing import Any, TypedDict


class ChatCallFunction(TypedDict):
    name: str
    arguments: str  # JSON


class ChatCall(TypedDict):
    """Of a tool."""

    id: str
    type: str
    function: ChatCallFunction


class ChatCallFunctionDelta(TypedDict, total=False):
    name: str  # in the first chunk of a call, as is the id
    arguments: str


class _ChatCallDeltaExtras(TypedDict, total=False):
    id: str
    type: str
    function: ChatCallFunctionDelta


class ChatCallDelta(_ChatCallDeltaExtras):
    index: int


class _FunctionCallExtras(TypedDict, total=False):
    namespace: str  # of the tool, where it has one


class FunctionCall(_FunctionCallExtras):
    """An item of a response's output."""

    id: str
    type: str
    status: str
    call_id: str
    name: str
    arguments: str  # JSON


class ToolUseBlock(TypedDict):
    """Of a message's content."""

    type: str
    id: str
    name: str
    input: dict[str, Any]
