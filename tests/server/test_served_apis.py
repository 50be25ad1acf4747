"""The APIs beside completions and chat, by the clients of those who made them, on a real model behind a real port."""

from __future__ import annotations

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
