"""Every line about a request has its id; and whatever the log level, nothing of a prompt gets into the log."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.engine.logs import JsonLines
from octavo.errors import RequestFailedError
from octavo.server.logs import is_news

SECRET = "xyzzy-plugh"
Log = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def log() -> Iterator[Log]:
    """What the server would write as JSON at the lowest level."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines(may_quote=False))
    logger = logging.getLogger("octavo")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(before)


SAY = [{"role": "user", "content": SECRET}]
REFUSED = [
    ("/v1/completions", {"prompt": SECRET * 100}, 400),
    ("/v1/completions", {"prompt": [SECRET, 1]}, 400),
    ("/v1/completions", {"prompt": [SECRET, "a"], "max_tokens": 0, SECRET: SECRET}, 400),
    ("/v1/completions", {"prompt": "a", "stop": SECRET, "max_tokens": SECRET}, 400),
    ("/v1/completions", {"prompt": "a", "logit_bias": {SECRET: 1}}, 400),
    ("/v1/completions", {"prompt": SECRET, "temperature": -1}, 400),
    ("/v1/completions", {"prompt": SECRET, "stop_token_ids": [10**6]}, 400),
    ("/v1/completions", {"prompt": "a", "model": SECRET}, 404),
    ("/v1/chat/completions", {"messages": [{"role": SECRET}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "refused", "content": SECRET}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"text": SECRET}}]}, 400),
    ("/v1/chat/completions", {"messages": SAY, "tools": SECRET}, 400),
    ("/v1/responses", {"input": SECRET, "model": SECRET}, 404),
    ("/v1/responses", {"input": {"a": SECRET}, "model": "tiny"}, 400),
    ("/v1/messages", {"messages": SAY, "max_tokens": 10**6}, 400),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [{"type": SECRET}]}]}, 400),
    ("/tokenize", {"prompt": SECRET, "add_special_tokens": SECRET}, 400),
    ("/detokenize", {"tokens": [SECRET]}, 400),
    (f"/v1/{SECRET}", {"prompt": SECRET}, 404),
]


async def test_nothing_of_a_prompt_is_logged_and_every_refusal_has_its_id(serve, log):
    server = await serve(max_model_len=64)
    for number, (path, body, status) in enumerate(REFUSED):
        response = await server.http.post(path, json=body, headers={"x-request-id": f"r{number}"})
        assert (response.status_code, response.headers["x-request-id"]) == (status, f"r{number}"), (path, body)
    assert (await server.http.post("/v1/completions", content=f"{{{SECRET}")).status_code == 400
    for path, body in (
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 3}),
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 3, "stream": True}),
        ("/v1/chat/completions", {"messages": SAY, "max_tokens": 3}),
        ("/v1/responses", {"input": SECRET, "model": "tiny", "max_output_tokens": 16}),
        ("/v1/messages", {"messages": SAY, "max_tokens": 4}),
    ):
        assert (await server.post(path, **body)).status_code == 200
    entries = log()
    assert SECRET not in json.dumps(entries)
    assert {entry["request_id"] for entry in entries} >= {f"r{number}" for number in range(len(REFUSED))}
    assert all(entry["request_id"] in entry["message"] for entry in entries if "request_id" in entry)


def break_down(text: str) -> None:
    raise ValueError(f"what to do with {text}?")


async def test_failures_nobody_foresaw_are_told_once_with_id_and_traceback(serve, log, monkeypatch):
    server = await serve()
    monkeypatch.setattr(server.llm.tokenizer, "encode", lambda text, **options: break_down(text))
    headers = {"x-request-id": "r1"}
    with pytest.raises(ValueError, match="what to do"):  # for the HTTP server, which logs it again
        await server.http.post("/v1/completions", json={"prompt": SECRET}, headers=headers)
    (entry,) = [entry for entry in log() if entry["level"] == "error"]
    assert entry["request_id"] == "r1"
    assert entry["exception"].endswith("ValueError: (--enable-log-requests shows its message)")
    assert "in break_down" in entry["exception"] and SECRET not in json.dumps(log())
    again = logging.LogRecord("uvicorn.error", logging.ERROR, "", 1, "Exception in ASGI application\n", None, None)
    assert not is_news(again)


async def test_a_text_that_cannot_be_made_fails_its_request_alone(serve, log, monkeypatch):
    server = await serve()
    monkeypatch.setattr(
        "octavo.engine.detokenizer.IncrementalDetokenizer.append", lambda self, token_ids: break_down(SECRET)
    )
    for stream in (False, True):
        headers = {"x-request-id": f"r{stream}"}
        body = {"prompt": "a", "max_tokens": 2, "stream": stream}
        response = await server.http.post("/v1/completions", json=body, headers=headers)
        assert SECRET not in response.text
        assert "its text could not be made (ValueError)" in response.text
    entries = [entry for entry in log() if entry["level"] == "error"]
    assert [entry["request_id"] for entry in entries] == ["cmpl-rFalse", "rFalse", "cmpl-rTrue", "rTrue"]
    assert SECRET not in json.dumps(log())


async def test_a_request_that_the_engine_fails(serve, log):
    server = await serve()
    token_id = server.tokenizer.encode("a")[-1]
    server.engine.fail[token_id] = "no numbers"
    for body in ({"prompt": [token_id]}, {"prompt": [token_id], "stream": True}):
        await server.http.post("/v1/completions", json=body, headers={"x-request-id": "r1"})
    entries = [entry for entry in log() if entry["level"] == "error"]
    assert [(entry["request_id"], entry["message"]) for entry in entries] == [("r1", "request r1: no numbers")] * 2


async def test_who_is_turned_away_is_told_apart(serve, log):
    server = await serve(api_key=["k"])
    for path in ("/v1/models", "/metrics/", "/live", "/v1/messages"):
        response = await server.http.get(path, headers={"x-request-id": f"of {path}"})
        assert response.status_code == 401 and response.headers["x-request-id"] == f"of {path}"
    long = await server.http.get("/health", headers={"x-request-id": "x" * 129})
    assert long.status_code == 400 and 0 < len(long.headers["x-request-id"]) <= 128
    ids = [entry["request_id"] for entry in log()]
    assert ids == ["of /v1/models", "of /metrics/", "of /live", "of /v1/messages", long.headers["x-request-id"]]


async def test_every_route_echoes_an_id_and_makes_one(serve):
    server = await serve()
    made = set()
    for operation in server.app.state.operations:
        if operation.path == "/live":
            continue  # it has no end; test_who_is_turned_away_is_told_apart
        path = operation.path.replace("{id:path}", "tiny").replace("{id}", "none")
        response = await server.http.request(operation.method, path, headers={"x-request-id": "r1"})
        assert response.headers["x-request-id"] == "r1", path
        response = await server.http.request("PATCH", path)
        assert response.status_code == 405
        made.add(response.headers["x-request-id"])
    assert len(made) >= len({operation.path for operation in server.app.state.operations}) - 1


async def test_requests_are_logged_for_who_asks(serve, log):
    server = await serve(enable_log_requests=True, max_log_len=5)
    body = {"prompt": SECRET, "max_tokens": 3, "temperature": 0.5, "stop": ["\n"], "seed": 1}
    response = await server.http.post("/v1/completions", json=body, headers={"x-request-id": "r1"})
    tokens = response.json()["usage"]
    first, prompt, last = log()
    assert first["message"] == (
        f"request r1: cmpl-r1 at /v1/completions, {tokens['prompt_tokens']} prompt tokens; "
        "max_tokens=3, seed=1, stop=['\\n'], temperature=0.5, output_kind='final_only'"
    )
    assert prompt["message"] == f"request r1: prompt {SECRET[:5]!r}" and prompt["level"] == "debug"
    assert last["message"].startswith("request r1: ended after 0.") and last["message"].endswith(" s, 3 tokens")
    assert {entry["request_id"] for entry in (first, prompt, last)} == {"r1"}


async def test_embeddings_are_logged_too(serve, log):
    server = await serve(enable_log_requests=True, log_level="info")
    for body in ({"input": [[5, 6], [7]], "normalize": False}, {"input": [5]}):
        await server.http.post("/v1/embeddings", json=body, headers={"x-request-id": "r1"})
    messages = [entry["message"] for entry in log() if entry["level"] == "info"]
    assert messages[0] == "request r1: embd-r1 at /v1/embeddings, 3 prompt tokens; normalize=False"
    assert messages[1].startswith("request r1: ended after 0.") and messages[1].endswith(" s, 0 tokens")
    assert messages[2] == "request r1: embd-r1 at /v1/embeddings, 1 prompt tokens; all by default"


async def test_a_client_that_leaves_is_told(serve, log):
    server = await serve(enable_log_requests=True)
    server.engine.hold()
    await server.leave_while_waiting("/v1/completions", prompt="a")
    assert " broke off after 0." in log()[-1]["message"]


def test_an_error_of_ours_keeps_its_message(log):
    try:
        raise RequestFailedError("of ours")
    except RequestFailedError:
        made = logging.LogRecord("octavo.a", logging.ERROR, __file__, 1, "m", None, sys.exc_info())
    assert json.loads(JsonLines(may_quote=False).format(made))["exception"].endswith("RequestFailedError: of ours")
