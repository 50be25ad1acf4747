"""POST /v1/embeddings on a scripted engine: forms of input, both encodings, what is refused, ends from outside."""

from __future__ import annotations

import asyncio
import base64
import struct
from array import array
from typing import Any

import openai
import pytest

PATH = "/v1/embeddings"


async def vectors(server: Any, **body: Any) -> list[list[float]]:
    response = await server.post(PATH, **body)
    assert response.status_code == 200, response.text
    server.assert_idle()
    return [entry["embedding"] for entry in response.json()["data"]]


def is_refused(response: Any, *parts: str, param: str, status: int = 400) -> bool:
    error = response.json()["error"]
    assert response.status_code == status and error["param"] == param, response.text
    assert all(part in error["message"] for part in parts), error["message"]
    return True


async def test_the_shape_of_an_answer(server):
    ids = [server.tokenizer.encode(text) for text in ("Hello", "how are you")]
    response = await server.post(PATH, model="tiny", input=["Hello", "how are you"], user="me")
    assert response.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": [len(ids[i]) / 8, ids[i][-1], 0.0, 1.0]} for i in (0, 1)
        ],
        "model": "tiny",
        "usage": {"prompt_tokens": len(ids[0] + ids[1]), "total_tokens": len(ids[0] + ids[1])},
    }
    assert [request.user for request in server.engine.requests] == ["me", "me"]


async def test_every_form_of_input(server):
    (token_id,) = server.tokenizer.encode("a")
    assert await vectors(server, input="a") == [[0.125, token_id, 0.0, 1.0]]
    assert await vectors(server, input=["a", "aa"]) == [[0.125, token_id, 0.0, 1.0], [0.25, token_id, 0.0, 1.0]]
    assert await vectors(server, input=[5, 6, 7]) == [[0.375, 7.0, 0.0, 1.0]]
    assert await vectors(server, input=[[5, 6, 7], [8]]) == [[0.375, 7.0, 0.0, 1.0], [0.125, 8.0, 0.0, 1.0]]
    messages = [{"role": "user", "content": "a"}]
    prompt = server.engine.requests[-1]
    assert await vectors(server, messages=messages) == [
        [len(server.tokenizer.encode("<|im_start|>user\na<|im_end|>\n")) / 8, server.tokenizer.encode("\n")[0], 0, 1]
    ]
    assert prompt.params.max_tokens == 0


async def test_how_it_is_pooled_is_the_requests_choice(server):
    assert await vectors(server, input=[5], pooling_type="mean", normalize=False) == [[0.125, 5.0, 1.0, 0.0]]
    assert await vectors(server, input=[5], pooling_type="LAST", use_activation=False) == [[0.125, 5.0, 0.0, 0.0]]
    assert await vectors(server, input=[5, 6, 7], truncate_prompt_tokens=2, dimensions=4) == [[0.25, 7.0, 0.0, 1.0]]
    long = [5] * 300
    assert await vectors(server, input=long, truncate_prompt_tokens=-1) == [[32.0, 5.0, 0.0, 1.0]]


async def test_base64_is_little_endian_float32(server):
    body = {"input": [[5, 6, 7], [8]], "normalize": False}
    floats = await vectors(server, **body, encoding_format="float")
    encoded = await vectors(server, **body, encoding_format="base64")
    assert [list(struct.unpack("<4f", base64.b64decode(each))) for each in encoded] == floats


async def test_api_5_openais_client_by_default_and_by_floats(server):
    by_default = await server.openai.embeddings.create(model="tiny", input=["Hello", "a"])
    by_floats = await server.openai.embeddings.create(model="tiny", input=["Hello", "a"], encoding_format="float")
    assert by_default == by_floats
    assert by_default.data[1].index == 1 and len(by_default.data[1].embedding) == 4
    assert by_default.usage.total_tokens == by_default.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="encoding_format is 'hex'; it must be one of 'float', 'base64'"):
        await server.openai.embeddings.create(model="tiny", input="a", encoding_format="hex")


@pytest.mark.parametrize(
    ("body", "param", "parts"),
    [
        ({}, "input", ["give one of input and messages"]),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input", ["give one of"]),
        ({"input": []}, "input", ["input is []; it must be a string"]),
        ({"input": ""}, "input", ["input is empty"]),
        ({"input": ["a", ""]}, "input[1]", ["input[1] is empty"]),
        ({"input": 3}, "input", ["input is 3; it must be"]),
        ({"input": ["a", [1]]}, "input", ["it must be a string, a list of token ids"]),
        ({"input": ["a"] * 2049}, "input", ["at most 2048 prompts"]),
        ({"input": [420]}, "input", ["input has the token id 420; ids must be in [0, "]),
        ({"input": [[1], [5] * 257]}, "input[1]", ["input[1] has 257 tokens; the context is 256 tokens long"]),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", ["'float', 'base64'"]),
        ({"input": "a", "dimensions": 2}, "dimensions", ["dimensions is 2; it must be absent, or 4"]),
        ({"input": "a", "dimensions": "4"}, "dimensions", ["dimensions is '4'; it must be an integer"]),
        ({"input": "a", "pooling_type": "cls"}, "pooling_type", ["one of last, mean"]),
        ({"input": "a", "normalize": "no"}, "normalize", ["true or false"]),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ["-1, or at least 1"]),
        ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", ["at most the context of 256"]),
        ({"input": "a", "endianness": "big"}, "endianness", ["does not support endianness yet"]),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", ["does not support embed_dtype yet"]),
        ({"input": "a", "priority": 1}, "priority", ["priority is 1"]),
        ({"input": "a", "cache_salt": ""}, "cache_salt", ["not an empty one"]),
        ({"input": "a", "stream": True}, "stream", ["unknown field 'stream'"]),
        ({"input": "a", "encoding": "float"}, "encoding", ["did you mean 'encoding_format'?"]),
    ],
)
async def test_what_is_refused(server, body, param, parts):
    response = await server.post(PATH, **body)
    assert is_refused(response, *parts, param=param)
    server.assert_idle()


async def test_api_7_a_model_that_nobody_serves_is_a_404(server):
    response = await server.post(PATH, model="nope", input="a")
    assert is_refused(response, "'nope'", param="model", status=404)
    assert response.json()["error"]["code"] == "model_not_found"


async def test_values_that_ask_nothing_are_taken(server):
    idle = {"embed_dtype": "float32", "endianness": "native", "truncation_side": "left", "dimensions": None}
    assert len(await vectors(server, input="a", **idle)) == 1


async def test_two_thousand_inputs_stay_in_order(server):
    found = await vectors(server, input=[[5 + i % 300] for i in range(2048)])
    assert [vector[1] for vector in found] == [5 + i % 300 for i in range(2048)]


async def start(server: Any, **body: Any) -> asyncio.Task[Any]:
    server.engine.hold()
    task = asyncio.create_task(server.post(PATH, **body))
    async with asyncio.timeout(5):
        while len(server.engine.live) < len(body["input"]):
            await asyncio.sleep(0.001)
    return task


async def test_an_abort_from_outside_ends_all_of_them(server):
    task = await start(server, input=["a", "b", "c"], request_id="mine")
    answer = await server.post("/abort_requests", request_ids=["mine"])
    assert answer.json() == {"aborted": ["embd-mine"]}
    response = await task
    assert response.status_code == 499 and response.json()["error"]["code"] == "aborted"
    server.assert_idle()


async def test_one_that_fails_is_a_500_and_the_others_are_dropped(server):
    server.engine.fail[9] = "the embedding has values that are not finite"
    response = await server.post(PATH, input=[[5], [9], [6]])
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the embedding has values that are not finite"
    server.assert_idle()


async def test_a_dead_engine_and_a_full_queue_are_503(serve):
    server = await serve(max_num_queued_tokens=3)
    task = await start(server, input=["a", "b"])
    response = await server.post(PATH, input="a a")
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    server.engine.die()
    assert (await task).status_code == 503
    assert (await server.post(PATH, input="a")).status_code == 503


async def test_they_count_in_the_metrics(server):
    await vectors(server, input=[[5, 6, 7], [8]])
    lines = (await server.http.get("/metrics")).text.splitlines()
    figures = {line.split("{")[0]: float(line.split()[-1]) for line in lines if "{" in line and 'le="' not in line}
    stops = [
        line for line in lines if line.startswith("vllm:request_success_total") and 'finished_reason="stop"' in line
    ]
    assert [float(line.split()[-1]) for line in stops] == [2.0]
    assert figures["vllm:prompt_tokens_total"] == 4 and figures["vllm:generation_tokens_total"] == 0
    assert figures["vllm:request_prompt_tokens_sum"] == 4 and figures["vllm:e2e_request_latency_seconds_count"] == 2
    assert figures["vllm:time_to_first_token_seconds_count"] == figures["vllm:request_params_max_tokens_count"] == 0


async def test_what_was_cached_counts_too(server):
    server.engine.num_cached_tokens = 2
    await vectors(server, input=[[5, 6, 7], [8, 9, 10, 11]])
    lines = (await server.http.get("/metrics")).text.splitlines()
    sources = {
        line.partition('source="')[2].partition('"')[0]: float(line.split()[-1])
        for line in lines
        if line.startswith("vllm:prompt_tokens_by_source_total")
    }
    assert sources == {"local_compute": 3.0, "local_cache_hit": 4.0, "external_kv_transfer": 0.0}


async def test_asyncllm_gives_one_output(server):
    outputs = [output async for output in server.llm.encode([5, 6])]
    (output,) = outputs
    assert output.finished and output.prompt_token_ids == [5, 6]
    assert output.outputs.embedding == [0.25, 6.0, 0.0, 1.0] and output.outputs.hidden_size == 4
    assert output.outputs.data.tobytes() == array("f", output.outputs.embedding).tobytes()
