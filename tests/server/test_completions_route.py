"""POST /v1/completions. Case ids (text-6, sample-10 …) stand in the names of the tests that cover them."""

from __future__ import annotations

import json
from typing import Any

import pytest

PATH = "/v1/completions"


async def complete(server: Any, **body: Any) -> dict[str, Any]:
    response = await server.post(PATH, **body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_completion_by_the_openai_client(server):
    answer = await server.openai.completions.create(model="tiny", prompt="Hello", max_tokens=3, temperature=0)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.index) == (" one two three", "length", 0)
    assert answer.object == "text_completion" and answer.model == "tiny" and answer.id.startswith("cmpl-")
    num_prompt_tokens = len(server.tokenizer.encode("Hello"))
    assert answer.usage.prompt_tokens == num_prompt_tokens
    assert answer.usage.completion_tokens == 3
    assert answer.usage.total_tokens == num_prompt_tokens + 3
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_max_tokens_is_16_when_absent_or_null(server):
    assert (await complete(server, prompt="Hello"))["usage"]["completion_tokens"] == 16
    assert (await complete(server, prompt="Hello", max_tokens=None, stop=None))["usage"]["completion_tokens"] == 16


async def test_a_stream_by_the_openai_client_joins_to_the_whole(server):
    stream = await server.openai.completions.create(model="tiny", prompt="Hello", max_tokens=5, stream=True)
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].text for chunk in chunks] == [" one", " two", " three", " four", " five"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_choices_are_numbered_prompt_by_prompt(server):
    answer = await complete(server, prompt=["Hello", "red red"], n=3, max_tokens=1)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    prompts = [len(server.tokenizer.encode(text)) for text in ("Hello", "red red")]
    assert answer["usage"]["prompt_tokens"] == sum(prompts)
    assert answer["usage"]["completion_tokens"] == 6
    assert [request.sample_index for request in server.engine.requests] == [0, 1, 2, 0, 1, 2]


async def test_streamed_choices_of_many_prompts_carry_their_index(server):
    events = await server.events(PATH, prompt=["Hello", "red"], n=2, max_tokens=2)
    assert events.pop() == "[DONE]"
    texts = dict.fromkeys(range(4), "")
    for data in map(json.loads, events):
        (choice,) = data["choices"]
        texts[choice["index"]] += choice["text"]
    assert set(texts.values()) == {" one two"}


@pytest.mark.parametrize("prompt", [[72, 73], [[72, 73]], [[72], [73, 74]]])
async def test_prompts_as_token_ids(server, prompt):
    answer = await complete(server, prompt=prompt, max_tokens=1)
    nested = prompt if isinstance(prompt[0], list) else [prompt]
    assert [request.prompt_token_ids for request in server.engine.requests] == nested
    assert len(answer["choices"]) == len(nested)


@pytest.mark.parametrize(
    "prompt",
    ["", [""], [], [[]], ["a", ""], [1, "a"], ["a", 1], [[1], "a"], [True], {"a": 1}, 7, [[1.0]], None],
    ids=str,
)
async def test_batch_6_empty_and_mixed_prompts_are_refused(server, prompt):
    response = await server.post(PATH, prompt=prompt, max_tokens=1)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    server.assert_idle()


@pytest.mark.parametrize("prompt", [[-1], [49152], [5279552648203111001], [1.5], [[1, -3]]], ids=str)
async def test_sample_5_prompt_ids_outside_the_vocabulary_are_refused(server, prompt):
    response = await server.post(PATH, prompt=prompt, max_tokens=1)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "status"), [(63, 1, 200), (60, 4, 200), (64, 1, 400), (65, 1, 400), (60, 5, 400)]
)
async def test_batch_4_prompt_and_output_may_just_fill_the_context(serve, num_prompt, max_tokens, status):
    server = await serve(max_model_len=64)
    response = await server.post(PATH, prompt=[72] * num_prompt, max_tokens=max_tokens, ignore_eos=True)
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "64" in response.json()["error"]["message"]


async def test_echo_puts_the_prompt_before_the_text(server):
    assert (await complete(server, prompt="Hello", echo=True, max_tokens=1))["choices"][0]["text"] == "Hello one"
    ids = server.tokenizer.encode("red green")
    assert (await complete(server, prompt=ids, echo=True, max_tokens=1))["choices"][0]["text"] == "red green one"
    events = await server.events(PATH, prompt="Hello", echo=True, max_tokens=2)
    assert [json.loads(data)["choices"][0]["text"] for data in events[:-1]] == ["Hello one", " two"]


async def test_text_6_echoed_tokens_join_to_the_text_and_offsets_add_up(server):
    answer = await complete(server, prompt="Hello world, red", echo=True, logprobs=1, max_tokens=8, temperature=0)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    expected, offset = [], 0
    for token in logprobs["tokens"]:
        expected.append(offset)
        offset += len(token)
    assert logprobs["text_offset"] == expected
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value is not None for value in logprobs["token_logprobs"][1:])


async def test_streamed_logprobs_are_those_of_the_whole(server):
    body = {"prompt": "Hello world", "echo": True, "logprobs": 2, "max_tokens": 4}
    whole = (await complete(server, **body))["choices"][0]["logprobs"]
    joined: dict[str, list[Any]] = {key: [] for key in whole}
    for data in (await server.events(PATH, **body))[:-1]:
        for key, values in json.loads(data)["choices"][0]["logprobs"].items():
            joined[key] += values
    assert joined == whole


async def test_text_offset_counts_code_points_also_within_a_character(server):
    """😀 is four tokens here, each with a quarter of it."""
    answer = await complete(server, prompt="é😀a", echo=True, logprobs=0, max_tokens=0)
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 2]


async def test_sample_10_scoring_a_prompt_makes_no_token(server):
    answer = await complete(server, prompt="The reply was: No", echo=True, logprobs=1, max_tokens=0)
    choice = answer["choices"][0]
    num_prompt_tokens = len(server.tokenizer.encode("The reply was: No"))
    assert choice["text"] == "The reply was: No"
    assert len(choice["logprobs"]["token_logprobs"]) == num_prompt_tokens
    assert answer["usage"]["completion_tokens"] == 0


async def test_top_logprobs_hold_the_best_and_the_token_itself(server):
    top = (await complete(server, prompt="a", logprobs=1, max_tokens=1))["choices"][0]["logprobs"]["top_logprobs"][0]
    assert list(top.values()) == [-0.5, -1.0]
    top = (await complete(server, prompt="a", logprobs=3, max_tokens=1))["choices"][0]["logprobs"]["top_logprobs"][0]
    assert list(top.values()) == [-0.5, -1.0, -1.5]


async def test_tokens_as_token_ids(server):
    body = {"prompt": "a", "logprobs": 1, "max_tokens": 1, "return_tokens_as_token_ids": True}
    logprobs = (await complete(server, **body))["choices"][0]["logprobs"]
    one = server.tokenizer.encode(" one")[0]
    assert logprobs["tokens"] == [f"token_id:{one}"]
    assert list(logprobs["top_logprobs"][0]) == [f"token_id:{one + 1}", f"token_id:{one}"]


async def test_prompt_logprobs_are_an_extra_of_the_choice(server):
    choice = (await complete(server, prompt="red red", prompt_logprobs=2, max_tokens=1))["choices"][0]
    ids = server.tokenizer.encode("red red")
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(ids[1])] == {
        "logprob": -1.0,
        "rank": 2,
        "decoded_token": server.tokenizer.token_text(ids[1]),
    }
    assert "prompt_logprobs" not in (await complete(server, prompt="red", max_tokens=1))["choices"][0]


async def test_token_ids_are_returned_when_asked_for(server):
    body = {"prompt": "Hello", "max_tokens": 3, "return_token_ids": True}
    choice = (await complete(server, **body))["choices"][0]
    assert choice["token_ids"] == server.tokenizer.encode(" one two three")
    assert choice["prompt_token_ids"] == server.tokenizer.encode("Hello")
    chunks = [json.loads(data)["choices"][0] for data in (await server.events(PATH, **body))[:-1]]
    assert [token_id for chunk in chunks for token_id in chunk["token_ids"]] == choice["token_ids"]
    assert ["prompt_token_ids" in chunk for chunk in chunks] == [True, False, False]


async def test_text_5_no_usage_in_a_stream_unless_asked(server):
    for options in ({}, {"stream_options": {}}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        events = await server.events(PATH, prompt="Hello", max_tokens=3, **options)
        assert not any("usage" in data for data in events)


async def test_text_5_usage_only_on_last_chunk(server):
    whole = await complete(server, prompt="Hello", max_tokens=3)
    events = await server.events(PATH, prompt="Hello", max_tokens=3, stream_options={"include_usage": True})
    *chunks, last = [json.loads(data) for data in events[:-1]]
    assert all(chunk.get("usage") is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"] == whole["usage"]


async def test_continuous_usage_is_cumulative(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await server.events(PATH, prompt="Hello", max_tokens=3, stream_options=options)
    chunks = [json.loads(data) for data in events[:-1]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


async def test_the_seed_in_use_is_reported(server):
    assert (await complete(server, prompt="a", seed=7))["seed"] == 7
    assert (await complete(server, prompt="a"))["seed"] == server.engine.requests[-1].seed
    answer = await complete(server, prompt=["a", "b"], max_tokens=1)
    assert [choice["seed"] for choice in answer["choices"]] == [r.seed for r in server.engine.requests[-2:]]
    events = await server.events(PATH, prompt="a", seed=9, max_tokens=2)
    assert [json.loads(data).get("seed") for data in events[:-1]] == [9, None]


async def test_stop_reasons_are_reported(server):
    choice = (await complete(server, prompt="a", stop=["two"]))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" one ", "stop", "two")
    (two,) = server.tokenizer.encode(" two")
    choice = (await complete(server, prompt="a", stop_token_ids=[two]))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" one", "stop", two)


async def test_text_1_a_character_over_several_tokens_comes_whole(server):
    text = "😀👩‍👩‍👧‍👦🇨🇭日本語歪✅ď"
    ids = server.tokenizer.encode(text)
    server.engine.script = lambda request: ids
    whole = (await complete(server, prompt="a", max_tokens=len(ids)))["choices"][0]["text"]
    events = await server.events(PATH, prompt="a", max_tokens=len(ids))
    pieces = [json.loads(data)["choices"][0]["text"] for data in events[:-1]]
    assert "".join(pieces) == whole == text
    assert not any("\ufffd" in piece for piece in pieces) and "" not in pieces


async def test_line_ends_of_unicode_travel_escaped(server):
    text = "a\u0085b\u2028c\u2029d"
    ids = server.tokenizer.encode(text)
    server.engine.script = lambda request: ids
    events = await server.events(PATH, prompt="a", max_tokens=len(ids))
    assert all(data.splitlines() == [data] for data in events)
    assert "".join(json.loads(data)["choices"][0]["text"] for data in events[:-1]) == text


async def test_the_models_sampling_defaults_stand_under_the_requests_own(serve):
    server = await serve(defaults={"temperature": 0.25, "top_k": 5})
    await complete(server, prompt="a", max_tokens=1, temperature=0.5, top_k=None)
    params = server.engine.requests[0].params
    assert (params.temperature, params.top_k) == (0.5, 5)


async def test_every_sampling_field_reaches_the_engine(server):
    fields = {
        "n": 2,
        "max_tokens": 7,
        "min_tokens": 2,
        "seed": 3,
        "stop": ["zz"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "bad_words": ["red"],
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": 1.5},
        "allowed_token_ids": [7, 8],
        "logprobs": 2,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "truncate_prompt_tokens": 1,
    }
    await complete(server, prompt="Hello world", cache_salt="s", **fields)
    request = server.engine.requests[0]
    for name, value in fields.items():
        expected = {7: 1.5} if name == "logit_bias" else value
        assert getattr(request.params, name) == expected, name
    assert request.cache_salt == "s"
    assert len(request.prompt_token_ids) == 1


async def test_add_special_tokens_is_honoured(serve):
    server = await serve()
    await complete(server, prompt="Hello", add_special_tokens=False, max_tokens=1)
    assert server.engine.requests[0].prompt_token_ids == server.tokenizer.encode("Hello", add_special_tokens=False)


async def test_sample_9_more_samples_than_run_at_once(serve):
    server = await serve(engine_options={"max_num_seqs": 4})
    answer = await complete(server, prompt="a", n=16, max_tokens=8)
    assert [choice["index"] for choice in answer["choices"]] == list(range(16))
