"""The life of a call: ids, queues, clients that go away, failures in the middle, the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.engine.messages import SchedulerStats
from octavo.errors import QueueFullError

PATH = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


class Client:
    """A raw ASGI client that may hang up in the middle of an answer."""

    def __init__(self, app: Any, path: str, **body: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self.news = asyncio.Event()
        self._gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("server", 80),
            "client": ("client", 1),
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.news.set()

    def hang_up(self) -> None:
        self._gone.set()

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_the_queue_takes_its_requests_along(server, stream):
    server.engine.hold()
    client = Client(server.app, PATH, prompt=["a", "b"], n=2, stream=stream)
    await until(lambda: len(server.engine.live) == 4)
    client.hang_up()
    await asyncio.wait_for(client.task, 5)
    server.assert_idle()


async def test_a_client_that_leaves_takes_its_embeddings_along(server):
    server.engine.hold()
    client = Client(server.app, "/v1/embeddings", input=["a", "b", "c"])
    await until(lambda: len(server.engine.live) == 3)
    client.hang_up()
    await asyncio.wait_for(client.task, 5)
    server.assert_idle()


BODIES = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 200},
    "/v1/responses": {"input": HELLO},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_leaves_a_stream_ends_its_request(server, path):
    client = Client(server.app, path, **BODIES[path], stream=True)
    await until(lambda: len(client.messages) > 4)
    client.hang_up()
    await asyncio.wait_for(client.task, 5)
    server.assert_idle()


async def test_a_request_that_fails_before_its_first_token_has_a_status(server):
    (bad,) = server.tokenizer.encode("!")
    server.engine.fail[bad] = "NaN in the logits"
    server.engine.script = lambda request: server.tokenizer.encode("😀")  # two tokens without text
    response = await server.post(PATH, prompt="!", stream=True)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "NaN in the logits"
    server.assert_idle()


async def test_a_failure_in_a_stream_is_one_last_event(server):
    (bad,) = server.tokenizer.encode("!")
    server.engine.fail[bad] = "NaN in the logits"
    events = await server.events(PATH, prompt="!")
    assert [json.loads(data)["choices"][0]["text"] for data in events[:-1]] == [" one", " two"]
    error = json.loads(events[-1])["error"]
    assert error == {
        "message": "NaN in the logits",
        "type": "InternalServerError",
        "param": None,
        "code": "request_failed",
    }
    server.assert_idle()


async def test_the_failure_of_one_prompt_ends_its_call_alone(server):
    (bad,) = server.tokenizer.encode("!")
    server.engine.fail[bad] = "NaN in the logits"
    failing, passing = await asyncio.gather(
        server.post(PATH, prompt=["a", "!", "b"]), server.post(PATH, prompt=["a", "b"])
    )
    assert (failing.status_code, passing.status_code) == (500, 200)
    server.assert_idle()


async def test_one_bad_prompt_of_a_batch_is_a_400_before_any_event(serve):
    server = await serve(max_model_len=64)
    response = await server.post(PATH, prompt=[[72], [72] * 64, [73]], stream=True)
    assert response.status_code == 400
    await until(lambda: not server.engine.live)
    server.assert_idle()


async def test_the_engines_death_ends_streams_with_an_error(server):
    client = Client(server.app, "/v1/chat/completions", messages=HELLO, stream=True, max_tokens=200)
    await until(lambda: len(client.messages) > 4)
    server.engine.die()
    await asyncio.wait_for(client.task, 5)
    last = client.body.rstrip().rpartition("data: ")[2]
    assert json.loads(last)["error"]["type"] == "ServiceUnavailableError"
    assert client.messages[-1]["more_body"] is False


async def test_stop_ends_what_is_left_with_an_error(server):
    streamed = Client(server.app, PATH, prompt="a", stream=True, max_tokens=200)
    await until(lambda: len(streamed.messages) > 2)
    server.engine.hold()
    queued = Client(server.app, PATH, prompt="a")
    await until(lambda: len(server.engine.live) == 2)
    server.front.stop()
    await asyncio.wait_for(asyncio.gather(streamed.task, queued.task), 5)
    assert json.loads(streamed.body.rstrip().rpartition("data: ")[2])["error"]["code"] == "shutting_down"
    assert queued.messages[0]["status"] == 503
    for stream in (False, True):
        late = Client(server.app, PATH, prompt="a", stream=stream)
        await asyncio.wait_for(late.task, 5)
        assert (late.messages[0]["status"], json.loads(late.body)["error"]["code"]) == (503, "shutting_down")
    server.assert_idle()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_stop_ends_a_stream_in_the_words_of_its_api(server, path):
    client = Client(server.app, path, **BODIES[path], stream=True)
    await until(lambda: len(client.messages) > 4)
    server.front.stop()
    await asyncio.wait_for(client.task, 5)
    name, data = client.body.rstrip().rpartition("event: ")[2].split("\ndata: ")
    last = json.loads(data)
    assert last["type"] == name
    error = last["error"] if path == "/v1/messages" else last["response"]["error"]
    assert error["message"] == "the server is shutting down"
    server.assert_idle()


async def test_a_full_queue_is_a_503_with_retry_after(serve):
    server = await serve(max_num_queued_reqs=2)
    server.engine.hold()
    waiting = [asyncio.create_task(server.post(PATH, prompt="a")) for _ in range(2)]
    await until(lambda: server.llm.stats.num_waiting == 2)
    response = await server.post(PATH, prompt="a")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "queue_full"
    server.engine.release()
    assert [response.status_code for response in await asyncio.gather(*waiting)] == [200, 200]
    assert (await server.post(PATH, prompt="a")).status_code == 200


async def test_too_many_waiting_tokens_are_a_503_with_retry_after(serve):
    server = await serve(max_num_queued_tokens=10)
    server.engine.hold()
    waiting = [asyncio.create_task(server.post(PATH, prompt=[5] * 30))]  # more than may wait, but alone
    await until(lambda: server.llm.num_unanswered_tokens == 30)
    response = await server.post(PATH, prompt=[5])
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    error = response.json()["error"]
    assert error["code"] == "queue_full"
    assert error["message"] == (
        "30 prompt tokens are already waiting, and this call has 1; at most 10 may wait (--max-num-queued-tokens)"
    )
    server.engine.release()
    assert (await waiting[0]).status_code == 200
    server.engine.hold()
    waiting = [asyncio.create_task(server.post(PATH, prompt=[[5] * 3, [6] * 2])) for _ in range(2)]
    await until(lambda: server.llm.num_unanswered_tokens == 10)
    for path, body in (
        (PATH, {"prompt": [5]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ):
        assert (await server.post(path, **body)).status_code == 503
    server.engine.release()
    assert [response.status_code for response in await asyncio.gather(*waiting)] == [200, 200]
    assert server.llm.num_unanswered_tokens == 0


@pytest.mark.parametrize(
    ("running", "waiting", "unfinished", "full"),
    [
        (0, 0, 5, False),  # 5 on their way to 4 free seats: 1 will wait
        (0, 0, 6, True),  # … 2 will
        (4, 1, 5, False),
        (4, 2, 6, True),
        (4, 0, 6, True),  # seats taken, 2 unseen
        (2, 0, 4, False),
        (4, 2, 5, True),  # one has ended here, and the engine does not know yet
    ],
)
async def test_waiting_counts_what_the_engine_has_not_seen(serve, running, waiting, unfinished, full):
    server = await serve(max_num_queued_reqs=2, engine_options={"max_num_seqs": 4})
    server.front.llm = SimpleNamespace(
        alive=True,
        config=server.llm.config,
        metrics=server.llm.metrics,
        stats=SchedulerStats(num_running=running, num_waiting=waiting),
        num_unfinished=unfinished,
    )
    with pytest.raises(QueueFullError) if full else contextlib.nullcontext():
        server.front.admit()


async def test_request_ids_are_echoed_or_given(server):
    response = await server.http.post(PATH, json={"prompt": "a"}, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine" and response.json()["id"] == "cmpl-mine"
    response = await server.http.get("/health")
    assert response.headers["x-request-id"]
    response = await server.http.get("/health", headers={"x-request-id": "x" * 129})
    assert response.status_code == 400 and response.json()["error"]["param"] == "X-Request-Id"
    assert (await server.http.get("/health", headers={"x-request-id": "x" * 128})).status_code == 200


async def test_a_duplicate_request_id_runs_under_a_new_one(server):
    both = await asyncio.gather(*(server.post(PATH, prompt="a", request_id="twin") for _ in range(2)))
    ids = [response.json()["id"] for response in both]
    assert all(response.status_code == 200 for response in both)
    assert len(set(ids)) == 2 and "cmpl-twin" in ids
    assert (await server.post(PATH, prompt="a", request_id="twin")).json()["id"] == "cmpl-twin"


async def test_a_long_prompt_is_tokenized_beside_the_event_loop(serve):
    server = await serve(max_model_len=100_000)
    prompt = "red " * 5_000
    response = await server.post(PATH, prompt=prompt, max_tokens=1)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["usage"]["prompt_tokens"] == len(server.tokenizer.encode(prompt))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": [5] * 4}),
        (PATH, {"prompt": [[5] * 2, [6] * 2]}),
        ("/v1/embeddings", {"input": [[5] * 2, [6] * 2]}),
    ],
)
async def test_a_burst_does_not_pass_the_bounds(serve, path, body):
    """Calls that come in the same turn of the event loop know of each other: 4 tokens each, and 10 may wait."""
    server = await serve(max_num_queued_tokens=10)
    server.engine.hold()
    calls = [asyncio.create_task(server.post(path, **body)) for _ in range(8)]
    await until(lambda: sum(call.done() for call in calls) == 6)
    assert [call.result().status_code for call in calls if call.done()] == [503] * 6
    assert server.llm.num_unanswered_tokens == 8 and server.front.coming.num_tokens == 0
    server.engine.release()
    await asyncio.gather(*calls)
    assert server.front.coming.num_requests == 0


async def test_a_burst_of_requests_does_not_pass_the_bound(serve):
    server = await serve(max_num_queued_reqs=3, engine_options={"max_num_seqs": 2})
    server.engine.hold()
    calls = [asyncio.create_task(server.post(PATH, prompt="a", n=n)) for n in (1, 2, 1, 1, 1)]
    await until(lambda: server.llm.num_unfinished > 0)
    await until(lambda: any(call.done() for call in calls))
    # Two get seats, and two calls fill the places of those that wait.
    assert server.llm.num_unfinished == 5
    server.engine.release()
    assert sorted(call.result().status_code for call in (await asyncio.wait(calls))[0]) == [200, 200, 200, 200, 503]
