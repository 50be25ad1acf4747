"""POST /v1/chat/completions and /tokenize. Case ids stand in the names of the tests that cover them."""

from __future__ import annotations

import json
from typing import Any

import pytest

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


async def chat(server: Any, **body: Any) -> dict[str, Any]:
    body.setdefault("messages", HELLO)
    response = await server.post(PATH, **body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_chat_by_the_openai_client(server):
    answer = await server.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", " one two three")
    assert choice.finish_reason == "length" and answer.object == "chat.completion"
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert server.engine.requests[0].prompt_token_ids == server.tokenizer.encode(prompt)
    assert answer.usage.completion_tokens == 3


async def test_a_streamed_chat_by_the_openai_client(server):
    stream = await server.openai.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    first, *middle, last = [chunk async for chunk in stream]
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert [chunk.choices[0].delta.content for chunk in middle] == [" one", " two", " three"]
    assert [chunk.choices[0].finish_reason for chunk in middle] == [None, None, "length"]
    assert all(chunk.choices[0].delta.role is None for chunk in middle)
    assert last.choices == [] and last.usage.completion_tokens == 3


async def test_streamed_samples_open_and_end_each(server):
    events = await server.events(PATH, messages=HELLO, max_tokens=2, n=2)
    choices = [json.loads(data)["choices"][0] for data in events[:-1]]
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in mine) == " one two"
        assert mine[-1]["finish_reason"] == "length"


async def test_text_3_a_stop_string_does_not_hold_up_the_stream(server):
    words = server.tokenizer.encode(" one two three four five six seven eight nine ten eleven twelve")
    events = await server.events(PATH, messages=HELLO, max_tokens=len(words), stop=["zz"])
    contents = [json.loads(data)["choices"][0]["delta"].get("content", "") for data in events[:-1]]
    assert contents.count("") <= 2
    assert len(contents) >= 12


@pytest.mark.parametrize("stop", ["", [""], ["", "x"]], ids=str)
async def test_text_4_an_empty_stop_string_is_refused(server, stop):
    response = await server.post(PATH, messages=HELLO, stop=stop)
    assert response.status_code == 400 and response.json()["error"]["param"] == "stop"


async def test_batch_5_max_tokens_is_the_rest_of_the_context(serve):
    server = await serve(max_model_len=64)
    answer = await chat(server, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 64
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_max_completion_tokens_beats_max_tokens(server):
    assert (await chat(server, max_tokens=2, max_completion_tokens=4))["usage"]["completion_tokens"] == 4
    assert (await chat(server, max_tokens=2, max_completion_tokens=None))["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, -5, 1.5, "7", True])
async def test_api_8_chat_needs_at_least_one_token(server, field, value):
    response = await server.post(PATH, messages=HELLO, **{field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


async def test_sample_8_top_logprobs_are_as_many_as_asked(server):
    entries = (await chat(server, logprobs=True, top_logprobs=5, max_tokens=2))["choices"][0]["logprobs"]["content"]
    assert len(entries) == 2
    for entry in entries:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 5 and values == sorted(values, reverse=True)
        assert entry["logprob"] == next(t["logprob"] for t in entry["top_logprobs"] if t["token"] == entry["token"])
    assert bytes(entries[0]["bytes"]).decode() == entries[0]["token"] == " one"


async def test_sample_8_logprobs_alone_has_no_alternatives(server):
    entries = (await chat(server, logprobs=True, max_tokens=1))["choices"][0]["logprobs"]["content"]
    assert entries[0]["top_logprobs"] == []
    assert (await chat(server, max_tokens=1))["choices"][0]["logprobs"] is None


async def test_sample_8_top_logprobs_without_logprobs_are_refused(server):
    for more in ({"top_logprobs": 5}, {"top_logprobs": 21, "logprobs": True}, {"top_logprobs": -1, "logprobs": True}):
        response = await server.post(PATH, messages=HELLO, **more)
        assert response.status_code == 400 and response.json()["error"]["param"] == "top_logprobs"


async def test_prompt_extras_stand_beside_the_choices(server):
    answer = await chat(server, max_tokens=1, prompt_logprobs=1, return_token_ids=True)
    ids = server.engine.requests[0].prompt_token_ids
    assert answer["prompt_token_ids"] == ids
    assert len(answer["prompt_logprobs"]) == len(ids) and answer["prompt_logprobs"][0] is None
    assert answer["choices"][0]["token_ids"] == server.tokenizer.encode(" one")


@pytest.mark.parametrize("content", [None, "", ...], ids=["null", "empty", "absent"])
async def test_api_1_an_assistant_turn_with_tool_calls_and_no_content(server, content):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": content, "tool_calls": [call]}
    if content is ...:
        del turn["content"]
    tool = {"role": "tool", "tool_call_id": "c", "content": "2"}
    await chat(server, messages=[*HELLO, turn, tool, *HELLO], max_tokens=1)


async def test_api_2_content_parts_are_their_texts(server):
    parts = [{"type": "text", "text": "Hello"}]
    for role in ("user", "system", "tool", "assistant"):
        plain = await chat(server, messages=[{"role": role, "content": "Hello"}], max_tokens=1)
        in_parts = await chat(server, messages=[{"role": role, "content": parts}], max_tokens=1)
        assert plain["usage"] == in_parts["usage"]
        assert server.engine.requests[-1].prompt_token_ids == server.engine.requests[-2].prompt_token_ids
    two = [{"role": "user", "content": [*parts, {"type": "text", "text": "world"}]}]
    response = await server.post("/tokenize", messages=two)
    text = server.tokenizer.decode(response.json()["tokens"])
    assert "Hello" in text and "world" in text


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "nope"}, 7, {}])
async def test_api_2_other_parts_are_refused(server, part):
    response = await server.post(PATH, messages=[{"role": "user", "content": [part]}])
    assert response.status_code == 400


ABSENT = "absent"


@pytest.mark.parametrize("choice", [ABSENT, None, "none", "auto"])
@pytest.mark.parametrize("tools", [ABSENT, None, []], ids=str)
async def test_api_3_tool_choice_without_tools_is_plain_text(server, choice, tools):
    body = {name: value for name, value in (("tool_choice", choice), ("tools", tools)) if value is not ABSENT}
    assert (await chat(server, max_tokens=1, **body))["choices"][0]["message"]["content"] == " one"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}, "sometimes", 7])
async def test_api_3_a_forced_tool_call_is_refused(server, choice):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for body in ({}, {"tools": []}, {"tools": tools}):
        response = await server.post(PATH, messages=HELLO, tool_choice=choice, **body)
        assert response.status_code == 400 and response.json()["error"]["param"] == "tool_choice"


PREFILLED = [*HELLO, {"role": "assistant", "content": "My guess would be "}]


async def test_api_4_the_final_message_is_continued(server):
    body = {"messages": PREFILLED, "continue_final_message": True, "add_generation_prompt": False}
    tokens = (await server.post("/tokenize", **body)).json()["tokens"]
    assert server.tokenizer.decode(tokens, skip_special_tokens=False).endswith("assistant\nMy guess would be ")
    answer = await chat(server, max_tokens=1, **body)
    assert answer["choices"][0]["message"]["content"] == " one"
    assert server.engine.requests[-1].prompt_token_ids == tokens


async def test_api_4_contradictions_are_refused(server):
    both = {"continue_final_message": True, "add_generation_prompt": True}
    response = await server.post(PATH, messages=PREFILLED, **both)
    assert response.status_code == 400
    one = {"continue_final_message": True, "add_generation_prompt": False}
    response = await server.post(PATH, messages=HELLO, **one)
    assert response.status_code == 400


async def test_api_9_what_a_template_refuses_is_a_400_with_its_words(server):
    response = await server.post(PATH, messages=[{"role": "refused", "content": "a"}])
    assert response.status_code == 400
    assert "the role refused is refused" in response.json()["error"]["message"]
    await chat(server, max_tokens=1)


async def test_api_10_without_a_template_only_chat_is_refused(serve):
    server = await serve(chat_template=False)
    for path in (PATH, "/tokenize"):
        response = await server.post(path, messages=HELLO)
        assert response.status_code == 400
        assert "--chat-template" in response.json()["error"]["message"]
    assert (await server.post("/v1/completions", prompt="a")).status_code == 200


@pytest.mark.parametrize("messages", [[], None, "Hello", [1], {"role": "user"}], ids=str)
async def test_batch_6_messages_must_be_a_list_of_objects(server, messages):
    response = await server.post(PATH, messages=messages)
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("message", [{}, {"role": "user"}, {"content": "a"}, {"role": 7, "content": "a"}], ids=str)
async def test_a_broken_message_is_a_400(server, message):
    assert (await server.post(PATH, messages=[message])).status_code == 400


async def test_tokenize_and_detokenize_are_inverse(server):
    body = (await server.post("/tokenize", prompt="Hello 😀 world", return_token_strs=True)).json()
    ids = server.tokenizer.encode("Hello 😀 world")
    assert body["tokens"] == ids and body["count"] == len(ids) and body["max_model_len"] == 256
    assert len(body["token_strs"]) == len(ids)
    assert (await server.post("/detokenize", tokens=ids)).json() == {"prompt": "Hello 😀 world"}


async def test_detokenize_of_broken_bytes_is_text(server):
    ids = server.tokenizer.encode("😀")[:2]
    response = await server.post("/detokenize", tokens=ids)
    assert response.status_code == 200 and "\ufffd" in response.json()["prompt"]


@pytest.mark.parametrize("tokens", [None, [-1], [10**9], [1.5], ["1"], "1", [True]], ids=str)
async def test_detokenize_refuses_what_is_no_token(server, tokens):
    response = await server.post("/detokenize", tokens=tokens)
    assert response.status_code == 400 and response.json()["error"]["param"] == "tokens"


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": HELLO}, {"prompt": 7}, {"prompt": ["a"]}], ids=str)
async def test_tokenize_takes_one_prompt_or_messages(server, body):
    assert (await server.post("/tokenize", **body)).status_code == 400


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message", "tools"])
@pytest.mark.parametrize("path", [PATH, "/tokenize"])
async def test_kwargs_that_have_a_field_of_their_own_are_a_400(server, path, name):
    response = await server.post(path, messages=HELLO, chat_template_kwargs={name: True})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "chat_template_kwargs"


async def test_reasoning_effort_and_kwargs_reach_the_template(server):
    server.llm.chat_template = _Template()
    await chat(server, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}, max_tokens=1)
    assert server.llm.chat_template.seen["reasoning_effort"] == "low"
    assert server.llm.chat_template.seen["enable_thinking"] is False


class _Template:
    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        self.seen = variables
        return "Hello"
