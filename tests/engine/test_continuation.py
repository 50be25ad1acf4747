"""A request that has said something already, to another engine, goes on as it would have."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from octavo.errors import InvalidRequestError
from octavo.request import EngineRequest, FinishReason
from support.fake_runner import expected_answer, make_engine, make_request, run_to_end


def after(source: EngineRequest, num_tokens: int) -> EngineRequest:
    token_ids = expected_answer(source, 256).token_ids[:num_tokens]
    return dataclasses.replace(source, output_token_ids=token_ids)


@pytest.mark.parametrize(
    "params",
    [
        {"ignore_eos": True},
        {"logprobs": 0, "prompt_logprobs": 0, "ignore_eos": True},
        {"min_tokens": 6, "stop_token_ids": [1, 2, 3, 4, 5, 6]},
        {"min_tokens": 9, "eos_token_ids": [0, 1, 2, 3]},
    ],
)
def test_at_every_token(params: dict[str, Any]):
    source = make_request("a", [1, 2, 3, 4, 5, 6], max_tokens=15, seed=7, **params)
    expected = expected_answer(source, 256)
    engine = make_engine(max_num_batched_tokens=8)
    for num_tokens in range(1, len(expected.token_ids)):
        engine.add_request(after(source, num_tokens))
        answer = run_to_end(engine)["a"]
        assert answer.token_ids == expected.token_ids[num_tokens:]
        assert answer.logprobs == expected.logprobs[num_tokens:]
        assert answer.prompt_logprobs is None  # its caller has them
        assert (answer.finish_reason, answer.stop_reason) == (expected.finish_reason, expected.stop_reason)


@pytest.mark.parametrize("said", [(0, 0, 0), (4, 4, 4), (4, 0, 2), (0, 3, 3), (None, 3, 0), (None, 0, 0)])
def test_samples_of_one_prompt(said):
    """None: the first sample is gone."""
    params: dict[str, Any] = {"max_tokens": 9, "seed": 3, "ignore_eos": True}
    sources = [make_request("0", [1, 2, 3, 4, 5], **params)]
    sources += [make_request(str(i), [1, 2, 3, 4, 5], sample_index=i, fork_of="0", **params) for i in (1, 2)]
    engine = make_engine()
    for source, num_tokens in zip(sources, said, strict=True):
        if num_tokens is not None:
            engine.add_request(after(source, num_tokens))
    answers = run_to_end(engine)
    for source, num_tokens in zip(sources, said, strict=True):
        if num_tokens is not None:
            assert answers[source.request_id].token_ids == expected_answer(source, 256).token_ids[num_tokens:]


def test_it_is_preempted_like_any_other():
    sources = [make_request(name, [i] * 10, max_tokens=20, seed=i, ignore_eos=True) for i, name in enumerate("abc", 1)]
    engine = make_engine(num_blocks=12)
    for source in sources:
        engine.add_request(after(source, 7))
    answers = run_to_end(engine)
    assert engine.scheduler.num_preemptions > 0
    for source in sources:
        assert answers[source.request_id].token_ids == expected_answer(source, 256).token_ids[7:]


def test_who_is_over_is_refused():
    source = make_request("a", [1, 2], max_tokens=3, ignore_eos=True)
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match="output_token_ids has 3 tokens"):
        engine.add_request(after(source, 3))
    source = make_request("a", [1, 2], max_tokens=None, ignore_eos=True)
    engine = make_engine(max_model_len=8)
    with pytest.raises(InvalidRequestError, match="output_token_ids has 6 tokens"):
        engine.add_request(after(source, 6))
    engine.add_request(after(source, 5))
    assert run_to_end(engine)["a"].finish_reason is FinishReason.LENGTH
