"""The cases that need a real model behind a real port: SmolLM2 from its GGUF, and a model that says a script."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo import LLM, SamplingParams
from support.checkpoints import chain_llama
from support.served import ServerProcess

CHAT = "/v1/chat/completions"
CONTEXT = 704  # tokens, of smol
HELLO = [{"role": "user", "content": "Name three colours."}]

# Each token has one successor, so one model can hold many scripts: a prompt begins where it ends.
EMOJI = [10813, 242, 218, 34978, 120, 38083, 223]  # 😀歪✅, three, two and two tokens
WORDS = [
    " cat",
    " dog",
    " house",
    " tree",
    " water",
    " light",
    " stone",
    " paper",
    " green",
    " table",
    " horse",
    " bird",
]
SCRIPT = [
    *("Q", "Hello", " world", " how"),
    *("W", *WORDS),
    *("R", " red", " yellow", " blue"),
    *("M", " a", "\n", " b", " c", " d", " e", " f", " g", "\n\n", " h"),
    *("E", *EMOJI),
]


@pytest.fixture(scope="module")
def smol(smollm2_gguf: Path) -> Iterator[ServerProcess]:
    options = ("--max-model-len", str(CONTEXT), "--max-num-seqs", "8", "--num-gpu-blocks-override", "256")
    server = ServerProcess(str(smollm2_gguf), "--served-model-name", "smollm2", *options)
    server.wait_until_ready()
    yield server
    assert server.process.poll() is None
    server.close()


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = chain_llama(tmp_path_factory.mktemp("served") / "chain", SCRIPT)
    server = ServerProcess(str(folder), "--max-num-seqs", "4", "--num-gpu-blocks-override", "256")
    server.wait_until_ready()
    yield server
    server.close()


@pytest.fixture(scope="module")
def uncached(smollm2_gguf: Path) -> Iterator[LLM]:
    """The model of `smol` in this process, without a prefix cache."""
    options: dict[str, Any] = {"max_model_len": CONTEXT, "num_gpu_blocks_override": 256}
    with LLM(str(smollm2_gguf), enable_prefix_caching=False, **options) as llm:
        yield llm


@pytest.fixture(autouse=True)
def still_alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test sent: afterwards the server lives and holds nothing."""
    yield
    for name in ("smol", "chain"):
        if name in request.fixturenames:
            server = request.getfixturevalue(name)
            assert httpx.get(f"{server.url}/health").status_code == 200
            server.complete(prompt="1 2 3", max_tokens=1, temperature=0)
            server.wait_until_idle()


def joined(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


def test_text_1_characters_over_several_tokens_come_whole(chain):
    body = {"prompt": "E", "max_tokens": len(EMOJI), "temperature": 0}
    chunks = chain.chunks(**body)
    assert joined(chunks) == chain.complete(**body)["choices"][0]["text"] == "😀歪✅"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["😀", "歪", "✅"]


def test_text_2_a_stop_string_across_tokens(chain):
    body = {"prompt": "Q", "stop": ["lo wor"], "max_tokens": 20}
    whole = chain.complete(**body)
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hel", "stop", "lo wor")
    chunks = chain.chunks(**body, stream_options={"include_usage": True})
    assert joined(chunks) == "Hel" and not any("lo" in joined([chunk]) for chunk in chunks)
    assert chunks[-1]["usage"] == whole["usage"]
    included = chain.complete(**body, include_stop_str_in_output=True)
    assert included["choices"][0]["text"] == "Hello wor"


def test_what_a_stop_string_takes_back_is_neither_streamed_nor_counted(chain):
    body = {"prompt": "W", "stop": [" dog house tree"], "max_tokens": 20, "logprobs": 0, "return_token_ids": True}
    whole = chain.complete(**body)
    assert whole["choices"][0]["text"] == " cat"
    chunks = chain.chunks(**body, stream_options={"include_usage": True})
    assert joined(chunks) == " cat" and chunks[-1]["usage"] == whole["usage"]
    streamed = [chunk["choices"][0] for chunk in chunks[:-1]]
    expected = whole["choices"][0]
    assert [token_id for choice in streamed for token_id in choice["token_ids"]] == expected["token_ids"]
    assert [name for choice in streamed for name in choice["logprobs"]["tokens"]] == expected["logprobs"]["tokens"]


def test_text_3_no_token_waits_for_a_stop_string_that_it_cannot_begin(chain):
    """A reader that falls behind gets several tokens in one chunk, but whole ones."""
    chunks = chain.chunks(prompt="W", stop=["zz"], max_tokens=len(WORDS))
    read = list(itertools.accumulate(chunk["choices"][0]["text"] for chunk in chunks))
    assert set(read) <= set(itertools.accumulate(WORDS)) and read[-1] == "".join(WORDS)


def test_text_8_a_stop_token_ends_the_text_before_it(chain):
    (yellow,) = chain.post("/tokenize", prompt=" yellow").json()["tokens"]
    body = {"prompt": "R", "stop_token_ids": [yellow], "max_tokens": 9, "return_token_ids": True}
    choice = chain.complete(**body)["choices"][0]
    assert (choice["text"], choice["stop_reason"], choice["token_ids"][-1]) == (" red", yellow, yellow)
    choice = chain.complete(**body, include_stop_str_in_output=True)["choices"][0]
    assert (choice["text"], choice["token_ids"][-1]) == (" red yellow", yellow)
    assert joined(chain.chunks(**body)) == " red"


def test_sample_6_min_tokens_outlasts_a_stop_string(chain):
    body = {"prompt": "M", "stop": ["\n"], "min_tokens": 6, "max_tokens": 20}
    answer = chain.complete(**body)
    assert answer["choices"][0]["text"] == " a\n b c d e f g"
    assert answer["usage"]["completion_tokens"] >= 6
    assert joined(chain.chunks(**body)) == " a\n b c d e f g"


def test_text_5_usage_is_that_of_the_whole(smol):
    body = {"messages": HELLO, "max_tokens": 8, "temperature": 0}
    *chunks, last = smol.chunks(CHAT, **body, stream_options={"include_usage": True})
    usage = smol.chat(**body)["usage"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == usage["completion_tokens"]
    assert last["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    assert not any(chunk.get("usage") for chunk in chunks)


def test_text_6_echoed_tokens_join_to_the_text(smol):
    body = {"prompt": "\n7. Mira keeps 31", "echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 8}
    choice = smol.complete(**body)["choices"][0]
    tokens = choice["logprobs"]["tokens"]
    assert "".join(tokens) == choice["text"]
    assert choice["logprobs"]["text_offset"] == [len("".join(tokens[:i])) for i in range(len(tokens))]


def test_sample_1_a_seed_decides_alone_and_in_company(smol):
    body = {"messages": HELLO, "temperature": 0.7, "max_tokens": 30}

    def answer(seed: int | None) -> str:
        return smol.chat(**body, seed=seed)["choices"][0]["message"]["content"]

    alone = [answer(123) for _ in range(3)]
    with ThreadPoolExecutor(7) as pool:
        together = list(pool.map(answer, [123, None, 123, None, None, 123, None]))
    assert {*alone, together[0], together[2], together[5]} == {alone[0]}
    assert answer(124) != alone[0]


@pytest.mark.parametrize(
    "sampling", [*({"temperature": t} for t in (1e-3, 1e-5, 1e-8, 1e-12, 1e-38)), {"top_p": 1e-4}], ids=str
)
def test_sample_2_a_tiny_temperature_is_greedy(smol, sampling):
    body = {"prompt": "The capital of France is", "max_tokens": 8, "seed": 1, "logprobs": 2}
    greedy = smol.complete(**body, temperature=0)["choices"][0]
    # No near tie: at 1e-3 the runner-up's chance is below e**-100.
    gaps = [max(top.values()) - min(top.values()) for top in greedy["logprobs"]["top_logprobs"]]
    assert min(gaps) > 0.1
    assert smol.complete(**body, **sampling)["choices"][0]["text"] == greedy["text"] != ""


@pytest.mark.parametrize("bias", [{"49152": 1}, {"191222": -100}, {"-1": 5}, {"abc": 1}, {"5": "x"}], ids=str)
@pytest.mark.parametrize("body", [{"prompt": "a"}, {"messages": HELLO}], ids=list)
def test_sample_3_a_bias_of_what_is_no_token_is_refused(smol, body, bias):
    path = CHAT if "messages" in body else "/v1/completions"
    response = smol.post(path, **body, logit_bias=bias, max_tokens=1)
    assert response.status_code == 400 and response.json()["error"]["param"] == "logit_bias"


def test_sample_4_logit_bias_bans_and_forces(smol):
    body = {"prompt": "The capital of France is", "temperature": 0, "return_token_ids": True}
    first = smol.complete(**body, max_tokens=1)["choices"][0]["token_ids"][0]
    banned = smol.complete(**body, max_tokens=20, logit_bias={str(first): -100})["choices"][0]["token_ids"]
    assert first not in banned
    forced = smol.complete(**body, max_tokens=5, logit_bias={"4528": 100})["choices"][0]
    assert forced["token_ids"] == [4528] * 5 and forced["text"] == " London" * 5
    chunks = smol.chunks(CHAT, messages=HELLO, max_tokens=5, temperature=0, logit_bias={"4528": 100})
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == " London" * 5


def test_sample_7_top_k_beyond_the_vocabulary_is_off(smol):
    body = {"prompt": "Once upon a time", "seed": 1, "temperature": 1, "max_tokens": 6}
    off = smol.complete(**body)["choices"][0]["text"]
    for top_k in (-1, 0, 49152, 49153, 2**31 - 1):
        assert smol.complete(**body, top_k=top_k)["choices"][0]["text"] == off
    greedy = smol.complete(**{**body, "temperature": 0})["choices"][0]["text"]
    assert smol.complete(**body, top_k=1)["choices"][0]["text"] == greedy
    assert [smol.post("/v1/completions", **body, top_k=top_k).status_code for top_k in (-2, 1.5, "3")] == [400] * 3


def test_sample_8_top_logprobs_are_sorted_and_hold_the_token(smol):
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 5, "max_tokens": 6, "temperature": 0}
    for entry in smol.chat(**body)["choices"][0]["logprobs"]["content"]:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 5 and values == sorted(values, reverse=True)
        assert entry["top_logprobs"][0]["token"] == entry["token"] and values[0] == entry["logprob"]


def test_sample_9_more_samples_than_seats(chain):
    def answer(prompt: str) -> list[tuple[int, str]]:
        return [(c["index"], c["text"]) for c in chain.complete(prompt=prompt, n=16, max_tokens=8)["choices"]]

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(answer, ("W", "M", "W")))
    texts = ("".join(WORDS[:8]), " a\n b c d e f g", "".join(WORDS[:8]))
    assert answers == [[(index, text) for index in range(16)] for text in texts]


def test_sample_10_scoring_makes_no_token(smol):
    answer = smol.complete(prompt="The reply was: No", echo=True, logprobs=1, max_tokens=0)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]["token_logprobs"]
    assert choice["text"] == "The reply was: No" and answer["usage"]["completion_tokens"] == 0
    assert len(logprobs) == answer["usage"]["prompt_tokens"]
    assert logprobs[0] is None and all(value < 0 for value in logprobs[1:])


def test_scores_of_a_prompt_are_those_of_its_generation(smol):
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 6, "logprobs": 0}
    choice = smol.complete(**body, return_token_ids=True)["choices"][0]
    prompt = choice["prompt_token_ids"] + choice["token_ids"]
    scored = smol.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert scored["logprobs"]["token_logprobs"][-6:] == choice["logprobs"]["token_logprobs"]


@pytest.mark.parametrize(("room", "max_tokens", "status"), [(1, 1, 200), (4, 4, 200), (0, 1, 400), (4, 5, 400)])
def test_batch_4_the_context_may_just_be_filled(smol, room, max_tokens, status):
    body = {"prompt": [504] * (CONTEXT - room), "max_tokens": max_tokens, "ignore_eos": True}
    response = smol.post("/v1/completions", **body)
    assert response.status_code == status


def test_batch_5_chat_takes_the_rest_of_the_context(smol):
    prompt = [{"role": "user", "content": "word " * (CONTEXT - 42)}]
    answer = smol.chat(messages=prompt, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == CONTEXT and answer["choices"][0]["finish_reason"] == "length"


def test_batch_1_a_prefix_hit_changes_no_answer(smol, uncached):
    prompt = [1001 + i * 7919 % 40000 for i in range(600)]  # no other test's
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def answer(_: int) -> tuple[list[int], int]:
        answer = smol.complete(**body)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["token_ids"], cached

    answers = [answer(i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers += pool.map(answer, range(4))
    assert [cached for _, cached in answers] == [0] + [599] * 7
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    (expected,) = uncached.generate(prompt, params)
    assert expected.num_cached_tokens == 0
    assert [token_ids for token_ids, _ in answers] == [list(expected.outputs[0].token_ids)] * 8


def test_batch_2_cached_tokens_are_reported_and_not_computed(smol):
    prompt = [2000 + i for i in range(400)]  # no other test's begins so
    body = {"prompt": prompt, "max_tokens": 1}
    computed = [smol.metric("iteration_tokens_total_sum")]
    first = smol.complete(**body)["usage"]
    computed.append(smol.metric("iteration_tokens_total_sum"))
    hits = smol.metric("prefix_cache_hits_total")
    usage = smol.complete(**body)["usage"]
    computed.append(smol.metric("iteration_tokens_total_sum"))
    assert [computed[1] - computed[0], computed[2] - computed[1]] == [400, 1]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0 and cached == 399  # all but the last
    assert smol.metric("prefix_cache_hits_total") - hits == cached
    last = smol.chunks(**body, stream_options={"include_usage": True})[-1]
    assert last["usage"] == usage


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.7, "seed": 7}], ids=str)
def test_batch_8_a_warm_cache_leaves_a_chat_as_it_is(smol, uncached, sampling):
    messages = [{"role": "system", "content": f"Answer in few words. {sampling}"}]
    num_cached = []
    for question in ("Name a colour.", "Name a fruit of that colour.", "And an animal?"):
        messages.append({"role": "user", "content": question})
        answer = smol.chat(messages=messages, max_tokens=12, **sampling)
        text = answer["choices"][0]["message"]["content"]
        (expected,) = uncached.chat(messages, SamplingParams(max_tokens=12, **sampling))
        assert (text, expected.num_cached_tokens) == (expected.outputs[0].text, 0)
        num_cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages.append({"role": "assistant", "content": text})
    assert num_cached[0] < num_cached[1] < num_cached[2]


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}], ids=str)
def test_api_1_the_real_template_takes_a_tool_call_without_content(smol, content):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "assistant", **content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    smol.chat(messages=[*HELLO, *turns, *HELLO], max_tokens=1)


def test_api_2_the_real_template_takes_content_in_parts(smol):
    body = {"max_tokens": 6, "temperature": 0}
    question = HELLO[0]["content"]
    parts = [{"role": "user", "content": [{"type": "text", "text": question}]}]
    plain, in_parts = smol.chat(messages=HELLO, **body), smol.chat(messages=parts, **body)
    assert plain["usage"]["prompt_tokens"] == in_parts["usage"]["prompt_tokens"]
    assert plain["choices"][0]["message"] == in_parts["choices"][0]["message"]


def test_api_4_a_prefilled_turn_is_continued(smol):
    messages = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "My guess would be "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = smol.post("/tokenize", **body).json()["tokens"]
    text = smol.post("/detokenize", tokens=tokens).json()["prompt"]
    assert text.endswith("My guess would be ")
    assert "My guess" not in smol.chat(**body, max_tokens=8)["choices"][0]["message"]["content"]


def test_ops_1_closed_streams_leave_nothing_behind(smol):
    with ExitStack() as stack:
        for _ in range(20):
            body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
            send_only(stack.enter_context(socket.create_connection(("127.0.0.1", smol.port))), body)
        deadline = time.monotonic() + 10
        while (smol.metric("num_requests_running"), smol.metric("num_requests_waiting")) != (8, 12):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    smol.wait_until_idle()


def send_only(connection: socket.socket, body: dict[str, Any]) -> None:
    """By hand, since a client would wait for the answer's head, which a waiting request does not have yet."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: octavo\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)


def test_the_official_client_talks_to_it(smol):
    client = openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", max_retries=0)
    with client:
        assert client.models.list().data[0].id == "smollm2"
        answer = client.chat.completions.create(model="smollm2", messages=HELLO, max_tokens=8, temperature=0)
        stream = client.chat.completions.create(
            model="smollm2", messages=HELLO, max_tokens=8, temperature=0, stream=True
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert streamed == answer.choices[0].message.content != ""
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nope", messages=HELLO)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="smollm2", messages=HELLO, temperature=-1)


def test_a_burst_of_mixed_calls_is_answered(smol):
    def call(index: int) -> int:
        kind = index % 4
        if kind == 0:
            return smol.post("/v1/completions", prompt="a " * (index + 1), max_tokens=index).status_code
        if kind == 1:
            return smol.post(CHAT, messages=HELLO, max_tokens=5, n=2, logprobs=True).status_code
        if kind == 2:
            with smol.stream(CHAT, messages=HELLO, max_tokens=50) as response:
                next(response.iter_raw(), None)
                return response.status_code
        return smol.post("/v1/completions", prompt="a", temperature=-1).status_code

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(call, range(24)))
    assert statuses == [400 if index % 4 == 3 else 200 for index in range(24)]
