"""POST /v1/responses, by OpenAI's own client. Case ids stand in the names of the tests that cover them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.text.chat_template import load_chat_template

PATH = "/v1/responses"
PROMPT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
KINDS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * 3,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


async def ask(server: Any, **body: Any) -> dict[str, Any]:
    response = await server.post(PATH, **{"input": "Hello", "max_output_tokens": 3, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def events(server: Any, **body: Any) -> list[dict[str, Any]]:
    response = await server.post(PATH, **{"input": "Hello", "max_output_tokens": 3, "stream": True, **body})
    assert response.status_code == 200, response.text
    *blocks, last = response.text.split("\n\n")
    assert last == ""
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        record = json.loads(data.removeprefix("data: "))
        assert name == f"event: {record['type']}" and record["sequence_number"] == number
        found.append(record)
    return found


def prompt_of(server: Any) -> str:
    """What the engine got last."""
    return server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def refused(server: Any, **body: Any) -> dict[str, Any]:
    response = await server.post(PATH, **{"input": "Hello", **body})
    assert response.status_code == 400, response.text
    server.assert_idle()
    return response.json()["error"]


async def test_a_response_by_the_openai_client(server):
    server.engine.num_cached_tokens = 2
    server.engine.script = lambda request: [*server.tokenizer.encode(" one two"), 2]
    response = await server.openai.responses.create(model="tiny", input="Hello", metadata={"a": "b"})
    assert (response.status, response.output_text, response.error) == ("completed", " one two", None)
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert response.usage.input_tokens == len(server.tokenizer.encode(PROMPT))
    assert (response.usage.input_tokens_details.cached_tokens, response.usage.output_tokens) == (2, 3)
    assert response.usage.total_tokens == response.usage.input_tokens + 3
    assert response.id.startswith("resp_") and response.metadata == {"a": "b"} and response.store is False
    assert prompt_of(server) == PROMPT


async def test_a_streamed_response_by_the_openai_client(server):
    async with server.openai.responses.stream(model="tiny", input="Hello", max_output_tokens=3) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert deltas == [" one", " two", " three"]
    stream = await server.openai.responses.create(model="tiny", input="Hello", max_output_tokens=3, stream=True)
    found = [event async for event in stream]
    assert [event.type for event in found] == [*KINDS, "response.incomplete"]
    assert found[-1].response.output_text == " one two three"


async def test_a_stream_ends_with_what_is_answered_at_once(server):
    found = await events(server, seed=1)
    assert [event["type"] for event in found] == [*KINDS, "response.incomplete"]
    first, last = found[0]["response"], found[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    whole = await ask(server, seed=1)
    for ids in (last, whole):
        del ids["id"], ids["output"][0]["id"], ids["completed_at"], ids["created_at"]
    assert last == whole
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["status"] == "incomplete"
    item_ids = {event["item_id"] for event in found if "item_id" in event} | {found[2]["item"]["id"]}
    assert len(item_ids) == 1


async def test_text_1_a_character_of_many_tokens_comes_whole(server):
    server.engine.script = lambda request: [*server.tokenizer.encode(" 😀日本"), 2]
    found = await events(server, max_output_tokens=50)
    deltas = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    (done,) = [event["text"] for event in found if event["type"] == "response.output_text.done"]
    assert "".join(deltas) == done == " 😀日本"


async def test_a_stream_that_ends_by_itself_is_completed(server):
    server.engine.script = lambda request: [*server.tokenizer.encode(" one"), 2]
    *_, last = await events(server, max_output_tokens=9)
    assert last["type"] == "response.completed" and last["response"]["incomplete_details"] is None


async def test_batch_5_max_output_tokens_is_the_rest_of_the_context(serve):
    server = await serve(max_model_len=64)
    assert (await ask(server, ignore_eos=True, max_output_tokens=None))["usage"]["total_tokens"] == 64
    error = await refused(server, max_output_tokens=60)
    assert error["param"] == "max_output_tokens" and error["code"] == "context_length_exceeded"


async def test_api_2_items_and_parts_are_their_texts(server):
    parts = [{"type": "input_text", "text": "Hello"}]
    for item in ({"content": "Hello"}, {"content": parts}, {"content": parts, "type": "message"}):
        await ask(server, input=[{"role": "user", **item}])
        assert prompt_of(server) == PROMPT
    await ask(server, instructions="red", input=[{"role": "developer", "content": "blue"}, {"role": "user", **item}])
    assert prompt_of(server) == f"<|im_start|>system\nred\nblue<|im_end|>\n{PROMPT}"
    await ask(server, instructions="red")
    assert prompt_of(server) == f"<|im_start|>system\nred<|im_end|>\n{PROMPT}"


async def test_an_output_goes_back_in_as_it_came_out(server):
    hello = {"role": "user", "content": "Hello"}
    first = await server.openai.responses.create(model="tiny", input=[hello], max_output_tokens=2)
    await server.openai.responses.create(model="tiny", input=[hello, *first.output, hello], max_output_tokens=1)
    assert prompt_of(server) == f"{PROMPT} one two<|im_end|>\n{PROMPT}"


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ([], "input"),
        (None, "input"),
        (7, "input"),
        ([7], "input[0]"),
        ([{"role": "tool", "content": "a"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": []}], "input[0].content"),
        ([{"role": "user", "content": [7]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"type": "custom_tool_call_output", "call_id": "c", "output": "2"}], "input[0].type"),
    ],
    ids=str,
)
async def test_batch_6_api_2_wrong_input_is_refused_by_place(server, given, place):
    error = await refused(server, input=given)
    assert error["param"] == place and error["message"].startswith(f"{place} is ")


async def test_unknown_fields_within_items_are_refused_with_their_nearest_neighbour(serve, server):
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hello", "anotations": []}]}]
    error = await refused(server, input=items)
    assert error["code"] == "unknown_field" and "did you mean 'input[0].content[0].annotations'" in error["message"]
    assert (await refused(server, input=[{"role": "user", "content": "a", "idd": "b"}]))["param"] == "input[0].idd"
    lenient = await serve(allow_unknown_fields=True)
    await ask(lenient, input=items)


async def test_null_means_absent_within_items(server):
    turn = {"type": None, "id": None, "status": None, "role": "assistant", "content": None}
    await ask(server, input=[turn, {"role": "user", "content": "Hello"}])
    assert prompt_of(server) == f"<|im_start|>assistant\n<|im_end|>\n{PROMPT}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_output_tokens", 0),
        ("max_output_tokens", 1.5),
        ("max_output_tokens", "7"),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("stop", [""]),
        ("stream", 1),
        ("metadata", "a"),
        ("instructions", 7),
        ("max_tokens", 5),
        ("messages", []),
        ("tool_choice", "required"),
    ],
    ids=str,
)
async def test_api_8_wrong_values_are_a_400_that_names_the_field(server, field, value):
    assert (await refused(server, **{field: value}))["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", True),
        ("conversation", "c"),
        ("include", ["message.output_text.logprobs"]),
        ("tools", [{"type": "function", "name": "f"}]),
        ("include", "reasoning.encrypted_content"),
        ("reasoning", {"mode": "pro"}),
        ("text", {"format": {"type": "json_schema"}}),
        ("truncation", "auto"),
    ],
    ids=str,
)
async def test_fields_that_cannot_be_honoured_yet_are_refused(server, field, value):
    error = await refused(server, **{field: value})
    assert error["param"].partition(".")[0] == field and "support" in error["message"]


async def test_fields_that_ask_nothing_are_accepted(server):
    await ask(
        server,
        store=False,
        previous_response_id=None,
        reasoning={"effort": None, "summary": None},
        text={"format": {"type": "text"}, "verbosity": "low"},
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        service_tier="auto",
        truncation="disabled",
        stream_options=None,
        user="u",
    )
    assert server.engine.requests[-1].user == "u"


async def test_what_codex_sends_is_taken(server):
    """All but its tools."""
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
    answer = await ask(
        server,
        instructions="red",
        input=[{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "blue"}]}, item],
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        text={"verbosity": "medium"},
        client_metadata={"a": "b"},
    )
    assert prompt_of(server) == f"<|im_start|>system\nred\nblue<|im_end|>\n{PROMPT}"
    assert answer["reasoning"] == {"effort": "medium", "summary": None}


async def test_an_effort_reaches_the_template(serve):
    template = "{{ messages[0]['content'] }} {{ reasoning_effort | default('red') }}"
    server = await serve()
    server.llm.chat_template = load_chat_template(template, server.tokenizer)
    for fields, said in (
        ({}, "Hello red"),
        ({"reasoning": {"effort": "blue"}}, "Hello blue"),
        ({"reasoning": {"effort": "blue"}, "chat_template_kwargs": {"reasoning_effort": "green"}}, "Hello green"),
    ):
        await ask(server, **fields)
        assert prompt_of(server) == said


async def test_sampling_fields_reach_the_engine(server):
    answer = await ask(server, temperature=0.5, top_p=0.25, top_k=7, min_p=0.1, seed=3, stop=[" two"])
    params = server.engine.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 7, 0.1)
    assert (answer["temperature"], answer["top_p"], answer["seed"]) == (0.5, 0.25, 3)
    assert (answer["status"], answer["output"][0]["content"][0]["text"]) == ("completed", " one")


async def test_a_failure_in_a_stream_is_its_last_event(server):
    server.engine.fail[server.tokenizer.encode(PROMPT)[-1]] = "the numbers are wrong"
    *_, last = await events(server, max_output_tokens=9)
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the numbers are wrong"}
    response = await server.post(PATH, input="Hello", max_output_tokens=9)
    assert response.status_code == 500 and response.json()["error"]["type"] == "InternalServerError"
    server.assert_idle()


async def test_api_7_an_unknown_model_is_a_404(server):
    response = await server.post(PATH, input="Hello", model="nope")
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


async def test_api_10_without_a_template_responses_are_refused(serve):
    server = await serve(chat_template=False)
    assert "--chat-template" in (await refused(server))["message"]
