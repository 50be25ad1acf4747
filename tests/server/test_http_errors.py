"""Whatever a client sends, it gets OpenAI's error object, and the server lives. Case ids stand in the tests' names."""

from __future__ import annotations

import gzip
from typing import Any

import httpx
import pytest

from octavo.server.errors import MAX_MESSAGE

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def error_of(response: httpx.Response, status: int, kind: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) <= MAX_MESSAGE + 2
    if kind is not None:
        assert error["type"] == kind
    return error


async def assert_alive(server: Any) -> None:
    assert (await server.http.get("/health")).status_code == 200
    assert (await server.post(PATH, prompt="1 2 3", max_tokens=1, temperature=0)).status_code == 200
    server.assert_idle()


BROKEN = {
    "empty": b"",
    "malformed": b"{bad",
    "array": b"[]",
    "null": b"null",
    "string": b'"x"',
    "number": b"1",
    "not UTF-8": '{"prompt": "中文"}'.encode("gbk"),
    "deep": b"[" * 100_000,
    "lone surrogate": b'{"prompt": "\\ud83d"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "1e999": b'{"prompt": "a", "temperature": 1e999}',
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("path", [PATH, CHAT, "/v1/responses", "/tokenize", "/detokenize", "/abort_requests"])
async def test_api_6_a_broken_body_is_a_400(server, path, body):
    response = await server.http.post(path, content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400, "BadRequestError")["code"] == "invalid_json"
    await assert_alive(server)


async def test_api_6_a_body_too_large_is_a_413(serve):
    server = await serve(max_body_bytes=1000)
    body = b'{"prompt": "' + b"a" * 2000 + b'"}'
    headers = {"content-type": "application/json"}
    error_of(await server.http.post(PATH, content=body, headers=headers), 413, "RequestTooLargeError")

    async def chunks():  # no Content-Length
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    error_of(await server.http.post(PATH, content=chunks(), headers=headers), 413)
    await assert_alive(server)


async def test_api_6_a_wrong_content_type_is_a_400(server):
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        response = await server.http.post(PATH, content=b'{"prompt": "a"}', headers={"content-type": content_type})
        assert "application/json" in error_of(response, 400)["message"]
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await server.http.post(PATH, content=b'{"prompt": "a"}', headers=headers)).status_code == 200


async def test_api_6_a_compressed_body_is_refused_by_its_header(server):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = await server.http.post(PATH, content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
    assert error_of(response, 400)["message"] == "Content-Encoding is 'gzip'; a body must not be compressed"
    headers["content-encoding"] = "identity"
    assert (await server.http.post(PATH, content=b'{"prompt": "a"}', headers=headers)).status_code == 200


async def test_api_6_of_duplicate_keys_the_last_counts(server):
    body = b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2}'
    response = await server.http.post(PATH, content=body, headers={"content-type": "application/json"})
    assert response.json()["usage"]["completion_tokens"] == 2


async def test_api_7_an_unknown_model_is_a_404(server):
    bodies = {
        PATH: {"prompt": "a"},
        CHAT: {"messages": HELLO},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": []},
    }
    for path, body in bodies.items():
        error = error_of(await server.post(path, model="nope", **body), 404, "NotFoundError")
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    error_of(await server.http.get("/v1/models/nope"), 404)


async def test_api_7_aliases_are_served_listed_and_echoed(serve):
    server = await serve(served_model_name=["first", "org/second"])
    listed = (await server.http.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["first", "org/second"]
    assert (await server.http.get("/v1/models/org/second")).json()["max_model_len"] == 256
    for name in ("first", "org/second"):
        assert (await server.post(PATH, prompt="a", model=name)).json()["model"] == name
    assert (await server.post(PATH, prompt="a")).json()["model"] == "first"
    error_of(await server.post(PATH, prompt="a", model="tiny"), 404)


async def test_the_sampling_defaults_are_listed_with_their_origin(serve):
    server = await serve(defaults={"temperature": 0.5})
    (model,) = (await server.http.get("/v1/models")).json()["data"]
    assert model["default_sampling_params"] == {"values": {"temperature": 0.5}, "origin": "a test"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "7"),
        ("max_tokens", True),
        ("n", 0),
        ("n", -1),
        ("n", 1_000_000),
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", "0.5"),
        ("temperature", False),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", "3"),
        ("min_p", 2),
        ("best_of", 3),
        ("best_of", 0),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("frequency_penalty", 3),
        ("presence_penalty", -3),
        ("repetition_penalty", 0),
        ("stop", ["x"] * 100),
        ("stop", 7),
        ("min_tokens", 17),
        ("seed", 1.5),
        ("seed", "7"),
        ("logit_bias", {"49152": 1}),
        ("logit_bias", {"191222": -100}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"5": "x"}),
        ("stop_token_ids", [49152]),
        ("stop_token_ids", [-1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [49152]),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 257),
        ("cache_salt", ""),
        ("cache_salt", 7),
        ("request_id", ""),
        ("request_id", "x" * 129),
        ("stream", "true"),
        ("echo", 1),
        ("priority", 1),
        ("user", 7),
        ("stream_options", {}),
        ("model", 7),
        ("skip_special_tokens", 1),
    ],
    ids=str,
)
async def test_api_8_sample_3_sample_7_wrong_values_are_a_400_that_names_the_field(server, field, value):
    response = await server.post(PATH, prompt="a", **{field: value})
    error = error_of(response, 400, "BadRequestError")
    assert error["param"] == field
    assert field in error["message"]
    await assert_alive(server)


async def test_api_8_best_of_below_n_is_a_400(server):
    assert error_of(await server.post(PATH, prompt="a", n=3, best_of=2), 400)["param"] == "best_of"


@pytest.mark.parametrize("top_k", [-1, 0, 49152, 49153, 2**31 - 1, 1])
async def test_sample_7_any_top_k_from_minus_one_on_is_taken(server, top_k):
    assert (await server.post(PATH, prompt="a", top_k=top_k)).status_code == 200


async def test_null_means_absent(server):
    names = (
        "n",
        "temperature",
        "stop",
        "logit_bias",
        "stream",
        "echo",
        "cache_salt",
        "model",
        "best_of",
        "suffix",
        "user",
    )
    assert (await server.post(PATH, prompt="a", **dict.fromkeys(names))).status_code == 200


async def test_fields_without_meaning_here_are_accepted(server):
    body = {"metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    assert (await server.post(PATH, prompt="a", **body)).status_code == 200
    body |= {"parallel_tool_calls": True, "response_format": {"type": "text"}, "modalities": ["text"]}
    assert (await server.post(CHAT, messages=HELLO, max_tokens=1, **body)).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (PATH, "suffix", "x"),
        (PATH, "structured_outputs", {"choice": ["a"]}),
        (PATH, "response_format", {"type": "json_object"}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {}}),
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "echo", True),
        (CHAT, "tools", [{"type": "function", "function": {"name": "f"}}]),
    ],
)
async def test_fields_that_cannot_be_honoured_yet_are_refused(server, path, field, value):
    body = {"prompt": "a"} if path == PATH else {"messages": HELLO}
    error = error_of(await server.post(path, **body, **{field: value}), 400)
    assert error["param"] == field and "support" in error["message"]


async def test_unknown_fields_are_refused_with_their_nearest_neighbour(serve, server):
    error = error_of(await server.post(PATH, prompt="a", temprature=1), 400)
    assert error["message"] == "unknown field 'temprature'; did you mean 'temperature'?"
    assert error["code"] == "unknown_field" and error["param"] == "temprature"
    error = error_of(await server.post(PATH, prompt="a", stream=True, stream_options={"include_usge": True}), 400)
    assert "did you mean 'stream_options.include_usage'" in error["message"]
    error_of(await server.post(CHAT, messages=HELLO, zzzzzz=None), 400)
    lenient = await serve(allow_unknown_fields=True)
    assert (await lenient.post(PATH, prompt="a", temprature=1)).status_code == 200
    body = {"stream": True, "stream_options": {"include_usge": True}}
    assert (await lenient.post(PATH, prompt="a", **body)).status_code == 200


async def test_messages_are_bounded_whatever_a_client_sends(server):
    for body in (
        {"prompt": "a", "x" * 100_000: 1},
        {"prompt": "a", "model": "m" * 100_000},
        {"prompt": ["a", 1] * 9999},
    ):
        response = await server.post(PATH, **body)
        assert response.status_code in (400, 404) and len(response.content) < 3000


async def test_unknown_routes_and_methods(server):
    error_of(await server.http.get("/v1/nothing"), 404, "NotFoundError")
    for method, path in (("GET", PATH), ("DELETE", "/v1/models"), ("POST", "/health"), ("OPTIONS", PATH)):
        response = await server.http.request(method, path)
        error_of(response, 405, "MethodNotAllowedError")
        assert response.headers["allow"]
    error_of(await server.http.get("/v1/models/"), 404)


async def test_an_unexpected_error_is_a_500_that_tells_nothing(server):
    async def broken(*args: Any, **options: Any):
        raise ZeroDivisionError("a secret")
        yield

    server.llm.generate = broken
    transport = httpx.ASGITransport(app=server.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        response = await http.post(PATH, json={"prompt": "a"})
    error = error_of(response, 500, "InternalServerError")
    assert "secret" not in error["message"]


async def test_probes(server):
    response = await server.http.get("/health")
    assert response.status_code == 200 and response.content == b""
    assert server.engine.num_looks == 1  # who asks has an idle engine looked after
    assert (await server.http.get("/ready")).status_code == 200
    assert set((await server.http.get("/version")).json()) == {"version"}
    metrics = await server.http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"}' in metrics.text


async def test_a_dead_engine_is_a_503_everywhere(server):
    server.engine.die()
    error_of(await server.post(PATH, prompt="a"), 503, "ServiceUnavailableError")
    error_of(await server.post(PATH, prompt="a", stream=True), 503)
    error_of(await server.http.get("/health"), 503)
    error_of(await server.http.get("/ready"), 503)
    assert (await server.http.get("/v1/models")).status_code == 200


async def test_the_key_guards_all_but_the_probes(serve):
    server = await serve(api_key=["k1", "k2"])
    for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "k1"}, {"authorization": "Basic k1"}):
        response = await server.http.get("/v1/models", headers=header)
        error_of(response, 401, "AuthenticationError")
        assert response.headers["www-authenticate"] == "Bearer"
        error_of(await server.http.post("/tokenize", headers=header, json={"prompt": "a"}), 401)
    for header in ("Bearer k1", "bearer k2", "BEARER k1"):
        assert (await server.http.get("/v1/models", headers={"authorization": header})).status_code == 200
    for path in ("/health", "/ready", "/metrics"):
        assert (await server.http.get(path)).status_code == 200
    error_of(await server.http.options("/v1/models"), 405)
    guarded = await serve(api_key=["k1"], metrics_auth=True)
    error_of(await guarded.http.get("/metrics"), 401)


async def test_a_proxy_may_leave_its_prefix_on(serve):
    server = await serve(root_path="/llm", api_key=["k"])
    for path in ("/health", "/llm/health"):
        assert (await server.http.get(path)).status_code == 200
    for path in ("/v1/models", "/llm/v1/models"):
        error_of(await server.http.get(path), 401)
        assert (await server.http.get(path, headers={"authorization": "Bearer k"})).status_code == 200
    error_of(await server.http.get("/llmhealth", headers={"authorization": "Bearer k"}), 404)
    response = await server.http.post("/llm/v1/messages", headers={"x-api-key": "k"}, json={})
    assert response.status_code == 400 and response.json()["type"] == "error"
    document = (await server.http.get("/llm/openapi.json", headers={"authorization": "Bearer k"})).json()
    assert document["servers"] == [{"url": "/llm"}]


async def test_cors_only_for_allowed_origins(serve, server):
    origin = {"origin": "http://page", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in (await server.http.get("/version", headers=origin)).headers
    open_to_page = await serve(allowed_origins=["http://page"], api_key=["k"])
    response = await open_to_page.http.options(PATH, headers=origin)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "http://page"
