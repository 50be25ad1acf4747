"""Every field of SamplingParams: what is taken, what is refused and how the refusal reads."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from octavo.errors import InvalidRequestError
from octavo.request import SamplingParams
from octavo.sampling.validate import validate, validate_for_model

REFUSED: list[tuple[str, Any]] = [
    *(("n", value) for value in (0, -1, 129, 1_000_000, 1.5, "2", True, None)),
    *(("max_tokens", value) for value in (-1, -5, 1.5, "7", True)),
    *(("min_tokens", value) for value in (-1, 17, 1.0, None)),  # 17: beyond max_tokens, 16
    *(("seed", value) for value in (1.5, "1", True, 2**64, -(2**63) - 1)),
    *(("temperature", value) for value in (-1, -1e-9, 100.1, math.nan, math.inf, -math.inf, "hot", True, None, [1])),
    *(("top_p", value) for value in (-0.1, 1.1, math.nan, "0.5", False)),
    *(("min_p", value) for value in (-0.1, 1.1, math.nan, "0.5", False)),
    *(("top_k", value) for value in (-2, 1.5, "3", True, None)),
    *(("presence_penalty", value) for value in (-2.1, 3, math.nan, None)),
    *(("frequency_penalty", value) for value in (-2.1, 3, math.nan, None)),
    *(("repetition_penalty", value) for value in (0, -1, 1e-3, 101, math.inf, math.nan)),
    *(("logprobs", value) for value in (-2, 1.5, "5", True)),
    *(("prompt_logprobs", value) for value in (-2, 1.5, "5", True)),
    *(("truncate_prompt_tokens", value) for value in (0, -2, 1.5, True)),
    *(("stop", value) for value in ("", [""], ["", "x"], ["x"] * 100, "x" * 1025, 5, [5], {"a": 1}, b"x")),
    *(("bad_words", value) for value in ([""], "word", [5], 5)),
    *(("stop_token_ids", value) for value in ([-1], [1.5], ["1"], [True], [2**31], 0, "12")),
    *(("allowed_token_ids", value) for value in ([], [-1], [1.5], 3)),
    *(("logit_bias", value) for value in ({"-1": 5}, {"abc": 1}, {"5": "x"}, {5: 101}, {5: math.nan}, {1.5: 1})),
    *(("logit_bias", value) for value in ({True: 1}, {5: True}, {None: 1}, {"٥": 1}, {"": 1}, {"9" * 5000: 1}, [1])),
    *(("bad_words_token_ids", value) for value in ([[]], [[-1]], [5], 5)),
    *(("output_kind", value) for value in ("all", None, 0, [])),
    *((name, value) for name in ("ignore_eos", "detokenize", "skip_special_tokens") for value in (0, 1, "true", None)),
    *((name, 1) for name in ("spaces_between_special_tokens", "include_stop_str_in_output")),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda v: repr(v)[:30])
def test_refused_values_name_field_and_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.status == 400
    assert caught.value.message.startswith(f"{name} ")
    assert len(caught.value.message) < 300


def test_the_message_says_what_is_allowed() -> None:
    with pytest.raises(InvalidRequestError, match=r"^temperature is 'hot'; it must be a finite number in \[0, 100\]$"):
        SamplingParams(temperature="hot")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"^stop has 100 strings; at most 64 are allowed$"):
        SamplingParams(stop=["x"] * 100)


@pytest.mark.parametrize(
    ("name", "value", "normal"),
    [
        ("stop", None, []),
        ("stop", "\n", ["\n"]),
        ("stop", ("a", "b"), ["a", "b"]),
        ("stop_token_ids", None, []),
        ("stop_token_ids", (1, 2), [1, 2]),
        ("bad_words", None, []),
        ("top_k", -1, 0),
        ("top_k", 2**31 - 1, 2**31 - 1),
        ("seed", -1, None),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", -(2**63), -(2**63)),
        ("temperature", 1, 1.0),
        ("temperature", 1e-38, 1e-38),
        ("temperature", np.float32(0.5), 0.5),
        ("top_p", 0, 0.0),
        ("n", np.int64(3), 3),
        ("max_tokens", 0, 0),
        ("max_tokens", None, None),
        ("logprobs", -1, -1),
        ("logit_bias", {"5": 1, 7: -100}, {5: 1.0, 7: -100.0}),
        ("logit_bias", {}, {}),
        ("allowed_token_ids", range(3), [0, 1, 2]),
        ("truncate_prompt_tokens", -1, -1),
        ("output_kind", "DELTA", "delta"),
    ],
)
def test_normal_forms(name: str, value: Any, normal: Any) -> None:
    params = SamplingParams(**{name: value})
    assert getattr(params, name) == normal
    assert type(getattr(params, name)) is type(normal)
    validate(params)
    assert getattr(params, name) == normal


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_a_params_does_not_share_the_callers_lists() -> None:
    stop = ["x"]
    params = SamplingParams(stop=stop)
    stop.append("y")
    assert params.stop == ["x"]


@pytest.mark.parametrize(
    ("name", "value"), [("stop_token_ids", [100]), ("allowed_token_ids", [5, 100]), ("logit_bias", {"49152": 1})]
)
def test_ids_beyond_the_vocabulary_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="below the vocabulary's size, 100") as caught:
        validate_for_model(SamplingParams(**{name: value}), num_vocab_tokens=100, max_logprobs=20)
    assert caught.value.param == name


def test_logprobs_are_bounded_by_the_option() -> None:
    for name in ("logprobs", "prompt_logprobs"):
        for value in (21, -1):
            with pytest.raises(InvalidRequestError, match=f"^{name} is {value}; it must be at most 20"):
                validate_for_model(SamplingParams(**{name: value}), num_vocab_tokens=100, max_logprobs=20)
            validate_for_model(SamplingParams(**{name: value}), num_vocab_tokens=100, max_logprobs=-1)
        validate_for_model(SamplingParams(**{name: 20}), num_vocab_tokens=100, max_logprobs=20)
        validate_for_model(SamplingParams(**{name: -1}), num_vocab_tokens=20, max_logprobs=20)


@pytest.mark.parametrize(
    ("fields", "leaves_one"),
    [
        ({"bad_words_token_ids": [[1], [2]]}, False),
        ({"bad_words_token_ids": [[1], [2, 2]]}, True),
        ({"min_tokens": 1, "stop_token_ids": [1, 2]}, False),
        ({"min_tokens": 1, "stop_token_ids": [1]}, True),
        ({"min_tokens": 1, "bad_words_token_ids": [[1]], "eos": [2]}, False),
        ({"min_tokens": 1, "bad_words_token_ids": [[1]], "eos": [2], "ignore_eos": True}, True),
        ({"bad_words_token_ids": [[1]], "eos": [2]}, True),
    ],
)
def test_masks_that_leave_nothing_are_refused(fields: dict[str, Any], leaves_one: bool) -> None:
    eos = fields.pop("eos", [])
    params = SamplingParams(allowed_token_ids=[1, 2], **fields)
    if leaves_one:
        validate_for_model(params, num_vocab_tokens=100, max_logprobs=20, eos_token_ids=eos)
    else:
        with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
            validate_for_model(params, num_vocab_tokens=100, max_logprobs=20, eos_token_ids=eos)


def test_params_load_no_heavy_library() -> None:
    script = (
        "import sys; from octavo.request import SamplingParams; SamplingParams(); assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_masks_that_leave_nothing_of_the_vocabulary_are_refused() -> None:
    for fields in ({"stop_token_ids": [0, 1, 2, 3]}, {"bad_words_token_ids": [[0], [1], [2], [3]]}):
        params = SamplingParams(min_tokens=1, **fields)
        with pytest.raises(InvalidRequestError, match="leave at least one"):
            validate_for_model(params, num_vocab_tokens=4, max_logprobs=20)
        validate_for_model(params, num_vocab_tokens=5, max_logprobs=20)
    validate_for_model(SamplingParams(stop_token_ids=[0, 1, 2, 3]), num_vocab_tokens=4, max_logprobs=20)
