"""GET /openapi.json and /docs: every route and every field is in them."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from typing import Any

import jsonschema
import pytest

from octavo import __version__
from octavo.server import protocol, protocol_anthropic, protocol_embeddings, protocol_responses
from octavo.server.app import ROUTES
from octavo.server.openapi import describe
from support.tools import ANTHROPIC_TOOLS, CHAT_TOOLS, FLAGS, RESPONSE_TOOLS, TEXT_AND_CALLS, say

DESCRIPTION = describe(ROUTES)
SCHEMAS = DESCRIPTION["components"]["schemas"]


def test_every_route_is_described():
    described = {(method, path) for path, methods in DESCRIPTION["paths"].items() for method in methods}
    assert described == {(each.method.lower(), each.path.replace(":path", "")) for each in ROUTES}
    operations = [operation for methods in DESCRIPTION["paths"].values() for operation in methods.values()]
    assert all(operation["summary"].endswith(".") for operation in operations)


def test_every_body_is_described_with_all_its_fields():
    bodies = {each.body for each in ROUTES if each.method == "POST" and each.body is not None}
    files = (protocol, protocol_anthropic, protocol_embeddings, protocol_responses)
    named = {name: value for file in files for name, value in vars(file).items()}
    records = {value for name, value in named.items() if name.endswith("Request")}
    assert bodies == records
    for record in records:
        schema = SCHEMAS[record.__name__]
        wired = {field.name for field in dataclasses.fields(record) if "check" in field.metadata}
        assert set(schema["properties"]) == wired | record.SAMPLING | record.NO_OPS | set(record.LATER)
        assert schema["additionalProperties"] is False


def test_fields_have_their_types():
    schema = SCHEMAS["ChatRequest"]
    properties = schema["properties"]
    assert schema["required"] == ["messages"]
    assert properties["stream"] == {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": False}
    assert properties["temperature"] == {"anyOf": [{"type": "number", "minimum": 0, "maximum": 100}, {"type": "null"}]}
    assert properties["max_tokens"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
    assert properties["messages"] == {
        "type": "array",
        "items": {"type": "object"},
        "minItems": 1,
        "description": "a list of at least one message",
    }
    assert properties["stream_options"]["anyOf"][0] == {"$ref": "#/components/schemas/StreamOptions"}
    assert properties["response_format"]["enum"] == [None, {"type": "text"}]
    text_or_ids = SCHEMAS["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert {"type": "string"} in text_or_ids and {"type": "array", "items": {"type": "integer"}} in text_or_ids


def test_every_reference_leads_somewhere():
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DESCRIPTION)))
    assert names == set(SCHEMAS)


async def test_the_description_is_served_and_guarded(serve, server):
    description = (await server.http.get("/openapi.json")).json()
    assert description == json.loads(json.dumps(DESCRIPTION)) and description["info"]["version"] == __version__
    guarded = await serve(api_key=["k"])
    assert (await guarded.http.get("/openapi.json")).status_code == 401
    headers = {"authorization": "Bearer k"}
    described = (await guarded.http.get("/openapi.json", headers=headers)).json()
    assert described["components"]["schemas"] == description["components"]["schemas"]


@pytest.mark.parametrize("metrics_auth", [False, True])
async def test_the_keys_that_it_names_are_those_that_routes_want(serve, metrics_auth):
    server = await serve(api_key=["k"], metrics_auth=metrics_auth)
    description = (await server.http.get("/openapi.json", headers={"authorization": "Bearer k"})).json()
    schemes = description["components"]["securitySchemes"]
    assert schemes == {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    headers = {"bearer": {"authorization": "Bearer k"}, "x-api-key": {"x-api-key": "k"}}
    for each in ROUTES:
        if each.path == "/live":  # its stream has no end
            continue
        path = each.path.replace(":path", "")
        allowed = description["paths"][path][each.method.lower()]["security"]
        for names in ([], ["bearer"], ["x-api-key"]):
            given = headers[names[0]] if names else {}
            response = await server.http.request(each.method, path, headers=given)
            let_in = not allowed or any(list(way) == names for way in allowed)
            assert (response.status_code != 401) == let_in, (path, names)


ANSWERS: dict[str, Any] = {"type": "object", "components": {"schemas": {**SCHEMAS}}}
for _name, _schema in SCHEMAS.items():  # for a test, answers have no keys but those described
    if not _name.endswith(("Request", "Event")):
        ANSWERS["components"]["schemas"][_name] = {**_schema, "additionalProperties": False}


def check(
    record: Any, path: str, method: str = "post", status: str = "200", media_type: str = "application/json"
) -> None:
    """Its schema describes the record."""
    schema = DESCRIPTION["paths"][path][method]["responses"][status]["content"][media_type]["schema"]
    jsonschema.validate(record, {**ANSWERS, **schema})


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
EXTRAS: dict[str, Any] = {"timings": True, "return_progress": True}
MORE: dict[str, Any] = {**EXTRAS, "return_token_ids": True, "prompt_logprobs": 1, "n": 2}
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 2, **MORE}),
        ("/v1/completions", {"prompt": "a", "stream": True, "stream_options": USAGE, "logprobs": 0, **EXTRAS}),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True, **EXTRAS}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, **MORE}),
        ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": USAGE, "logprobs": True, **EXTRAS}),
        ("/v1/responses", {"input": "Hello", "tools": [], "metadata": {"a": "b"}, **EXTRAS}),
        ("/v1/responses", {"input": "Hello", "stream": True, **EXTRAS}),
        ("/v1/messages", {**CHAT, "max_tokens": 3, **EXTRAS}),
        ("/v1/messages", {**CHAT, "max_tokens": 3, "stream": True, **EXTRAS}),
        ("/v1/messages/count_tokens", CHAT),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5]}),
        ("/abort_requests", {"request_ids": ["a"]}),
    ],
    ids=str,
)
async def test_answers_are_as_described(serve_engine, path, body):
    async with serve_engine(max_num_batched_tokens=2) as (server, _):
        response = await server.post(path, **body)
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            check(response.json(), path)
        else:
            lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
            assert len(lines) > 3
            for line in lines:
                if line != "data: [DONE]":
                    check(json.loads(line.removeprefix("data: ")), path, media_type="text/event-stream")
        refused = await server.post(path, **body, unheard_of=1)
        assert refused.status_code == 400
        check(refused.json(), path, status="default")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "tools": CHAT_TOOLS}),
        ("/v1/responses", {"input": "Hello", "tools": [{"type": "namespace", "name": "n", "tools": RESPONSE_TOOLS}]}),
        ("/v1/messages", {**CHAT, "max_tokens": 999, "tools": ANTHROPIC_TOOLS}),
    ],
    ids=str,
)
async def test_tool_calls_are_as_described(serve, path, body, stream):
    server = await serve(**FLAGS, max_model_len=4096)
    say(server, TEXT_AND_CALLS.replace("get_", "n__get_") if "responses" in path else TEXT_AND_CALLS)
    response = await server.post(path, **body, stream=stream)
    assert response.status_code == 200 and "get_time" in response.text
    if not stream:
        check(response.json(), path)
    for line in response.text.split("\n") if stream else ():
        if line.startswith("data: ") and line != "data: [DONE]":
            check(json.loads(line.removeprefix("data: ")), path, media_type="text/event-stream")


async def test_answers_without_a_body_are_as_described(serve):
    server = await serve(enable_responses_store=True)
    response = await server.openai.responses.create(model="tiny", input="Hello")
    for method, path, given in (
        ("get", "/v1/models", "/v1/models"),
        ("get", "/v1/models/{id}", "/v1/models/tiny"),
        ("get", "/version", "/version"),
        ("get", "/v1/responses/{id}", f"/v1/responses/{response.id}"),
        ("delete", "/v1/responses/{id}", f"/v1/responses/{response.id}"),
    ):
        answer = await server.http.request(method, given)
        assert answer.status_code == 200, answer.text
        check(answer.json(), path, method)
    answer = await server.http.post("/v1/responses/a/cancel")
    check(answer.json(), "/v1/responses/{id}/cancel", status="default")


@pytest.mark.parametrize("name", sorted(SCHEMAS["CompletionRequest"]["properties"]))
async def test_a_default_and_null_may_be_sent(server, name):
    """What the description allows for every field is allowed."""
    schema = SCHEMAS["CompletionRequest"]["properties"][name]
    values: list[Any] = [None] if name not in SCHEMAS["CompletionRequest"]["required"] else []
    values += [schema["default"]] if "default" in schema else []
    for value in values:
        response = await server.post("/v1/completions", **{"prompt": "a", "max_tokens": 1, name: value})
        assert response.status_code == 200, response.text


class _Page(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


async def test_the_page_shows_all_routes_and_asks_nobody_else(server):
    response = await server.http.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    page = _Page(response.text)
    assert page.open == [] and page.links == ["openapi.json"] and "<script" not in response.text
    for each in ROUTES:
        assert f"{each.method} {each.path.replace(':path', '')}</code>" in response.text
    assert "<code>stream_options.include_usage</code>" in response.text
