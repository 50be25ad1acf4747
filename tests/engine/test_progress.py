"""How far a prompt is, told before the first token: by the engine, by the front end, and across a crash."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from typing import Any

import pytest

from octavo.async_llm import AsyncLLM
from octavo.config import EngineConfig
from octavo.engine.client import ProcessClient
from octavo.engine.engine import Engine
from octavo.engine.input_processor import InputProcessor
from octavo.engine.messages import EngineInfo, TokenDelta
from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.engine.supervisor import SupervisedClient
from octavo.request import FinishReason, PromptProgress, SamplingParams
from support.engine_processes import COMMAND, pid_of
from support.fake_runner import expected_answer, make_engine, make_request
from support.front import END, small_front_end, small_tokenizer

PROMPT = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]


def reports(engine: Engine) -> list[tuple[str, int | None, int]]:
    """Until the engine is idle: (request_id, computed tokens of its prompt, new tokens) of all news."""
    found = []
    while engine.has_unfinished:
        found += [(delta.request_id, delta.num_computed_tokens, len(delta.token_ids)) for delta in engine.step()]
    return found


def test_the_engine_reports_every_part_of_a_prompt():
    engine = make_engine(max_num_batched_tokens=4)
    engine.add_request(make_request("a", PROMPT, max_tokens=3, reports_progress=True, ignore_eos=True))
    assert reports(engine) == [("a", 4, 0), ("a", 8, 0), ("a", 10, 1), ("a", None, 1), ("a", None, 1)]
    again = make_request("b", PROMPT, max_tokens=1, reports_progress=True)
    engine.add_request(again)
    assert reports(engine) == [("b", 10, 1)]  # the rest was cached


@pytest.mark.parametrize("num_others", [0, 1])
def test_parts_of_one_token_are_no_decodes(num_others):
    """Step by step they look alike: one row, one token, one piece of news."""
    engine = make_engine(max_num_batched_tokens=1 + num_others)
    others = [make_request("b", [1, 2], max_tokens=30, seed=2, ignore_eos=True)][:num_others]
    source = make_request("a", PROMPT, max_tokens=9, seed=3, reports_progress=True, ignore_eos=True)
    for each in (*others, source):
        engine.add_request(each)
    said: dict[str, list[int]] = {"a": [], "b": []}
    while engine.has_unfinished:
        for delta in engine.step():
            said[delta.request_id] += delta.token_ids
    for each in (*others, source):
        assert said[each.request_id] == expected_answer(each, 256).token_ids


def test_nobody_else_has_news_before_a_token():
    engine = make_engine(max_num_batched_tokens=4)
    engine.add_request(make_request("a", PROMPT, max_tokens=2, ignore_eos=True))
    assert reports(engine) == [("a", None, 1), ("a", None, 1)]


def test_a_prompt_that_is_only_scored_is_reported_to_its_end():
    engine = make_engine(max_num_batched_tokens=4)
    source = make_request("a", PROMPT, max_tokens=0, prompt_logprobs=0, reports_progress=True)
    engine.add_request(source)
    assert reports(engine) == [("a", 4, 0), ("a", 8, 0), ("a", 10, 0)]


@pytest.mark.parametrize("num_said", [0, 1, 5])
def test_who_has_said_something_reports_nothing_when_computed_again(num_said):
    source = make_request("a", PROMPT, max_tokens=8, seed=3, reports_progress=True, ignore_eos=True)
    said = expected_answer(source, 256).token_ids[:num_said]
    engine = make_engine(max_num_batched_tokens=4)
    engine.add_request(dataclasses.replace(source, output_token_ids=said))
    before = [news for news in reports(engine) if news[2] == 0]
    assert before == ([] if num_said else [("a", 4, 0), ("a", 8, 0)])


def front(**params: Any) -> tuple[OutputProcessor, RequestState]:
    tokenizer = small_tokenizer()
    inputs = InputProcessor(
        tokenizer,
        EngineInfo(64, 13, 4, 64, "float32", "none", 1, "no memory", 8),
        eos_token_ids=[END],
        max_logprobs=-1,
    )
    outputs = OutputProcessor(tokenizer)
    processed = inputs.process("r", PROMPT, SamplingParams(**params), reports_progress=True)
    return outputs, outputs.add(processed)


def feed(outputs: OutputProcessor, computed: int | None, *token_ids: int, cached: int = 2, **fields: Any) -> None:
    delta = TokenDelta("r#0", list(token_ids), num_cached_tokens=cached, num_computed_tokens=computed, **fields)
    assert outputs.process([delta]).updated


def test_it_never_goes_back():
    outputs, request = front(output_kind="delta")
    found = []
    for computed in (4, 8, 4, 8, 9):  # the second time, for another engine
        feed(outputs, computed, cached=2 if len(found) < 2 else 0)
        if (output := request.take_output()) is not None:
            assert output.outputs == [] and not output.finished and output.prompt_progress is not None
            progress = output.prompt_progress
            found.append((progress.num_computed_tokens, progress.num_cached_tokens, progress.num_prompt_tokens))
    assert found == [(4, 2, 10), (8, 2, 10), (9, 2, 10)]
    feed(outputs, 10, 7, cached=0)
    output = request.take_output()
    assert output is not None and output.outputs[0].token_ids == [7] and output.num_cached_tokens == 2
    assert output.prompt_progress is not None and output.prompt_progress.num_computed_tokens == 10
    feed(outputs, None, 7)
    output = request.take_output()
    assert output is not None and output.prompt_progress is None


def test_a_slow_reader_sees_how_far_it_is_now():
    outputs, request = front(output_kind="delta")
    begin = 1.0  # seconds since 1970
    for computed in (4, 8):
        feed(outputs, computed, first_scheduled_time=begin)
    output = request.take_output()
    assert output is not None and output.prompt_progress is not None
    assert output.prompt_progress.num_computed_tokens == 8 and output.prompt_progress.seconds > 0
    assert request.take_output() is None


def test_no_other_kind_of_output_loses_anything():
    outputs, request = front(output_kind="final_only", max_tokens=1)
    feed(outputs, 4)
    assert request.take_output() is None
    feed(outputs, 10, 7, finish_reason=FinishReason.LENGTH)
    output = request.take_output()
    assert output is not None and output.finished and output.outputs[0].token_ids == [7]


def test_only_the_first_of_several_samples_computes_the_prompt():
    inputs = InputProcessor(
        small_tokenizer(),
        EngineInfo(64, 13, 4, 64, "float32", "none", 1, "no memory", 8),
        eos_token_ids=[END],
        max_logprobs=-1,
    )
    samples = inputs.process("r", PROMPT, SamplingParams(n=3), reports_progress=True).samples
    assert [sample.reports_progress for sample in samples] == [True, False, False]


async def test_across_a_crash_it_goes_on(monkeypatch):
    monkeypatch.setattr("octavo.async_llm.load_front_end", lambda config: small_front_end())
    prompt = [1 + i % 9 for i in range(2000)]  # so many that the engine is not done before it is killed
    source = make_request("r", prompt, max_tokens=6, seed=5, ignore_eos=True)
    options = {"max_num_batched_tokens": 2, "max_model_len": 2048, "enable_prefix_caching": False, "num_blocks": 640}
    client = SupervisedClient(
        EngineConfig(model=json.dumps(options)), make_client=lambda config: ProcessClient(config, command=COMMAND)
    )
    llm = await AsyncLLM.start(EngineConfig(model="fake"), client)
    try:
        params = SamplingParams(max_tokens=6, seed=5, ignore_eos=True, output_kind="delta")
        progress: list[PromptProgress] = []
        token_ids: list[int] = []
        async for output in llm.generate(prompt, params, report_progress=True):
            if output.prompt_progress is not None:
                if not progress:
                    os.kill(pid_of(client._engine), signal.SIGKILL)
                assert not token_ids
                progress.append(output.prompt_progress)
            token_ids += [token_id for sample in output.outputs for token_id in sample.token_ids]
        computed = [each.num_computed_tokens for each in progress]
        assert computed == sorted(set(computed)) and computed[-1] == len(prompt) and len(computed) > 1
        assert all((each.num_prompt_tokens, each.num_cached_tokens) == (len(prompt), 0) for each in progress)
        assert token_ids == expected_answer(source, 2048).token_ids
        assert llm.stats.num_restarts == 1
    finally:
        await llm.close()
