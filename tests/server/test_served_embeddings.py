"""Embeddings of a real model behind a real port: by OpenAI's client, beside streams, and as LLM has them."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo import LLM, PoolingParams
from support.served import ServerProcess

TEXTS = ["The quick brown fox", "Once upon a time there was a small engine that could. " * 8, "日本語", "a"]
OPTIONS: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 128}


@pytest.fixture(scope="module")
def smol(smollm2_gguf: Path) -> Iterator[ServerProcess]:
    options = ("--max-model-len", "512", "--num-gpu-blocks-override", "128", "--max-num-batched-tokens", "64")
    pooler = ("--pooler-config", '{"pooling_type": "MEAN"}', "--runner", "pooling")
    server = ServerProcess(str(smollm2_gguf), "--served-model-name", "smollm2", *options, *pooler)
    server.wait_until_ready()
    yield server
    assert server.process.poll() is None
    server.close()


@pytest.fixture(scope="module")
def alone(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_gguf), enable_prefix_caching=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def means(alone: LLM) -> list[list[float]]:
    """By the vectors of LLM, each computed alone and in one step."""
    params = PoolingParams(pooling_type="mean")
    return [alone.embed(text, pooling_params=params, use_tqdm=False)[0].outputs.embedding for text in TEXTS]


def test_api_5_floats_base64_and_the_clients_default_agree(smol, means):
    with openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", max_retries=0) as client:
        by_default = client.embeddings.create(model="smollm2", input=TEXTS)
        by_floats = client.embeddings.create(model="smollm2", input=TEXTS, encoding_format="float")
    assert [each.embedding for each in by_default.data] == [each.embedding for each in by_floats.data] == means
    assert {len(each.embedding) for each in by_default.data} == {576}
    raw = smol.post("/v1/embeddings", input=TEXTS[0], encoding_format="base64").json()
    assert array("f", base64.b64decode(raw["data"][0]["embedding"])).tolist() == means[0]
    assert smol.post("/v1/embeddings", input="a", encoding_format="x").status_code == 400


def test_streams_beside_them_change_nothing(smol, alone, means):
    body = {"max_tokens": 24, "seed": 3, "ignore_eos": True}
    expected = [smol.complete(prompt=text, **body)["choices"][0]["text"] for text in TEXTS]
    last = [each.outputs.embedding for each in alone.embed(TEXTS, use_tqdm=False)]

    def stream(text: str) -> str:
        return "".join(chunk["choices"][0]["text"] for chunk in smol.chunks(prompt=text, **body) if chunk["choices"])

    def embed(number: int) -> list[list[float]]:
        pooling = {"pooling_type": "last"} if number % 2 else {}
        response = smol.post("/v1/embeddings", input=TEXTS, cache_salt=f"{number}", **pooling)
        assert response.status_code == 200, response.text
        return [entry["embedding"] for entry in response.json()["data"]]

    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(stream, text) for text in TEXTS]
        answers = [threads.submit(embed, number) for number in range(4)]
        assert [each.result() for each in streams] == expected
        assert [each.result() for each in answers] == [means, last] * 2


def test_an_input_longer_than_the_context(smol):
    response = smol.post("/v1/embeddings", input=[[4], [5] * 513])
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "input[1]"
    assert error["message"] == "input[1] has 513 tokens; the context is 512 tokens long"
    whole = smol.post("/v1/embeddings", input=[5] * 512).json()
    assert whole["usage"] == {"prompt_tokens": 512, "total_tokens": 512}


def test_llm_has_vllms_names(alone):
    (by_embed,) = alone.embed("Hello", use_tqdm=False)
    (by_encode,) = alone.encode(["Hello"], pooling_task="embed", use_tqdm=False)
    assert by_embed.outputs == by_encode.outputs and by_embed.finished
    assert by_encode.outputs.data.shape == (576,) and by_encode.outputs.data.dtype == "float32"
