"""Tool calls on /v1/responses: items, events, and what Codex sends."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from support.tools import (
    BERLIN,
    CALL,
    CALLS,
    FLAGS,
    RESPONSE_TOOLS,
    TEXT_AND_CALLS,
    TIME,
    WEATHER,
    last_prompt,
    say,
    use_template,
)

PATH = "/v1/responses"


@pytest.fixture
async def server(serve: Any) -> Any:
    server = await serve(**FLAGS, enable_responses_store=True, max_model_len=4096)
    use_template(server)
    return server


async def ask(server: Any, **body: Any) -> dict[str, Any]:
    response = await server.post(PATH, **{"input": "Hello", "tools": RESPONSE_TOOLS, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def refused(server: Any, **body: Any) -> dict[str, Any]:
    response = await server.post(PATH, **{"input": "Hello", "tools": RESPONSE_TOOLS, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def events(server: Any, **body: Any) -> list[dict[str, Any]]:
    response = await server.post(PATH, **{"input": "Hello", "tools": RESPONSE_TOOLS, "stream": True, **body})
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def told(item: dict[str, Any]) -> tuple[Any, ...]:
    """What an item says, without its ids."""
    if item["type"] == "message":
        return "message", item["content"][0]["text"], item["status"]
    return item["type"], item["name"], item["arguments"], item["status"]


async def test_calls_are_items(server):
    say(server, TEXT_AND_CALLS)
    answer = await ask(server)
    assert list(map(told, answer["output"])) == [
        ("message", "I will look.\n", "completed"),
        ("function_call", "get_weather", BERLIN, "completed"),
        ("function_call", "get_time", "{}", "completed"),
    ]
    _, first, second = answer["output"]
    assert first["id"].startswith("fc_") and first["call_id"].startswith("call_")
    assert len({first["id"], second["id"], first["call_id"], second["call_id"]}) == 4
    assert (answer["status"], answer["parallel_tool_calls"]) == ("completed", True)
    say(server, CALLS)
    assert [item["type"] for item in (await ask(server))["output"]] == ["function_call"] * 2
    assert len((await ask(server, parallel_tool_calls=False))["output"]) == 1
    assert [item["type"] for item in (await ask(server, tool_choice="none"))["output"]] == ["message"]
    server.assert_idle()


@pytest.mark.parametrize("text", [TEXT_AND_CALLS, CALL, CALL[:-20], "plain text", "<tool_call>oops", ""])
async def test_events_tell_of_each_item_from_its_beginning_to_its_end(server, text):
    say(server, text)
    stream = await events(server)
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    output: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in stream:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(output) == len(texts)
            assert event["item"]["status"] == "in_progress" and event["item"].get("arguments", "") == ""
            texts.append("")
        elif kind.endswith(".delta"):
            assert event["output_index"] == len(texts) - 1
            texts[-1] += event["delta"]
        elif kind == "response.output_text.done":
            assert event["text"] == texts[-1]
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == texts[-1]
        elif kind == "response.output_item.done":
            assert event["output_index"] == len(output) == len(texts) - 1
            output.append(event["item"])
    last = stream[-1]
    assert last["type"] == "response.completed" and last["response"]["output"] == output
    whole = await ask(server)
    assert list(map(told, output)) == list(map(told, whole["output"]))


async def test_what_is_cut_off_is_incomplete(server):
    say(server, CALLS)
    num_tokens = len(server.tokenizer.encode(CALLS[: CALLS.rindex("arguments") + 13]))
    answer = await ask(server, max_output_tokens=num_tokens)
    assert answer["status"] == "incomplete"
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]


async def test_calls_come_back_as_one_turn(server):
    call = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": BERLIN, "id": "fc_1"}
    other = {"type": "function_call", "call_id": "c2", "name": "get_time", "arguments": "", "status": "completed"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
    parts = [{"type": "input_text", "text": "noon"}]
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": None}
    items = [{"role": "user", "content": "Hello"}, reasoning, message, call, other, output]
    await ask(server, input=[*items, {**output, "call_id": "c2", "output": parts}], tools=None)
    assert last_prompt(server) == (
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nI look.[c1 get_weather city=Berlin days=2 ][c2 get_time ]<|im_end|>\n"
        "<|im_start|>tool\nrain(c1)<|im_end|>\n<|im_start|>tool\nnoon(c2)<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_stored_response_is_gone_on_from_with_its_calls(server):
    say(server, CALL)
    first = await ask(server)
    call_id = first["output"][0]["call_id"]
    output = [{"type": "function_call_output", "call_id": call_id, "output": "rain"}]
    await ask(server, input=output, previous_response_id=first["id"], tools=None)
    assert f"[{call_id} get_weather city=Berlin days=2 ]" in last_prompt(server)
    assert f"rain({call_id})" in last_prompt(server)


async def test_what_codex_sends_is_taken_with_its_tools(server, caplog):
    """Functions are offered, those of a namespace under its name; tools that only OpenAI has are left out."""
    caplog.set_level(logging.INFO)
    others = [
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "a"}},
        {"type": "local_shell"},
        {"type": "tool_search", "execution": "client", "description": "a", "parameters": {}},
    ]
    group = {"type": "namespace", "name": "mcp__clock", "description": "a", "tools": [RESPONSE_TOOLS[1]]}
    say(server, f"{CALL}{CALLS[len(CALL) :].replace('get_time', 'mcp__clock__get_time')}")
    body: dict[str, Any] = {
        "instructions": "red",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        "tools": [RESPONSE_TOOLS[0], *others, group],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "medium"},
    }
    answer = await ask(server, **body)
    prompt = last_prompt(server)
    assert prompt.count('"type": "function"') == 2 and '"mcp__clock__get_time"' in prompt
    assert "1 of type custom, 1 of type local_shell, 1 of type tool_search, 1 of type web_search" in caplog.text
    weather, time = answer["output"]
    assert weather["name"] == "get_weather" and "namespace" not in weather
    assert (time["name"], time["namespace"]) == ("get_time", "mcp__clock")
    outputs = [{"type": "function_call_output", "call_id": c["call_id"], "output": "a"} for c in (weather, time)]
    await ask(server, **{**body, "input": [*body["input"], weather, time, *outputs]})
    assert f"[{time['call_id']} mcp__clock__get_time ]" in last_prompt(server)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": "a"}]}, "tools[0].parameters"),
        ({"tools": [{"type": "functions", "name": "f"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": {}, "name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]}, "tools[0].tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "get_time"}}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 7}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": [{}]}]}, "input[0].output[0].type"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"type": "local_shell_call"}]}, "input[0].type"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_refused_by_its_place(server, fields, param):
    assert (await refused(server, **fields))["param"] == param


async def test_openais_client_sees_calls(server):
    say(server, TEXT_AND_CALLS)
    response = await server.openai.responses.create(model="tiny", input="Hello", tools=RESPONSE_TOOLS)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("get_weather", {"city": "Berlin", "days": 2}),
        ("get_time", {}),
    ]
    async with server.openai.responses.stream(model="tiny", input="Hello", tools=RESPONSE_TOOLS) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 2
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert final.output[1].arguments == BERLIN
    assert {each["name"] for each in (WEATHER, TIME)} == {tool.name for tool in final.tools}
