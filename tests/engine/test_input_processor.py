"""What reaches the engine of a prompt and its parameters, and what is refused before."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import numpy as np
import pytest

from octavo.engine.input_processor import SEED_BITS, InputProcessor, repeatable_seeds
from octavo.engine.messages import EngineInfo
from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.request import SamplingParams
from support.front import END, small_tokenizer

MAX_MODEL_LEN = 64
VOCAB_SIZE = 13


def processor(**changes: Any) -> InputProcessor:
    info = EngineInfo(MAX_MODEL_LEN, VOCAB_SIZE, 4, 64, "float32", "none", 1, "no memory", 8)
    options = {"eos_token_ids": [END], "max_logprobs": 5, **changes}
    return InputProcessor(small_tokenizer(), dataclasses.replace(info, **options.pop("info", {})), **options)


def process(prompt: Any, own: InputProcessor | None = None, **params: Any) -> Any:
    return (own or processor()).process("r", prompt, SamplingParams(**params))


@pytest.mark.parametrize(
    "prompt",
    [
        "Hello world",
        {"prompt": "Hello world"},
        [7, 8, 9, 10],
        (7, 8, 9, 10),
        array("i", [7, 8, 9, 10]),
        {"prompt_token_ids": [7, 8, 9, 10]},
        [np.int64(7), np.int32(8), 9, 10],
    ],
)
def test_every_form_of_prompt(prompt):
    processed = process(prompt, max_tokens=3, seed=5)
    (sample,) = processed.samples
    assert (processed.request_id, sample.request_id.partition("#")[0]) == ("r", "r")
    assert processed.prompt == (None if "Hello world" not in str(prompt) else "Hello world")
    assert sample.prompt_token_ids == [7, 8, 9, 10]
    assert all(type(token_id) is int for token_id in sample.prompt_token_ids)
    assert (sample.seed, sample.sample_index, sample.eos_token_ids, sample.num_vocab_tokens) == (5, 0, [END], 13)


def test_ids_beside_their_text_are_taken_as_they_are():
    processed = process({"prompt": "shown", "prompt_token_ids": [1, 2]})
    assert (processed.prompt, processed.samples[0].prompt_token_ids) == ("shown", [1, 2])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([-1], r"prompt has the token id -1; ids must be in \[0, 12\]"),
        ([13], r"prompt has the token id 13; ids must be in \[0, 12\]"),
        ([1, -3], r"token id -3"),
        ([5279552648203111001], "token id 5279552648203111001"),
        ([1, 1.5], "prompt has 1.5 among its token ids; they must be integers"),
        ([True], "prompt has True among its token ids"),
        (["a", 1], "prompt has 'a' among its token ids"),
        ([[1]], "among its token ids"),
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ({}, "prompt is {}; it must be a string, a list of token ids, or a dict with one of these"),
        ({"prompt": 3}, "prompt is a int; it must be a string"),
        ({"prompt": "a", "image": 1}, "key 'image'; allowed: prompt, prompt_token_ids, cache_salt"),
        (3, "prompt is a int; it must be a string, a list of token ids, or a dict"),
        (b"abc", "prompt is a bytes"),
        (None, "prompt is None; it must be a string"),
    ],
)
def test_wrong_prompts(prompt, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        process(prompt)
    assert caught.value.param == "prompt"


def test_a_model_with_fewer_rows_than_tokens_bounds_the_ids():
    narrow = processor(info={"vocab_size": 10})
    assert process([9], narrow).samples[0].num_vocab_tokens == 10
    with pytest.raises(InvalidRequestError, match=r"ids must be in \[0, 9\]"):
        process("Hello world", narrow)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(63, 1), (60, 4), (64, 0), (1, 63)])
def test_what_just_fits(num_prompt, max_tokens):
    assert process([1] * num_prompt, max_tokens=max_tokens).samples[0].params.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param"), [(64, 1, "prompt"), (65, 1, "prompt"), (60, 5, "max_tokens")]
)
def test_what_just_does_not_fit(num_prompt, max_tokens, param):
    with pytest.raises(ContextLengthError) as caught:
        process([1] * num_prompt, max_tokens=max_tokens)
    assert str(caught.value) == (
        f"the context is 64 tokens long, but the request needs {num_prompt + max_tokens}: {num_prompt} in the prompt "
        f"and {max_tokens} in the output (max_tokens)"
    )
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


def test_absent_max_tokens_is_the_rest_of_the_context():
    assert process([1] * 60, max_tokens=None).samples[0].params.max_tokens == 4
    with pytest.raises(ContextLengthError, match="needs 65: 64 in the prompt and at least 1 token of output"):
        process([1] * 64, max_tokens=None)
    with pytest.raises(InvalidRequestError, match="min_tokens is 5; the context of 64 tokens leaves room for 4"):
        process([1] * 60, max_tokens=None, min_tokens=5)


def test_a_prompt_larger_than_the_whole_cache():
    with pytest.raises(InvalidRequestError, match="prompt has 9 tokens, but the whole KV cache holds 8"):
        process([1] * 9, processor(info={"num_blocks": 2}))


def test_truncation_keeps_the_last_tokens():
    long = [*range(13)] * 10
    assert process(long, truncate_prompt_tokens=5).samples[0].prompt_token_ids == long[-5:]
    assert process([1, 2], truncate_prompt_tokens=5).samples[0].prompt_token_ids == [1, 2]
    assert process(long, truncate_prompt_tokens=-1, max_tokens=4).samples[0].prompt_token_ids == long[-60:]
    assert process(long, truncate_prompt_tokens=-1, max_tokens=None).samples[0].prompt_token_ids == long[-63:]
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens is 65; it must be at most the context of 64"):
        process(long, truncate_prompt_tokens=65)


@pytest.mark.parametrize(
    "params", [{"stop_token_ids": [13]}, {"allowed_token_ids": [1, 13]}, {"logit_bias": {13: 1.0}}, {"logprobs": 6}]
)
def test_parameters_that_the_model_cannot_take(params):
    with pytest.raises(InvalidRequestError) as caught:
        process([1], **params)
    assert caught.value.param == next(iter(params))


def test_bad_words_with_and_without_a_blank():
    params = process([1], bad_words=["a", " a", "world"]).samples[0].params
    assert params.bad_words_token_ids == [[1], [6, 1], small_tokenizer().encode("world"), [9, 10]]


def test_all_logprobs_are_the_vocabulary():
    params = process([1], processor(max_logprobs=-1), logprobs=-1, prompt_logprobs=-1).samples[0].params
    assert (params.logprobs, params.prompt_logprobs) == (13, 13)


def test_the_callers_params_stay_as_they_are():
    params = SamplingParams(max_tokens=None, bad_words=["a"], logprobs=2)
    before = dataclasses.replace(params)
    processor().process("r", [1], params)
    assert params == before


def test_n_samples_share_all_but_their_index():
    processed = process([1, 2], n=3, max_tokens=2)
    assert [sample.request_id for sample in processed.samples] == ["r#0", "r#1", "r#2"]
    assert [sample.sample_index for sample in processed.samples] == [0, 1, 2]
    assert len({sample.seed for sample in processed.samples}) == 1


def test_salt_priority_and_user_go_along():
    salted = processor().process("r", [1], SamplingParams(), priority=3, cache_salt="s", user="u").samples[0]
    assert (salted.cache_salt, salted.priority, salted.user) == ("s", 3, "u")
    assert process({"prompt": "a", "cache_salt": "t"}).samples[0].cache_salt == "t"
    for wrong in ("", 3):
        with pytest.raises(InvalidRequestError, match="cache_salt"):
            processor().process("r", [1], SamplingParams(), cache_salt=wrong)  # type: ignore[arg-type]


def test_seeds():
    first, second = process([1]).samples[0].seed, process([1]).samples[0].seed
    assert first != second  # one chance in 2^53
    assert 0 <= first < 2**SEED_BITS
    assert process([1], seed=-7).samples[0].seed == -7
    one, again, other = (repeatable_seeds(seed) for seed in (0, 0, 1))
    series = [next(one) for _ in range(100)]
    assert series == [next(again) for _ in range(100)]
    assert not set(series) & {next(other) for _ in range(100)}
    # SplitMix64 of 0 begins with 0xE220A8397B1DCDAF.
    assert series[0] == 0xE220A8397B1DCDAF >> 11


def test_an_end_token_without_a_row_is_left_out():
    assert process([1], processor(eos_token_ids=[END, 500])).samples[0].eos_token_ids == [END]
