"""Clients that people use, and the tool calls that they see: by a server on a port, streamed and not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.served import ServerProcess
from support.tools import ANTHROPIC_TOOLS, CHAT_TOOLS, RESPONSE_TOOLS

HERE = Path(__file__).parent
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
SAID = "I will look.\n"
CALLED = [("get_weather", {"city": "Berlin", "days": 2}), ("get_time", {})]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess(program=(sys.executable, str(HERE / "calling_server.py")))
    server.wait_until_ready()
    yield server
    assert "Traceback" not in server.log
    server.close()


def test_openais_client(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": CHAT_TOOLS}
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert (choice.finish_reason, choice.message.content, calls) == ("tool_calls", SAID, CALLED)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in whole.message.tool_calls]
    messages = [*HELLO, whole.message, *results]
    assert client.chat.completions.create(**{**asked, "messages": messages}).choices
    response = client.responses.create(model="tiny", input="Hello", tools=RESPONSE_TOOLS)
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"} for item in response.output[1:]
    ]
    going_on = client.responses.create(model="tiny", input=[*response.output, *outputs], tools=RESPONSE_TOOLS)
    assert going_on.status == "completed"


def test_anthropics_client(server):
    import anthropic

    client = anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 999, "messages": HELLO, "tools": ANTHROPIC_TOOLS}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        text, *uses = message.content
        assert (message.stop_reason, text.text) == ("tool_use", SAID)
        assert [(use.name, use.input) for use in uses] == CALLED
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"} for use in whole.content[1:]]
    turns = [{"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    assert client.messages.create(**{**asked, "messages": [*HELLO, *turns]}).content
    counted = client.messages.count_tokens(model="tiny", messages=HELLO, tools=ANTHROPIC_TOOLS)
    assert counted.input_tokens == whole.usage.input_tokens


def test_litellm(server):
    program = [sys.executable, "-W", "ignore", str(HERE / "litellm_tool_calls.py"), server.url]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(HERE.parent)}
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    for way, answer in told.items():
        assert answer == [SAID, [list(call) for call in CALLED], "tool_calls"], way


@pytest.mark.parametrize("by_responses", [False, True])
def test_langchain(server, by_responses):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def get_weather(city: str, days: int = 1) -> str:
        """The weather of a city."""
        return "rain"

    @tool
    def get_time() -> str:
        """The time."""
        return "noon"

    chat = ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="k", max_retries=0, use_responses_api=by_responses
    ).bind_tools([get_weather, get_time])
    question = HumanMessage("Hello")
    whole = chat.invoke([question])
    chunks = list(chat.stream([question]))
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    for message in (whole, streamed):
        assert [(call["name"], call["args"]) for call in message.tool_calls] == CALLED
        assert message.text.strip() == SAID.strip()
    results = [ToolMessage("rain", tool_call_id=call["id"]) for call in whole.tool_calls]
    assert chat.invoke([question, whole, *results]).tool_calls
