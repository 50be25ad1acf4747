"""`return_progress`: how far the prompt is, in the streams of all routes that generate."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from octavo.engine.messages import TokenDelta
from server.test_messages_route import client_of
from support.front import LocalClient

TEXT = "abcdeabcde"  # a token each
CASES = {
    "/v1/completions": {"prompt": TEXT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}]},
}
ALL = pytest.mark.parametrize("path", CASES)
STEP = {"max_num_batched_tokens": 4}  # tokens


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    length = {} if path == "/v1/responses" else {"max_tokens": 2}
    return {**CASES[path], **length, "ignore_eos": True, "temperature": 0, **fields}  # chance may say nothing


@pytest.fixture(autouse=True)
def slower_than_its_readers(monkeypatch):
    """So that each step's news come alone."""
    receive = LocalClient.receive

    async def slow(client: LocalClient) -> list[TokenDelta]:
        for _ in range(8):
            await asyncio.sleep(0)
        return await receive(client)

    monkeypatch.setattr(LocalClient, "receive", slow)


async def records(server: Any, path: str, **fields: Any) -> list[dict[str, Any]]:
    response = await server.post(path, stream=True, **body_of(path, **fields))
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def says_something(path: str, record: dict[str, Any]) -> bool:
    if "delta" in record.get("type", ""):
        return "text" in str(record)
    choices = record.get("choices", [])
    return any(choice.get("text") or choice.get("delta", {}).get("content") for choice in choices)


@ALL
async def test_it_comes_before_the_first_token(serve_engine, path):
    async with serve_engine(**STEP) as (server, _):
        found = await records(server, path, return_progress=True)
    progress = [record["prompt_progress"] for record in found if "prompt_progress" in record]
    assert [(each["total"], each["cache"], each["processed"]) for each in progress] == [
        (10, 0, 4),
        (10, 0, 8),
        (10, 0, 10),
    ]
    times = [each["time_ms"] for each in progress]
    assert times == sorted(times) and times[0] >= 0
    last = max(i for i, record in enumerate(found) if "prompt_progress" in record)
    assert any(says_something(path, record) for record in found)
    assert not any(says_something(path, record) for record in found[:last])


@ALL
async def test_what_is_cached_counts_as_processed(serve_engine, path):
    async with serve_engine(**STEP) as (server, _):
        await records(server, path)
        (progress,) = [
            r["prompt_progress"] for r in await records(server, path, return_progress=True) if "prompt_progress" in r
        ]
    assert (progress["total"], progress["cache"], progress["processed"]) == (10, 9, 10)


@ALL
async def test_nobody_gets_it_unasked_and_nothing_else_changes(serve_engine, path):
    async with serve_engine(**STEP) as (server, _):
        plain = await records(server, path, seed=1)
        asked = await records(server, path, seed=1, return_progress=True)
        assert not any("prompt_progress" in record for record in plain)
        said = [[r for r in each if says_something(path, r)] for each in (plain, asked)]
        for record in (*said[0], *said[1]):
            for name in ("id", "created", "item_id", "sequence_number"):
                record.pop(name, None)
        assert said[0] == said[1]
        whole = await server.post(path, **body_of(path, return_progress=True))  # only a stream has progress
        assert whole.status_code == 200 and "prompt_progress" not in whole.text
        refused = await server.post(path, **body_of(path, return_progress=1))
        assert refused.status_code == 400 and "return_progress" in refused.text


async def test_several_prompts_are_told_apart(serve_engine):
    async with serve_engine() as (server, _):
        found = await records(server, "/v1/completions", prompt=["ab", "abcde"], return_progress=True)
    progress = [record["prompt_progress"] for record in found if "prompt_progress" in record]
    assert {each["prompt_index"]: each["processed"] for each in progress} == {0: 2, 1: 5}


async def test_a_beam_search_has_no_news_before_its_end(serve_engine):
    async with serve_engine() as (server, _):
        response = await server.post(
            "/v1/completions", **body_of("/v1/completions", return_progress=True, use_beam_search=True, n=2)
        )
        assert response.status_code == 400 and response.json()["error"]["param"] == "return_progress"


async def test_the_client_of_anthropic_bears_it(serve_engine):
    async with serve_engine(**STEP) as (server, _):
        messages: Any = CASES["/v1/messages"]["messages"]
        client = client_of(server)
        extra = {"return_progress": True, "ignore_eos": True}
        async with client.messages.stream(model="tiny", messages=messages, max_tokens=2, extra_body=extra) as stream:
            text = "".join([delta async for delta in stream.text_stream])
        assert text and (await stream.get_final_message()).content[0].text == text


async def test_the_clients_of_openai_bear_it(serve_engine):
    async with serve_engine(**STEP) as (server, _):
        extra: dict[str, Any] = {"return_progress": True, "ignore_eos": True}
        ask: dict[str, Any] = {"model": "tiny", "extra_body": extra}
        async with server.openai.responses.stream(input=TEXT, max_output_tokens=2, **ask) as stream:
            events = [event async for event in stream]
        progress = [event.model_extra["prompt_progress"] for event in events if event.model_extra]
        assert [each["processed"] for each in progress] == [4, 8, 10]
        messages: Any = CASES["/v1/chat/completions"]["messages"]
        async with server.openai.chat.completions.stream(messages=messages, max_tokens=2, **ask) as chat:
            assert [event async for event in chat]
