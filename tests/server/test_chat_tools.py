"""Tool calls on /v1/chat/completions: what is taken, what reaches the template, what is answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server.tools import ToolCalling
from support.scripted_engine import scripted_tokenizer
from support.tools import (
    BERLIN,
    CALL,
    CALLS,
    CHAT_TOOLS,
    FLAGS,
    TEXT_AND_CALLS,
    TIME,
    WEATHER,
    joined_choices,
    last_prompt,
    say,
    tools_of_size,
    use_template,
    whole_choice,
    without_ids,
)

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TWO_CALLS = [("get_weather", BERLIN), ("get_time", "{}")]


@pytest.fixture
async def server(serve: Any) -> Any:
    server = await serve(**FLAGS, max_model_len=4096)
    use_template(server)
    return server


async def ask(server: Any, **body: Any) -> dict[str, Any]:
    response = await server.post(PATH, **{"messages": HELLO, "tools": CHAT_TOOLS, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(server: Any, **body: Any) -> list[dict[str, Any]]:
    *events, done = await server.events(PATH, **{"messages": HELLO, "tools": CHAT_TOOLS, **body})
    assert done == "[DONE]"
    return [json.loads(data) for data in events]


async def refused(server: Any, **body: Any) -> dict[str, Any]:
    response = await server.post(PATH, **{"messages": HELLO, "tools": CHAT_TOOLS, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def test_calls_are_found_in_what_the_model_says(server):
    say(server, CALLS)
    (choice,) = (await ask(server))["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["stop_reason"] is None
    assert choice["message"]["content"] is None
    first, second = choice["message"]["tool_calls"]
    assert first == {
        "id": first["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": BERLIN},
    }
    assert second["function"] == {"name": "get_time", "arguments": "{}"}
    assert first["id"].startswith("call_") and first["id"] != second["id"]
    server.assert_idle()


async def test_text_before_calls_is_content(server):
    say(server, TEXT_AND_CALLS)
    (choice,) = (await ask(server))["choices"]
    assert without_ids(whole_choice(choice)) == {
        "content": "I will look.\n",
        "calls": TWO_CALLS,
        "finish_reason": "tool_calls",
    }


@pytest.mark.parametrize("text", [TEXT_AND_CALLS, CALL, "plain text", CALL[:-20], "<tool_call>oops</tool_call> <tool"])
async def test_a_stream_is_the_whole_in_pieces(server, text):
    say(server, text)
    (whole,) = (await ask(server))["choices"]
    stream = await chunks(server)
    assert stream[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    (streamed,) = joined_choices(stream)
    assert without_ids(streamed) == without_ids(whole_choice(whole))
    assert streamed["finish_reason"] == ("tool_calls" if "get_weather" in text else "stop")


async def test_arguments_come_as_they_are_written(server):
    """The name first, once it is known, then what the model makes of the arguments."""
    say(server, CALL)
    deltas = [chunk["choices"][0]["delta"] for chunk in await chunks(server)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "get_weather" and len(calls) > 3
    assert all(len(call["function"]["arguments"]) < len(BERLIN) / 2 for call in calls)


async def test_a_call_that_is_cut_off_ends_with_length(server):
    say(server, CALL)
    num_tokens = len(server.tokenizer.encode(CALL[: CALL.index("Berlin")]))
    (choice,) = (await ask(server, max_tokens=num_tokens))["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert BERLIN.startswith(call["function"]["arguments"])
    assert without_ids(joined_choices(await chunks(server, max_tokens=num_tokens))[0]) == without_ids(
        whole_choice(choice)
    )


async def test_each_choice_has_its_own_calls(server):
    texts = [CALL, "plain text", CALLS]
    encoded = [[*server.tokenizer.encode(text), 2] for text in texts]
    server.engine.script = lambda request: encoded[request.sample_index]
    whole = [whole_choice(choice) for choice in (await ask(server, n=3))["choices"]]
    assert [len(choice["calls"]) for choice in whole] == [1, 0, 2]
    assert [choice["finish_reason"] for choice in whole] == ["tool_calls", "stop", "tool_calls"]
    assert len({call["id"] for choice in whole for call in choice["calls"]}) == 3
    streamed = joined_choices(await chunks(server, n=3))
    assert list(map(without_ids, streamed)) == list(map(without_ids, whole))


async def test_without_parallel_calls_the_first_one_counts(server):
    say(server, TEXT_AND_CALLS + " Done.")
    whole = whole_choice((await ask(server, parallel_tool_calls=False))["choices"][0])
    (streamed,) = joined_choices(await chunks(server, parallel_tool_calls=False))
    for choice in (whole, streamed):
        assert without_ids(choice) == {
            "content": "I will look.\n Done.",
            "calls": TWO_CALLS[:1],
            "finish_reason": "tool_calls",
        }


async def test_logprobs_ids_usage_and_stop_are_as_without_tools(server):
    say(server, TEXT_AND_CALLS)
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    with_tools = await ask(server, **fields)
    plain = await ask(server, tool_choice="none", **fields)
    (called,), (said,) = with_tools["choices"], plain["choices"]
    assert said["message"]["content"] == TEXT_AND_CALLS and said["finish_reason"] == "stop"
    assert called["token_ids"] == said["token_ids"] and called["logprobs"] == said["logprobs"]
    assert with_tools["usage"] == plain["usage"]
    stream = await chunks(server, **fields, stream_options={"include_usage": True})
    assert stream[-1]["usage"] == plain["usage"]
    pieces = [choice for chunk in stream[1:] for choice in chunk["choices"]]
    assert [token_id for piece in pieces for token_id in piece["token_ids"]] == said["token_ids"]
    assert [each for piece in pieces for each in piece["logprobs"]["content"]] == said["logprobs"]["content"]
    (stopped,) = (await ask(server, stop=["look"]))["choices"]
    assert stopped["message"] == {"role": "assistant", "content": "I will "} and stopped["stop_reason"] == "look"
    (stopped,) = (await ask(server, stop=["</tool_call>"]))["choices"]
    assert (stopped["finish_reason"], len(stopped["message"]["tool_calls"])) == ("tool_calls", 1)


async def test_calls_are_counted_as_a_reason_to_end(server):
    def counted(reason: str) -> float:
        text = server.llm.metrics.render().decode()
        lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total")]
        return sum(float(line.split()[-1]) for line in lines if f'finished_reason="{reason}"' in line)

    say(server, CALL)
    await ask(server)
    await chunks(server, n=2)
    assert (counted("tool_calls"), counted("stop")) == (3, 0)
    await ask(server, tool_choice="none")
    assert (counted("tool_calls"), counted("stop")) == (3, 1)


@pytest.mark.parametrize("skip", [True, False])
async def test_markers_that_are_special_tokens_are_seen(serve, skip):
    """And no others: the end of the turn is no part of an answer unless it is asked for."""
    server = await serve(**FLAGS, tokenizer=scripted_tokenizer("<tool_call>", "</tool_call>"), max_model_len=4096)
    assert len(server.front.tool_calling.marker_ids) == 2
    text = f"<|im_start|>I will look.{CALL}"
    say(server, text)
    (choice,) = (await ask(server, skip_special_tokens=skip))["choices"]
    shown = whole_choice(choice)
    assert without_ids(shown)["calls"] == TWO_CALLS[:1]
    assert shown["content"] == ("I will look." if skip else "<|im_start|>I will look.<|im_end|>")
    (streamed,) = joined_choices(await chunks(server, skip_special_tokens=skip))
    assert without_ids(streamed) == without_ids(shown)
    (plain,) = (await ask(server, tools=None))["choices"]
    assert "<tool_call>" not in plain["message"]["content"]


async def test_the_template_sees_tools_and_calls(server):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": BERLIN}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    await ask(server, messages=[*HELLO, turn, result])
    tools = [{"type": "function", "function": each} for each in (WEATHER, TIME)]
    assert last_prompt(server) == (
        f"tools: {json.dumps(tools)}\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n[c1 get_weather city=Berlin days=2 ]<|im_end|>\n"
        "<|im_start|>tool\nrain(c1)<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("choice", [None, "auto"])
async def test_tools_are_in_the_prompt_also_where_none_is_to_be_called(serve, server, choice):
    await ask(server, tool_choice=choice)
    with_tools = last_prompt(server)
    await ask(server, tool_choice="none")
    assert last_prompt(server) == with_tools != ""
    other = await serve(**FLAGS, exclude_tools_when_tool_choice_none=True)
    use_template(other)
    await ask(other, tool_choice="none")
    assert "tools:" not in last_prompt(other)


async def test_tokenize_counts_the_tools(server):
    await ask(server)
    response = await server.post("/tokenize", messages=HELLO, tools=CHAT_TOOLS)
    assert response.json()["tokens"] == list(server.engine.requests[-1].prompt_token_ids)


async def test_without_the_flags_tools_are_refused_by_name(serve):
    server = await serve()
    error = await refused(server)
    assert error["param"] == "tools" and "--enable-auto-tool-choice" in error["message"]
    assert "--tool-call-parser" in error["message"]
    assert (await ask(server, tool_choice="none"))["choices"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}], ids=str)
async def test_a_forced_call_is_refused(server, choice):
    error = await refused(server, tool_choice=choice)
    assert error["param"] == "tool_choice" and "structured output" in error["message"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom", "function": TIME}, "tools[1].type"),
        ({"type": "function"}, "tools[1].function"),
        ({"type": "function", "function": []}, "tools[1].function"),
        ({"type": "function", "function": {}}, "tools[1].function.name"),
        ({"type": "function", "function": {"name": ""}}, "tools[1].function.name"),
        ({"type": "function", "function": {"name": "a b"}}, "tools[1].function.name"),
        ({"type": "function", "function": {"name": "f" * 129}}, "tools[1].function.name"),
        ({"type": "function", "function": {"name": "f", "description": 7}}, "tools[1].function.description"),
        ({"type": "function", "function": {"name": "f", "parameters": []}}, "tools[1].function.parameters"),
        ({"type": "function", "function": {"name": "f", "parametres": {}}}, "tools[1].function.parametres"),
    ],
    ids=str,
)
async def test_a_wrong_tool_is_refused_by_its_place(server, tool, param):
    assert (await refused(server, tools=[CHAT_TOOLS[0], tool]))["param"] == param
    assert (await refused(server, tools=[CHAT_TOOLS[0], tool], tool_choice="none"))["param"] == param


async def test_other_rules(server):
    assert (await refused(server, tools=tools_of_size(1025, 300)))["param"] == "tools"
    assert (await refused(server, tools=["f"]))["param"] == "tools"
    assert (await refused(server, parallel_tool_calls="no"))["param"] == "parallel_tool_calls"
    assert (await refused(server, use_beam_search=True, n=2))["param"] == "use_beam_search"


@pytest.mark.parametrize("path", [PATH, "/v1/responses", "/v1/messages"])
async def test_tools_that_are_nested_as_deeply_as_can_be_read_break_nothing(server, path):
    """At some depth the body can still be read, but what is made of it could not be written."""
    bodies: dict[str, dict[str, Any]] = {
        PATH: {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "parameters": "HERE"}}]},
        "/v1/responses": {"input": "Hello", "tools": [{"type": "function", "name": "f", "parameters": "HERE"}]},
        "/v1/messages": {"messages": HELLO, "max_tokens": 1, "tools": [{"name": "f", "input_schema": "HERE"}]},
    }
    statuses = set()
    for depth in (100, 400, *range(900, 1000, 3)):
        data = json.dumps(bodies[path]).replace('"HERE"', '{"a":' * depth + "{}" + "}" * depth)
        response = await server.http.post(path, content=data, headers={"content-type": "application/json"})
        statuses.add(response.status_code)
        assert response.status_code in (200, 400), (depth, response.text)
    assert statuses == {200, 400}


async def test_schema_9_sixty_tools_are_taken(serve):
    server = await serve(**FLAGS, max_model_len=262144)
    use_template(server)
    say(server, CALL)
    (choice,) = (await ask(server, tools=tools_of_size(60, 1700)))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert last_prompt(server).count('"name"') == 60


async def test_the_template_shows_the_format_where_no_flag_names_it(serve):
    """Where it shows none, the server does not start."""
    with pytest.raises(ConfigError, match="tool_call_parser"):
        await serve(enable_auto_tool_choice=True)
    server = await serve()
    config = ServerConfig(enable_auto_tool_choice=True)
    use_template(server, "{{ tools }}[TOOL_CALLS]{{ messages[0].content }}")
    found = ToolCalling.of(server.llm, config)
    assert (found.name, found.is_shown) == ("mistral", True)
    use_template(server, "<tool_call>{{ messages[0].content }}")
    found = ToolCalling.of(server.llm, config)
    assert (found.name, found.is_shown) == ("hermes", False)
    assert ToolCalling.of(server.llm, ServerConfig(tool_call_parser="hermes")) is None


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", f'{{"name": "get_weather", "parameters": {BERLIN}}}; {{"name": "get_time"}}'),
        ("mistral", f"[TOOL_CALLS]get_weather{BERLIN}[TOOL_CALLS]get_time{{}}"),
        ("pythonic", '[get_weather(city="Berlin", days=2), get_time()]'),
        (
            "qwen3_coder",
            "<tool_call><function=get_weather>\n<parameter=city>\nBerlin\n</parameter>\n<parameter=days>\n2\n</parameter>"
            "\n</function></tool_call>\n<tool_call><function=get_time>\n</function></tool_call>",
        ),
        ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {BERLIN}}}, {{"name": "get_time"}}]'),
    ],
)
async def test_every_format_is_told_alike(serve, parser, text):
    server = await serve(enable_auto_tool_choice=True, tool_call_parser=parser, max_model_len=4096)
    say(server, text)
    (choice,) = map(whole_choice, (await ask(server))["choices"])
    assert without_ids(choice) == {"content": "", "calls": TWO_CALLS, "finish_reason": "tool_calls"}
    assert {len(call["id"]) for call in choice["calls"]} == ({9} if parser == "mistral" else {29})
    (streamed,) = joined_choices(await chunks(server))
    assert without_ids(streamed) == without_ids(choice)
