"""Tool calls on /v1/messages: content blocks, events, and what Claude Code sends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.tools import (
    ANTHROPIC_TOOLS,
    BERLIN,
    CALL,
    CALLS,
    FLAGS,
    TEXT_AND_CALLS,
    last_prompt,
    say,
    use_template,
)

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "Hello"}]
USE = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Berlin", "days": 2}}


@pytest.fixture
async def server(serve: Any) -> Any:
    server = await serve(**FLAGS, max_model_len=4096)
    use_template(server)
    return server


async def ask(server: Any, **body: Any) -> dict[str, Any]:
    body = {"messages": HELLO, "max_tokens": 999, "tools": ANTHROPIC_TOOLS, **body}
    response = await server.post(PATH, **body)
    assert response.status_code == 200, response.text
    return response.json()


async def events(server: Any, **body: Any) -> list[dict[str, Any]]:
    body = {"messages": HELLO, "max_tokens": 999, "tools": ANTHROPIC_TOOLS, "stream": True, **body}
    response = await server.post(PATH, **body)
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def told(block: dict[str, Any]) -> tuple[Any, ...]:
    return ("text", block["text"]) if block["type"] == "text" else ("tool_use", block["name"], block["input"])


async def test_calls_are_content_blocks(server):
    say(server, TEXT_AND_CALLS)
    answer = await ask(server)
    assert list(map(told, answer["content"])) == [
        ("text", "I will look.\n"),
        ("tool_use", "get_weather", {"city": "Berlin", "days": 2}),
        ("tool_use", "get_time", {}),
    ]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    ids = [block["id"] for block in answer["content"][1:]]
    assert all(each.startswith("toolu_") for each in ids) and ids[0] != ids[1]
    say(server, CALLS)
    assert [block["type"] for block in (await ask(server))["content"]] == ["tool_use"] * 2
    one = await ask(server, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(one["content"]) == 1
    none = await ask(server, tool_choice={"type": "none"})
    assert ([block["type"] for block in none["content"]], none["stop_reason"]) == (["text"], "end_turn")
    server.assert_idle()


@pytest.mark.parametrize("text", [TEXT_AND_CALLS, CALL, f"{CALL} Done.", "plain text", "<tool_call>oops", ""])
async def test_events_tell_of_each_block_from_its_beginning_to_its_end(server, text):
    say(server, text)
    stream = await events(server)
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in stream[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            is_open = True
            blocks.append({**event["content_block"], "pieces": ""})
            assert blocks[-1].get("input", {}) == {}
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(blocks) - 1
            kind = {"text": "text_delta", "tool_use": "input_json_delta"}[blocks[-1]["type"]]
            assert event["delta"]["type"] == kind
            blocks[-1]["pieces"] += event["delta"]["text" if kind == "text_delta" else "partial_json"]
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1} and is_open
            is_open = False
    assert not is_open
    for block in blocks:
        pieces = block.pop("pieces")
        block.update({"text": pieces} if block["type"] == "text" else {"input": json.loads(pieces)})
    whole = await ask(server)
    assert list(map(told, blocks)) == list(map(told, whole["content"]))
    assert stream[-2]["delta"]["stop_reason"] == whole["stop_reason"]


async def test_input_that_is_cut_off_is_told_as_it_is(server):
    """A message needs an object; a stream's client has the pieces."""
    say(server, CALL)
    cut = CALL[: CALL.index("lin")]
    num_tokens = len(server.tokenizer.encode(cut))
    answer = await ask(server, max_tokens=num_tokens)
    (block,) = answer["content"]
    assert answer["stop_reason"] == "max_tokens"
    assert BERLIN.startswith(block["input"]["INVALID_JSON"])
    stream = await events(server, max_tokens=num_tokens)
    pieces = [event["delta"]["partial_json"] for event in stream if event["type"] == "content_block_delta"]
    assert "".join(pieces) == block["input"]["INVALID_JSON"]


async def test_blocks_of_tools_become_turns(server):
    other = {"type": "tool_use", "id": "t2", "name": "get_time", "input": {}, "cache_control": {"type": "ephemeral"}}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "no"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3"},
        {"type": "text", "text": "Go on."},
    ]
    turn = {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USE, other]}
    await ask(server, messages=[*HELLO, turn, {"role": "user", "content": results}], tools=None)
    assert last_prompt(server) == (
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nI look.[t1 get_weather city=Berlin days=2 ][t2 get_time ]<|im_end|>\n"
        "<|im_start|>tool\nrain(t1)<|im_end|>\n<|im_start|>tool\nno(t2)<|im_end|>\n<|im_start|>tool\n(t3)<|im_end|>\n"
        "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )
    await ask(server, messages=[*HELLO, turn], tools=None)  # nothing to go on from but the end of the turn
    assert last_prompt(server).endswith("<|im_end|>\n<|im_start|>assistant\n")


async def test_tools_are_counted(server):
    counts = []
    for tools in (None, ANTHROPIC_TOOLS):
        answer = await ask(server, tools=tools, max_tokens=1)
        response = await server.post(f"{PATH}/count_tokens", messages=HELLO, tools=tools)
        assert response.json()["input_tokens"] == answer["usage"]["input_tokens"]
        counts.append(answer["usage"]["input_tokens"])
    assert counts[0] < counts[1]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f", "input_schema": {}, "schema": {}}]}, "unknown field 'tools[0].schema'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "get_time"}}, "tool_choice.type"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{}]}]}]},
            "messages[0].content[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**USE, "input": "a"}]}]},
            "messages[0].content[0].input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "messages[0].content[0].type",
        ),
    ],
    ids=str,
)
async def test_what_is_wrong_is_refused_by_its_place(server, fields, place):
    body = {"messages": HELLO, "max_tokens": 1, "tools": ANTHROPIC_TOOLS, **fields}
    response = await server.post(PATH, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(place)
