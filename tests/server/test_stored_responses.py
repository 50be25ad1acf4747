"""Responses that are kept, by OpenAI's own client: conversations by `previous_response_id`, GET, DELETE, cancel."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import openai
import pytest

from octavo.config import ServerConfig, responses_store_of_environment

PATH = "/v1/responses"
TURNS = ("Hello", "red green", "blue")
ASK: dict[str, Any] = {"model": "tiny", "max_output_tokens": 9, "temperature": 0}


@pytest.fixture
async def keeping(serve):
    server = await serve(enable_responses_store=True, max_model_len=1024)
    server.engine.script = lambda request: [*server.tokenizer.encode(" one two"), 2]
    return server


def prompts_of(server: Any) -> list[list[int]]:
    """What the engine got, and forget it."""
    prompts = [request.prompt_token_ids for request in server.engine.requests]
    server.engine.requests.clear()
    return prompts


async def refused(server: Any, status: int, method: str = "POST", path: str = PATH, **body: Any) -> dict[str, Any]:
    response = await server.http.request(method, path, json={"input": "Hello", **body} if path == PATH else None)
    assert response.status_code == status, response.text
    server.assert_idle()
    return response.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("instructions", [None, "be brief"])
async def test_a_conversation_by_ids_is_the_one_that_is_sent_whole(keeping, stream, instructions):
    client, said = keeping.openai, []

    async def ask(**fields: Any) -> Any:
        if not stream:
            return await client.responses.create(**ASK, **fields, instructions=instructions)
        async with client.responses.stream(**ASK, **fields, instructions=instructions) as events:
            return await events.get_final_response()

    items: list[Any] = []
    for text in TURNS:
        items.append({"role": "user", "content": text})
        answer = await ask(input=items, store=False)
        assert answer.store is False and answer.previous_response_id is None
        items += answer.output
        said.append(answer.output_text)
    expected = prompts_of(keeping)
    assert len(keeping.front.responses) == 0
    before = None
    for i, text in enumerate(TURNS):
        answer = await ask(input=text, previous_response_id=before)
        assert answer.store is True and answer.previous_response_id == before
        assert answer.output_text == said[i]
        before = answer.id
    assert prompts_of(keeping) == expected
    assert len(keeping.front.responses) == 3


async def test_instructions_hold_for_one_response(keeping):
    first = await keeping.openai.responses.create(**ASK, input="Hello", instructions="red")
    await keeping.openai.responses.create(**ASK, input="Hello", instructions="blue", previous_response_id=first.id)
    await keeping.openai.responses.create(**ASK, input="Hello", previous_response_id=first.id)
    decode = keeping.tokenizer.decode
    texts = [decode(token_ids, skip_special_tokens=False) for token_ids in prompts_of(keeping)]
    assert [("red" in text, "blue" in text) for text in texts] == [(True, False), (False, True), (False, False)]


async def test_one_response_may_be_followed_by_several(keeping):
    first = await keeping.openai.responses.create(**ASK, input="Hello")
    prompts_of(keeping)
    for text in ("red", "green"):
        await keeping.openai.responses.create(**ASK, input=text, previous_response_id=first.id)
    red, green = prompts_of(keeping)
    assert red != green and len(keeping.front.responses) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_found_as_it_was_answered_until_it_is_deleted(keeping, stream):
    client = keeping.openai
    response = await keeping.post(PATH, **ASK, input="Hello", metadata={"a": "b"}, stream=stream)
    record = json.loads(response.text.strip().rpartition("data: ")[2])  # of a stream, the last event
    record = record["response"] if stream else record
    assert (await keeping.http.get(f"{PATH}/{record['id']}")).json() == record
    answer = await client.responses.retrieve(record["id"])
    assert (answer.output_text, answer.status, answer.metadata) == (" one two", "completed", {"a": "b"})
    deleted = await keeping.http.delete(f"{PATH}/{answer.id}")
    assert deleted.json() == {"id": answer.id, "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError, match="no such response is kept"):
        await client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.delete(answer.id)
    assert keeping.front.responses.num_bytes == 0


async def test_what_is_there_when_a_stream_ends_can_be_asked_for_at_once(keeping):
    stream = await keeping.openai.responses.create(**ASK, input="Hello", stream=True)
    ids = [event.response.id async for event in stream if event.type == "response.completed"]
    assert (await keeping.openai.responses.retrieve(ids[0])).id == ids[0]


async def test_what_failed_or_was_left_is_not_kept(keeping):
    prompt = keeping.tokenizer.encode("<|im_start|>assistant\n")
    keeping.engine.fail[prompt[-1]] = "the numbers are wrong"
    await refused(keeping, 500, max_output_tokens=9)
    *_, last = (await keeping.post(PATH, input="Hello", stream=True)).text.strip().split("\n\n")
    assert json.loads(last.partition("data: ")[2])["type"] == "response.failed"
    assert len(keeping.front.responses) == 0


async def test_who_used_to_be_kept_has_made_room(serve):
    server = await serve(enable_responses_store=True, responses_store_size=2)
    first, second, third = [await server.openai.responses.create(**ASK, input="Hello") for _ in range(3)]
    error = await refused(server, 404, previous_response_id=first.id)
    assert error["code"] == "response_not_found" and error["param"] == "previous_response_id"
    assert "--responses-store-size" in error["message"]
    for kept in (second, third):
        assert (await server.openai.responses.retrieve(kept.id)).id == kept.id


async def test_responses_belong_to_the_key_that_made_them(serve):
    server = await serve(enable_responses_store=True, api_key=["a", "b"])
    by_a, by_b = [server.openai.with_options(api_key=key) for key in ("a", "b")]
    answer = await by_a.responses.create(**ASK, input="Hello")
    for attempt in (
        by_b.responses.retrieve(answer.id),
        by_b.responses.delete(answer.id),
        by_b.responses.cancel(answer.id),
        by_b.responses.create(**ASK, input="Hello", previous_response_id=answer.id),
    ):
        with pytest.raises(openai.NotFoundError, match="no such response is kept"):
            await attempt
    assert (await by_a.responses.retrieve(answer.id)).id == answer.id
    followed = await by_a.responses.create(**ASK, input="Hello", previous_response_id=answer.id)
    assert followed.previous_response_id == answer.id
    assert (await server.http.get(f"{PATH}/{answer.id}")).status_code == 401


async def test_an_id_of_the_clients_choice_replaces_no_response(serve):
    server = await serve(enable_responses_store=True, api_key=["a", "b"])
    answers = []
    for key in ("a", "a", "b"):
        client = server.openai.with_options(api_key=key)
        answers.append(await client.responses.create(**ASK, input="Hello", extra_headers={"X-Request-Id": "a/b c"}))
    first, second, third = [answer.id for answer in answers]
    assert first == "resp_a/b c" and len({first, second, third}) == 3
    headers = {"authorization": "Bearer a"}
    found = await server.http.get(f"{PATH}/resp_a%2Fb%20c", headers=headers)
    assert found.json()["id"] == first


async def test_only_background_responses_can_be_cancelled(keeping):
    answer = await keeping.openai.responses.create(**ASK, input="Hello")
    with pytest.raises(openai.BadRequestError, match="only background responses can be cancelled"):
        await keeping.openai.responses.cancel(answer.id)
    with pytest.raises(openai.NotFoundError):
        await keeping.openai.responses.cancel("resp_none")
    error = await refused(keeping, 400, background=True)
    assert error["param"] == "background" and "support" in error["message"]
    response = await keeping.http.get(f"{PATH}/{answer.id}", params={"stream": "true"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "stream"


async def test_without_the_flag_nothing_is_kept_and_the_answer_names_it(server):
    for name, value in (("store", True), ("previous_response_id", "resp_1")):
        error = await refused(server, 400, **{name: value})
        assert error["param"] == name and error["message"].endswith("(--enable-responses-store)")
    for store in ({}, {"store": None}, {"store": False}):
        answer = await server.post(PATH, input="Hello", max_output_tokens=1, **store)
        assert answer.json()["store"] is False
    path = f"{PATH}/{answer.json()['id']}"
    for method, each in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
        error = await refused(server, 404, method, each)
        assert "--enable-responses-store" in error["message"] and error["code"] == "response_not_found"


async def test_a_conversation_that_outgrows_the_context_is_refused_as_if_sent_whole(serve):
    server = await serve(enable_responses_store=True, max_model_len=128)
    before = None
    with contextlib.suppress(openai.BadRequestError):
        for _ in range(20):
            before = (await server.openai.responses.create(**ASK, input="Hello", previous_response_id=before)).id
    error = await refused(server, 400, previous_response_id=before, max_output_tokens=9)
    assert error["code"] == "context_length_exceeded"


def test_options(monkeypatch):
    config = ServerConfig()
    assert (config.enable_responses_store, config.responses_store_size) == (False, 1000)
    for value, asked in (("1", True), ("true", True), ("0", False), ("", False)):
        monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", value)
        assert responses_store_of_environment() is asked
    monkeypatch.delenv("VLLM_ENABLE_RESPONSES_API_STORE")
    assert responses_store_of_environment() is False
