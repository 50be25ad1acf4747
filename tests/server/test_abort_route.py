"""POST /abort_requests: calls are ended from outside."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

PATH = "/v1/completions"
ABORT = "/abort_requests"
HELLO = [{"role": "user", "content": "Hello"}]
AS = [{"authorization": f"Bearer {key}"} for key in ("k1", "k2")]


async def start(server: Any, path: str = PATH, num_live: int = 1, headers: Any = None, **body: Any) -> asyncio.Task:
    """A call whose requests wait in the engine."""
    server.engine.hold()
    num_before = len(server.engine.live)
    task = asyncio.create_task(server.http.post(path, json=body, headers=headers))
    async with asyncio.timeout(5):
        while len(server.engine.live) < num_before + num_live:
            await asyncio.sleep(0.001)
    return task


async def abort(server: Any, *request_ids: str, headers: Any = None) -> list[str]:
    response = await server.http.post(ABORT, json={"request_ids": request_ids}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["aborted"]


@pytest.mark.parametrize("request_id", ["cmpl-mine", "mine"])
async def test_a_call_is_ended_by_its_own_id_or_by_the_one_it_asked_for(server, request_id):
    task = await start(server, prompt="a", request_id="mine")
    assert await abort(server, "other", request_id, "cmpl-") == ["cmpl-mine"]
    answer = (await task).json()
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["text"]) == ("abort", "")
    server.assert_idle()
    assert await abort(server, request_id) == []


async def test_all_prompts_and_samples_of_a_call_end(server):
    task = await start(server, num_live=4, prompt=["a", "b"], n=2, request_id="mine")
    assert await abort(server, "mine") == ["cmpl-mine"]
    assert [choice["finish_reason"] for choice in (await task).json()["choices"]] == ["abort"] * 4
    server.assert_idle()


async def test_a_stream_ends_with_the_reason(server):
    task = await start(server, prompt="a", request_id="mine", stream=True)
    await abort(server, "mine")
    *_, last, done = [block.removeprefix("data: ") for block in (await task).text.split("\n\n") if block]
    assert json.loads(last)["choices"][0]["finish_reason"] == "abort" and done == "[DONE]"


async def test_others_go_on(server):
    first = await start(server, prompt="a", request_id="first")
    second = await start(server, prompt="a", request_id="second")
    await abort(server, "first")
    server.engine.release()
    reasons = [(await task).json()["choices"][0]["finish_reason"] for task in (first, second)]
    assert reasons == ["abort", "length"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", {"messages": HELLO, "max_tokens": 3}), ("/v1/responses", {"input": "Hello"})],
    ids=str,
)
async def test_where_the_api_has_no_such_reason_it_is_an_error(server, path, body):
    task = await start(server, path, **body, request_id="mine")
    assert len(await abort(server, "mine")) == 1
    response = await task
    assert response.status_code == 499 and response.json()["error"]["message"] == "the request was aborted"
    task = await start(server, path, **body, request_id="mine", stream=True)
    await abort(server, "mine")
    assert "the request was aborted" in (await task).text
    server.assert_idle()


async def test_no_key_ends_the_calls_of_another(serve):
    server = await serve(api_key=["k1", "k2"])
    task = await start(server, headers=AS[0], prompt="a", request_id="mine")
    assert (await server.post(ABORT, request_ids=["mine"])).status_code == 401
    assert await abort(server, "mine", headers=AS[1]) == []
    assert await abort(server, "mine", headers=AS[0]) == ["cmpl-mine"]
    assert (await task).status_code == 200


@pytest.mark.parametrize("body", [{}, {"request_ids": None}, {"request_ids": "a"}, {"request_ids": [7]}], ids=str)
async def test_wrong_ids_are_refused(server, body):
    response = await server.post(ABORT, **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "request_ids"
