"""The APIs by the clients that people use, on a real model behind a real port: what one is told, all are told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from support.served import ServerProcess

HELLO = [{"role": "user", "content": "Name three colours."}]
GREEDY: dict[str, Any] = {"model": "smollm2", "temperature": 0}


@pytest.fixture(scope="module")
def smol(smollm2_gguf: Path) -> Iterator[ServerProcess]:
    options = (
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "4",
        "--num-gpu-blocks-override",
        "64",
        "--enable-responses-store",
    )
    server = ServerProcess(str(smollm2_gguf), "--served-model-name", "smollm2", "--api-key", "k", *options)
    server.wait_until_ready()
    yield server
    assert server.process.poll() is None
    server.close()


@pytest.fixture(scope="module")
def by_openai(smol: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smol.url}/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def said(by_openai: openai.OpenAI) -> str:
    """What chat says to HELLO."""
    answer = by_openai.chat.completions.create(messages=HELLO, max_tokens=8, **GREEDY)
    assert answer.choices[0].message.content
    return answer.choices[0].message.content


def test_anthropics_client_talks_to_it(smol, said):
    greedy: dict[str, Any] = {"model": "smollm2", "extra_body": {"temperature": 0}}  # the client has no such argument
    with anthropic.Anthropic(base_url=smol.url, api_key="k", max_retries=0) as client:
        message = client.messages.create(messages=HELLO, max_tokens=8, **greedy)
        assert (message.content[0].text, message.stop_reason) == (said, "max_tokens")
        with client.messages.stream(messages=HELLO, max_tokens=8, **greedy) as stream:
            assert "".join(stream.text_stream) == said
            usage = stream.get_final_message().usage
        counted = client.messages.count_tokens(model="smollm2", messages=HELLO).input_tokens
        assert usage.cache_read_input_tokens == counted - 1 and usage.input_tokens == 1  # chat has been there before
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="nope", messages=HELLO, max_tokens=1)


def test_openais_client_talks_to_it_by_responses(by_openai, said):
    response = by_openai.responses.create(input=HELLO, max_output_tokens=8, **GREEDY)
    assert (response.output_text, response.status) == (said, "incomplete")
    with by_openai.responses.stream(input=HELLO, max_output_tokens=8, **GREEDY) as stream:
        assert "".join(each.delta for each in stream if each.type == "response.output_text.delta") == said
    follow: dict[str, Any] = {"input": "And three animals.", "max_output_tokens": 8, **GREEDY}
    whole = by_openai.responses.create(
        **follow | {"input": [*HELLO, *response.output, {"role": "user", "content": follow["input"]}]}
    )
    followed = by_openai.responses.create(previous_response_id=response.id, **follow)
    assert followed.output_text == whole.output_text and followed.usage.input_tokens == whole.usage.input_tokens
    assert by_openai.responses.retrieve(followed.id).output_text == whole.output_text


def test_timings_of_a_real_request_add_up(by_openai):
    answer = by_openai.chat.completions.create(messages=HELLO, max_tokens=8, extra_body={"timings": True}, **GREEDY)
    timings = answer.model_extra["timings"]
    assert timings["prefill_seconds"] > 0 and timings["decode_seconds"] > 0 and timings["tokens_per_second"] > 0
    phases = timings["queue_seconds"] + timings["prefill_seconds"] + timings["decode_seconds"]
    assert phases == pytest.approx(timings["total_seconds"], abs=1e-3)


@pytest.mark.slow
def test_litellm_talks_to_it(smol, by_openai, said):
    program = [sys.executable, str(Path(__file__).with_name("litellm_calls.py")), smol.url, "k"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert {told[name] for name in ("whole", "streamed", "by_vllm", "by_anthropic")} == {said}
    assert told["by_responses"].startswith(said)  # it never asks for less than 16 tokens
    assert told["choices"] == [said, said] and told["top_logprobs"] == [2] * 8
    assert told["usage"] == told["streamed_usage"] == 8
    assert told["stopped"] == [said[: said.index("e")], "stop"]
    completion = by_openai.completions.create(prompt="The sky is", max_tokens=4, **GREEDY)
    assert told["text"] == completion.choices[0].text
    for call, kind, word in (
        ("wrong value", "BadRequestError", "temperature"),
        ("wrong model", "NotFoundError", "nope"),
        ("wrong key", "AuthenticationError", "API key"),
        ("too long", "BadRequestError", "context"),
        ("tools", "BadRequestError", "tools"),
        ("response_format", "BadRequestError", "response_format"),
    ):
        assert kind in told[call] and word in told[call][-1], (call, told[call])


def test_langchain_talks_to_it(smol, said):
    from langchain_openai import ChatOpenAI, OpenAI

    server: dict[str, Any] = {"model": "smollm2", "base_url": f"{smol.url}/v1", "max_retries": 0, "temperature": 0}
    question = HELLO[0]["content"]
    chat = ChatOpenAI(max_tokens=8, api_key="k", **server)
    message = chat.invoke(question)
    assert (message.content, message.response_metadata["finish_reason"]) == (said, "length")
    assert message.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in chat.stream(question)) == said
    assert [each.content for each in chat.batch([question] * 3)] == [said] * 3
    stopped = chat.bind(stop=["e"], logprobs=True, top_logprobs=2).invoke(question)
    assert stopped.content == said[: said.index("e")]
    entries = stopped.response_metadata["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries) != []
    responses = ChatOpenAI(max_tokens=8, api_key="k", use_responses_api=True, **server)
    assert responses.invoke(question).content[0]["text"] == said
    text = OpenAI(max_tokens=4, api_key="k", n=2, best_of=2, **server).generate(["The sky is"])
    first, second = text.generations[0]
    assert first.text == second.text != ""
    assert "".join(OpenAI(max_tokens=4, api_key="k", **server).stream("The sky is")) == first.text


def test_langchains_errors_are_those_of_the_server(smol):
    from langchain_openai import ChatOpenAI

    server: dict[str, Any] = {"base_url": f"{smol.url}/v1", "max_retries": 0}
    chat = ChatOpenAI(model="smollm2", api_key="k", **server)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"title": "a", "type": "object", "properties": {"a": {"type": "string"}}}
    for refused, word in (
        (chat.bind(temperature=-1), "temperature"),
        (chat.bind(max_tokens=10_000), "context"),
        (chat.bind_tools([tool]), "tools"),
        (chat.with_structured_output(schema), "response_format"),
    ):
        with pytest.raises(openai.BadRequestError, match=word):
            refused.invoke("a")
    with pytest.raises(openai.NotFoundError, match="nope"):
        ChatOpenAI(model="nope", api_key="k", **server).invoke("a")
    with pytest.raises(openai.AuthenticationError):
        ChatOpenAI(model="smollm2", api_key="wrong", **server).invoke("a")


def curl(server: ServerProcess, path: str, body: dict[str, Any] | None = None, *options: str) -> tuple[int, str]:
    """The status and what stands in the answer."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    data = [] if body is None else ["-H", "Content-Type: application/json", "--data-binary", "@-"]
    command = ["curl", "-sS", "--max-time", "60", "-w", "\n%{http_code}", *data, *options, server.url + path]
    done = subprocess.run(command, input=json.dumps(body), capture_output=True, text=True, timeout=90, check=True)
    answer, _, status = done.stdout.rpartition("\n")
    return int(status), answer


KEY = ("-H", "Authorization: Bearer k")


def test_curl_talks_to_it(smol, said):
    body = {"messages": HELLO, "max_tokens": 8, **GREEDY}
    status, answer = curl(smol, "/v1/chat/completions", body, *KEY)
    assert (status, json.loads(answer)["choices"][0]["message"]["content"]) == (200, said)
    more = {"n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["e"]}
    choices = json.loads(curl(smol, "/v1/chat/completions", body | more, *KEY)[1])["choices"]
    assert [choice["message"]["content"] for choice in choices] == [said[: said.index("e")]] * 2
    assert all(len(entry["top_logprobs"]) == 2 for entry in choices[1]["logprobs"]["content"])
    # Line by line, offering HTTP/2, in chunks, waiting to be told to send: all ways of curl's.
    for options in (("-N",), ("--http2",), ("-H", "Transfer-Encoding: chunked"), ("-H", "Expect: 100-continue")):
        status, answer = curl(smol, "/v1/chat/completions", {**body, "stream": True}, *KEY, *options)
        *events, done = [line.removeprefix("data: ") for line in answer.splitlines() if line]
        deltas = [json.loads(data)["choices"][0]["delta"]["content"] for data in events]
        assert (status, "".join(deltas), done) == (200, said, "[DONE]")
    anthropics = {"messages": HELLO, "max_tokens": 8, **GREEDY}
    status, answer = curl(smol, "/v1/messages", anthropics, "-H", "x-api-key: k", "-H", "anthropic-version: 2023-06-01")
    assert (status, json.loads(answer)["content"][0]["text"]) == (200, said)
    assert json.loads(curl(smol, "/v1/models", None, *KEY)[1])["data"][0]["id"] == "smollm2"
    assert curl(smol, "/health") == (200, "")
    assert curl(smol, "/health", None, "--head")[0] == 200


def test_curls_errors_have_a_status_and_words(smol):
    body = {"messages": HELLO, "max_tokens": 8, **GREEDY}
    for options, change, status, code in (
        ((), {}, 401, "invalid_api_key"),
        (KEY, {"model": "nope"}, 404, "model_not_found"),
        (KEY, {"temperature": -1}, 400, "invalid_request"),
        (KEY, {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "invalid_request"),
        (KEY, {"response_format": {"type": "json_object"}}, 400, "invalid_request"),
        ((*KEY, "-X", "PUT"), {}, 405, "method_not_allowed"),
    ):
        told, answer = curl(smol, "/v1/chat/completions", body | change, *options)
        assert (told, json.loads(answer)["error"]["code"]) == (status, code), answer
