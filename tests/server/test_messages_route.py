"""POST /v1/messages and /v1/messages/count_tokens, by Anthropic's own client. Case ids stand in the names of tests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import httpx2  # what this client speaks through
import pytest

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def client_of(server: Any, **options: Any) -> anthropic.AsyncAnthropic:
    options = {"api_key": "none", **options}
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=server.app))
    return anthropic.AsyncAnthropic(base_url="http://server", http_client=http, max_retries=0, **options)


async def ask(server: Any, **body: Any) -> dict[str, Any]:
    response = await server.post(PATH, **{"messages": HELLO, "max_tokens": 3, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def events(server: Any, **body: Any) -> list[dict[str, Any]]:
    response = await server.post(PATH, **{"messages": HELLO, "max_tokens": 3, "stream": True, **body})
    assert response.status_code == 200, response.text
    *blocks, last = response.text.split("\n\n")
    assert last == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        record = json.loads(data.removeprefix("data: "))
        assert name == f"event: {record['type']}"
        found.append(record)
    return found


def error_of(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    record = response.json()
    assert set(record) == {"type", "error", "request_id"} and record["type"] == "error"
    assert set(record["error"]) == {"type", "message"} and record["error"]["type"] == kind
    return record["error"]["message"]


def prompt_of(server: Any) -> str:
    """What the engine got last."""
    return server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def test_a_message_by_the_anthropic_client(server):
    message = await client_of(server).messages.create(model="tiny", max_tokens=3, messages=HELLO)
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert [(block.type, block.text) for block in message.content] == [("text", " one two three")]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.input_tokens == len(server.tokenizer.encode(PROMPT))
    assert (message.usage.output_tokens, message.usage.cache_read_input_tokens) == (3, 0)
    assert prompt_of(server) == PROMPT
    assert message.id.startswith("msg_")


async def test_a_streamed_message_by_the_anthropic_client(server):
    whole = await client_of(server).messages.create(model="tiny", max_tokens=3, messages=HELLO)
    async with client_of(server).messages.stream(model="tiny", max_tokens=3, messages=HELLO) as stream:
        assert [text async for text in stream.text_stream] == [" one", " two", " three"]
        message = await stream.get_final_message()
    assert message.content[0].text == whole.content[0].text
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)
    assert message.usage.input_tokens == whole.usage.input_tokens


async def test_the_events_of_a_stream(server):
    server.engine.num_cached_tokens = 2
    found = await events(server)
    assert [event["type"] for event in found] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    num_prompt = len(server.tokenizer.encode(PROMPT))
    start, delta = found[0]["message"], found[-2]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert (start["usage"]["input_tokens"], start["usage"]["cache_read_input_tokens"]) == (num_prompt - 2, 2)
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 3


async def test_why_a_message_ended(server):
    assert (await ask(server, max_tokens=50, stop_sequences=[" three"]))["stop_reason"] == "stop_sequence"
    stopped = await ask(server, max_tokens=50, stop_sequences=["xx", " three"])
    assert (stopped["content"][0]["text"], stopped["stop_sequence"]) == (" one two", " three")
    *_, delta, _ = await events(server, max_tokens=50, stop_sequences=[" three"])
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " three"}
    server.engine.script = lambda request: [*server.tokenizer.encode(" one"), 2]
    ended = await ask(server, max_tokens=50)
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)


async def test_text_1_a_character_of_many_tokens_comes_whole(server):
    server.engine.script = lambda request: [*server.tokenizer.encode(" 😀日本"), 2]
    found = await events(server, max_tokens=50)
    deltas = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(deltas) == " 😀日本" == (await ask(server, max_tokens=50))["content"][0]["text"]


async def test_text_2_a_stop_string_within_tokens_never_shows(server):
    body = {"max_tokens": 50, "stop_sequences": ["o thr"]}
    found = await events(server, **body)
    deltas = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(deltas) == " one tw" == (await ask(server, **body))["content"][0]["text"]


async def test_a_message_without_text_has_no_content(server):
    server.engine.script = lambda request: [2]
    assert (await ask(server))["content"] == []
    assert [event["type"] for event in await events(server)] == ["message_start", "message_delta", "message_stop"]


async def test_api_2_content_blocks_are_their_texts(server):
    blocks = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
    await ask(server, messages=[{"role": "user", "content": blocks}])
    assert prompt_of(server) == PROMPT
    await ask(server, system=[{"type": "text", "text": "red"}, {"type": "text", "text": "blue"}])
    assert prompt_of(server) == f"<|im_start|>system\nred\nblue<|im_end|>\n{PROMPT}"
    await ask(server, system="green")
    assert prompt_of(server) == f"<|im_start|>system\ngreen<|im_end|>\n{PROMPT}"


async def test_neighbours_of_one_role_are_one_turn(server):
    await ask(server, messages=[*HELLO, {"role": "user", "content": "world"}])
    assert prompt_of(server) == PROMPT.replace("Hello", "Hello\nworld")


async def test_api_4_a_final_message_of_the_assistant_is_continued(server):
    messages = [*HELLO, {"role": "assistant", "content": "My guess would be "}]
    assert (await ask(server, messages=messages))["content"][0]["text"] == " one two three"
    assert prompt_of(server) == PROMPT + "My guess would be "
    await ask(server, messages=[*HELLO, {"role": "assistant", "content": ""}])
    assert prompt_of(server) == PROMPT


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([{"role": "user", "content": [{"type": "image", "source": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "tool_use"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ""}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([*HELLO, {"role": "tool", "content": "a"}], "messages[1].role"),
        ([], "messages"),
        ("Hello", "messages"),
        (None, "messages"),
    ],
    ids=str,
)
async def test_batch_6_api_2_wrong_messages_are_refused_by_place(server, messages, place):
    for path, more in ((PATH, {"max_tokens": 1}), (COUNT, {})):
        message = error_of(await server.post(path, messages=messages, **more), 400, "invalid_request_error")
        assert message.startswith(f"{place} is ")
    server.assert_idle()


async def test_unknown_fields_within_messages_are_refused_with_their_nearest_neighbour(serve, server):
    message = {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_contrl": {}}]}
    text = error_of(await server.post(COUNT, messages=[message]), 400, "invalid_request_error")
    assert "'messages[0].content[0].cache_contrl'" in text and "'messages[0].content[0].cache_control'" in text
    text = error_of(await server.post(COUNT, messages=[{**HELLO[0], "contents": "a"}]), 400, "invalid_request_error")
    assert "did you mean 'messages[0].content'" in text
    lenient = await serve(allow_unknown_fields=True)
    assert (await lenient.post(COUNT, messages=[message])).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", None),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "7"),
        ("max_tokens", True),
        ("temperature", 1.1),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 2),
        ("top_k", -2),
        ("stop_sequences", [""]),
        ("stop_sequences", "a"),
        ("stop_sequences", ["x"] * 100),
        ("system", 7),
        ("system", [{"type": "image"}]),
        ("metadata", {"user_id": 7}),
        ("metadata", {"user": "a"}),
        ("stream", "true"),
        ("thinking", {"type": "enabled", "budget_tokens": 1024}),
        ("tools", [{"name": "f", "input_schema": {}}]),
        ("tool_choice", {"type": "any"}),
        ("tool_choice", "auto"),
        ("n", 2),
        ("stop", ["a"]),
        ("output_config", {"effort": "low", "format": {"type": "json_schema"}}),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        ("context_management", {"edits": {}}),
        ("mcp_servers", [{"url": "http://a"}]),
        ("cache_salt", ""),
        ("priority", 1),
        ("stop_sequence", ["a"]),
    ],
    ids=str,
)
async def test_api_8_wrong_values_are_a_400_that_names_the_field(server, field, value):
    response = await server.post(PATH, **{"messages": HELLO, "max_tokens": 1, field: value})
    assert field in error_of(response, 400, "invalid_request_error")
    server.assert_idle()


async def test_fields_that_ask_nothing_are_accepted(server):
    body = {
        "thinking": {"type": "disabled"},
        "tools": [],
        "tool_choice": {"type": "auto"},
        "service_tier": "auto",
        "metadata": {"user_id": "u"},
        "cache_control": {"type": "ephemeral"},
        "temperature": 1,
        "stop_sequences": None,
    }
    await ask(server, **body)
    assert server.engine.requests[-1].user == "u"
    tools = [{"name": "f", "input_schema": {}}]
    await ask(server, tools=tools, tool_choice={"type": "none"})


async def test_what_claude_code_sends_is_taken(server):
    """All but its tools."""
    system = [{"type": "text", "text": each, "cache_control": {"type": "ephemeral"}} for each in ("red", "green")]
    body = {
        "system": system,
        "thinking": {"type": "adaptive", "budget_tokens": 0},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "tools": [],
        "metadata": {"user_id": "u"},
        "temperature": 1,
    }
    response = await server.post(f"{PATH}?beta=true", messages=HELLO, max_tokens=1, **body)
    assert response.status_code == 200, response.text
    del body["temperature"], body["metadata"]
    assert (await server.post(f"{COUNT}?beta=true", messages=HELLO, **body)).status_code == 200


async def test_sampling_fields_reach_the_engine(server):
    await ask(server, temperature=0.5, top_p=0.25, top_k=7, min_p=0.1, seed=3, ignore_eos=True)
    params = server.engine.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 7, 0.1)
    assert server.engine.requests[-1].seed == 3 and params.ignore_eos


async def test_counting_is_what_a_message_counts(server):
    body = {"messages": HELLO, "system": "red"}
    counted = await client_of(server).messages.count_tokens(model="tiny", **body)
    assert counted.input_tokens == (await ask(server, **body))["usage"]["input_tokens"]
    message = error_of(await server.post(COUNT, **body, max_tokens=1), 400, "invalid_request_error")
    assert "unknown field 'max_tokens'" in message


async def test_batch_4_a_message_beyond_the_context_is_refused(serve):
    server = await serve(max_model_len=64)
    room = 64 - len(server.tokenizer.encode(PROMPT))
    assert (await server.post(PATH, messages=HELLO, max_tokens=room)).status_code == 200
    assert (await server.post(PATH, messages=HELLO, max_tokens=room + 1)).status_code == 400
    for body in ({"max_tokens": 60}, {"max_tokens": 60, "stream": True}):
        response = await server.post(PATH, messages=HELLO, **body)
        assert "64 tokens" in error_of(response, 400, "invalid_request_error")


async def test_either_header_carries_the_key(serve):
    server = await serve(api_key=["k1", "k2"])
    message = error_of(await server.post(PATH, messages=HELLO), 401, "authentication_error")
    assert "x-api-key" in message
    with pytest.raises(anthropic.AuthenticationError):
        await client_of(server, api_key="wrong").messages.create(model="tiny", max_tokens=1, messages=HELLO)
    for options in ({"api_key": "k2"}, {"api_key": None, "auth_token": "k1"}):
        await client_of(server, **options).messages.create(model="tiny", max_tokens=1, messages=HELLO)
    for wrong in ({"x-api-key": ""}, {"x-api-key": " "}, {"authorization": "Bearer "}):
        response = await server.http.post(PATH, json={"messages": HELLO, "max_tokens": 1}, headers=wrong)
        error_of(response, 401, "authentication_error")
    headers = {"x-api-key": "k1"}
    assert (await server.http.get("/v1/models", headers=headers)).status_code == 401  # OpenAI's routes know no such


async def test_api_7_errors_have_anthropics_types(serve, server):
    client = client_of(server)
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.messages.create(model="nope", max_tokens=1, messages=HELLO)
    assert caught.value.body["error"]["type"] == "not_found_error"
    error_of(await server.http.get(PATH), 405, "invalid_request_error")
    for path in (PATH, COUNT):
        error_of(await server.http.post(path, content=b"{bad"), 400, "invalid_request_error")
    small = await serve(max_body_bytes=10)
    error_of(await small.post(PATH, messages=HELLO), 413, "request_too_large")
    server.engine.die()
    error_of(await server.post(PATH, messages=HELLO, max_tokens=1), 503, "overloaded_error")


async def test_a_full_queue_is_overloaded(serve):
    server = await serve(max_num_queued_reqs=1)
    server.engine.hold()
    waiting = asyncio.create_task(ask(server))
    while not server.llm.stats.num_waiting:
        await asyncio.sleep(0.001)
    response = await server.post(PATH, messages=HELLO, max_tokens=1)
    error_of(response, 503, "overloaded_error")
    assert response.headers["retry-after"] == "1"
    server.engine.release()
    await waiting


async def test_a_failure_in_a_stream_is_an_error_event(server):
    server.engine.fail[server.tokenizer.encode(PROMPT)[-1]] = "the numbers are wrong"
    found = await events(server, max_tokens=9)
    assert found[-1]["type"] == "error" and found[-1]["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIStatusError):
        async with client_of(server).messages.stream(model="tiny", max_tokens=9, messages=HELLO) as stream:
            await stream.get_final_message()
    error_of(await server.post(PATH, messages=HELLO, max_tokens=9), 500, "api_error")
    server.assert_idle()


async def test_api_10_without_a_template_messages_are_refused(serve):
    server = await serve(chat_template=False)
    message = error_of(await server.post(PATH, messages=HELLO, max_tokens=1), 400, "invalid_request_error")
    assert "--chat-template" in message


async def test_api_9_what_a_template_refuses_is_a_400_with_its_words(server):
    server.llm.chat_template = type(server.llm.chat_template)("{{ raise_exception('no') }}")
    assert error_of(await server.post(PATH, messages=HELLO, max_tokens=1), 400, "invalid_request_error") == "no"
