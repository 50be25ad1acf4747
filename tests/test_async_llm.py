"""AsyncLLM around the fake engine: streams, aborts, failures, deaths."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.async_llm import AsyncLLM
from octavo.config import EngineConfig
from octavo.engine.client import ProcessClient
from octavo.engine.messages import TokenDelta
from octavo.engine.supervisor import SupervisedClient
from octavo.errors import CheckpointError, EngineDeadError, InvalidRequestError, RequestFailedError
from octavo.request import RequestOutput, SamplingParams
from support.engine_processes import COMMAND, is_running, pid_of
from support.fake_runner import FakeRunner, expected_answer, make_engine, make_request
from support.faults import EVERY_TIME, Fault, write_faults
from support.front import END, LocalClient, small_front_end, small_tokenizer


@pytest.fixture(autouse=True)
def front_end(monkeypatch):
    monkeypatch.setattr("octavo.async_llm.load_front_end", lambda config: small_front_end({"top_k": 7}))


@asynccontextmanager
async def local(**options: Any) -> AsyncIterator[tuple[AsyncLLM, LocalClient]]:
    client = LocalClient(make_engine(**options))
    llm = await AsyncLLM.start(EngineConfig(model="fake"), client)
    try:
        yield llm, client
    finally:
        await llm.close()


async def collect(llm: AsyncLLM, prompt: Any = (1, 2, 3), id: str | None = None, **params: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, SamplingParams(**params), id)]


def counted(llm: AsyncLLM, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(llm.metrics.render().decode()):
        for sample in family.samples:
            if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(name)


async def test_what_a_caller_finds():
    async with local() as (llm, client):
        assert llm.config.model == "fake"
        assert llm.info.max_model_len == 256
        assert llm.tokenizer.vocab_size == 13
        assert llm.chat_template is None
        assert llm.model_config == {"model_type": "fake"}
        assert llm.default_sampling_params == {"top_k": 7}
        assert llm.default_sampling_origin == "the model's generation_config.json"
        assert llm.alive and llm.num_unfinished == 0
        assert llm.stats is client.stats
    assert not llm.alive


async def test_the_three_kinds_of_output_agree():
    source = make_request("x", [1, 2, 3], max_tokens=12, seed=4, eos_token_ids=[END])
    expected = expected_answer(source, 256)
    text = small_tokenizer().decode(expected.token_ids)
    async with local() as (llm, _):
        cumulative = await collect(llm, max_tokens=12, seed=4)
        deltas = await collect(llm, max_tokens=12, seed=4, output_kind="delta")
        final = await collect(llm, max_tokens=12, seed=4, output_kind="final_only")
    assert len(cumulative) == len(deltas) == len(expected.token_ids) and len(final) == 1
    assert [token for output in deltas for token in output.outputs[0].token_ids] == expected.token_ids
    assert "".join(output.outputs[0].text for output in deltas) == text
    for outputs in (cumulative, final):
        assert outputs[-1].outputs[0].token_ids == expected.token_ids
        assert outputs[-1].outputs[0].text == text
    for outputs in (cumulative, deltas, final):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == expected.finish_reason


async def test_many_at_once_get_what_they_get_alone():
    async with local(max_num_seqs=3) as (llm, _):
        alone = [(await collect(llm, [i], max_tokens=9, seed=i, ignore_eos=True))[-1].outputs for i in range(6)]
        together = await asyncio.gather(*(collect(llm, [i], max_tokens=9, seed=i, ignore_eos=True) for i in range(6)))
        assert [outputs[-1].outputs for outputs in together] == alone
        assert llm.num_unfinished == 0


async def test_n():
    async with local(max_num_seqs=2) as (llm, _):
        four = (await collect(llm, n=4, seed=1, max_tokens=5, output_kind="final_only"))[-1]
        two = (await collect(llm, n=2, seed=1, max_tokens=5, output_kind="final_only"))[-1]
    assert [output.index for output in four.outputs] == [0, 1, 2, 3]
    assert four.outputs[:2] == two.outputs
    assert len({tuple(output.token_ids) for output in four.outputs}) == 4


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"n": 2, "logprobs": 0}, {"stop": ["dcb"], "logprobs": 1}])
async def test_a_reader_that_stops_holds_nothing_and_misses_nothing(fields, monkeypatch):
    monkeypatch.setattr("octavo.engine.slow_readers.MAX_UNREAD", 40)
    params = {"max_tokens": 200, "seed": 1, "output_kind": "delta", "ignore_eos": True, **fields}
    async with local(max_num_seqs=8) as (llm, client):
        expected = said(await collect(llm, [1], **params))
        outputs = llm.generate([1], SamplingParams(**params))
        found = [await anext(outputs)]
        for _ in range(2):
            while llm.stats.num_running or client.engine.has_unfinished or not client.aborted:
                await asyncio.sleep(0)
            client.aborted.clear()
            assert llm.num_unfinished == 0 and llm.stats.kv_cache_usage == 0.0
            unread = llm._streams[found[0].request_id].request.samples[0].num_unread
            assert 0 < unread <= 41
            found.append(await anext(outputs))
            assert len(found[-1].outputs[0].token_ids) > 5
        found += [output async for output in outputs]
        assert said(found) == expected
        assert llm.num_unfinished == 0 and not client.engine.has_unfinished


def said(outputs: list[RequestOutput]) -> list[Any]:
    """All that each sample says in deltas, and its end."""
    samples: dict[int, list[Any]] = {}
    for output in outputs:
        for sample in output.outputs:
            words = samples.setdefault(sample.index, ["", [], [], None, None, None])
            words[0] += sample.text
            words[1] += sample.token_ids
            words[2] += sample.logprobs or []
            words[3:] = sample.cumulative_logprob, sample.finish_reason, sample.stop_reason
    assert outputs[-1].finished
    return [samples[index] for index in sorted(samples)]


async def test_a_reader_that_stops_and_leaves(monkeypatch):
    monkeypatch.setattr("octavo.engine.slow_readers.MAX_UNREAD", 10)
    async with local() as (llm, client):
        outputs = llm.generate([1], SamplingParams(max_tokens=200, output_kind="delta", ignore_eos=True))
        await anext(outputs)
        while not client.aborted:
            await asyncio.sleep(0)
        await outputs.aclose()
        assert llm.num_unfinished == 0 and not llm._streams
        assert counted(llm, "request_success_total", finished_reason="abort") == 1


async def test_who_reads_all_at_the_end_is_no_slow_reader(monkeypatch):
    monkeypatch.setattr("octavo.engine.slow_readers.MAX_UNREAD", 10)
    async with local() as (llm, client):
        for kind in ("final_only", "cumulative"):
            outputs = llm.generate([1], SamplingParams(max_tokens=60, output_kind=kind, ignore_eos=True))
            output = await anext(outputs)
            while client.engine.has_unfinished:
                await asyncio.sleep(0)
            while not output.finished:
                output = await anext(outputs)
            assert len(output.outputs[0].token_ids) == 60 and not client.aborted
            await outputs.aclose()


async def test_a_slow_reader_misses_nothing():
    async with local() as (llm, _):
        outputs = llm.generate([1], SamplingParams(max_tokens=20, seed=1, output_kind="delta", ignore_eos=True))
        tokens: list[int] = []
        num_outputs = 0
        async for output in outputs:
            tokens += output.outputs[0].token_ids
            num_outputs += 1
            await asyncio.sleep(0.01)
        expected = expected_answer(make_request("x", [1], max_tokens=20, seed=1), 256)
        assert tokens == expected.token_ids
        assert num_outputs < 20


async def test_closing_the_generator_aborts():
    async with local() as (llm, client):
        outputs = llm.generate([1], SamplingParams(max_tokens=200, ignore_eos=True), "mine")
        async with aclosing(outputs):
            await anext(outputs)
            assert llm.num_unfinished == 1
        assert client.aborted == ["mine#0"]
        assert llm.num_unfinished == 0 and not client.engine.has_unfinished
        assert counted(llm, "request_success_total", finished_reason="abort") == 1


async def test_cancelling_a_queued_request_aborts():
    async with local(max_num_seqs=1) as (llm, client):
        running = asyncio.create_task(collect(llm, [1], "a", max_tokens=100, ignore_eos=True))
        queued = asyncio.create_task(collect(llm, [1], "b", n=2, max_tokens=100, ignore_eos=True))
        while client.stats.num_waiting != 2:
            await asyncio.sleep(0)
        queued.cancel()
        await asyncio.wait((queued,))
        assert client.aborted == ["b#1", "b#2"]
        assert (await running)[-1].outputs[0].finish_reason == "length"


async def test_abort_by_id_ends_the_stream():
    async with local() as (llm, client):
        task = asyncio.create_task(collect(llm, [1], "a", max_tokens=200, ignore_eos=True))
        while client.stats.num_running != 1:
            await asyncio.sleep(0)
        await llm.abort("unknown")
        await llm.abort("a")
        last = (await task)[-1]
        assert last.finished and last.outputs[0].finish_reason == "abort"
        assert client.aborted == ["a#0"]


async def test_a_stop_string_ends_the_request_in_the_engine():
    async with local() as (llm, client):
        plain = (await collect(llm, [1], max_tokens=60, seed=3, ignore_eos=True))[-1].outputs[0]
        word = plain.text[20:23]
        stopped = (await collect(llm, [1], "s", max_tokens=60, seed=3, ignore_eos=True, stop=[word]))[-1].outputs[0]
        assert stopped.text == plain.text[: plain.text.index(word)]
        assert stopped.token_ids == plain.token_ids[: len(stopped.token_ids)]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", word)
        assert client.aborted == ["s#1"] and not client.engine.has_unfinished


async def test_an_id_in_use_gets_another():
    async with local() as (llm, _):
        params = SamplingParams(max_tokens=50, ignore_eos=True, seed=1)
        async with (
            aclosing(llm.generate([1], params, "a-0")) as first,
            aclosing(llm.generate([1], params, "a-0")) as second,
        ):
            assert (await anext(first)).request_id == "a-0"
            assert (await anext(second)).request_id.startswith("a-0-")


async def test_old_news_do_not_reach_the_next_request_of_the_same_name():
    async with local() as (llm, client):
        asked = {"seed": 3, "max_tokens": 8, "ignore_eos": True}
        alone = (await collect(llm, [2], "same", **asked))[-1].outputs[0].token_ids
        # As with an engine in another process: it has computed a step more before it learns of an abort.
        late: list[TokenDelta] = []
        abort, receive = client.abort, client.receive

        def abort_late(request_ids: list[str]) -> None:
            late.extend(client.engine.step())
            abort(request_ids)

        async def receive_late() -> list[TokenDelta]:
            deltas = await receive()
            news = [*late, *deltas]
            late.clear()
            return news

        client.abort, client.receive = abort_late, receive_late  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)
        async with aclosing(llm.generate([1], params, "same")) as outputs:
            await anext(outputs)
        assert (await collect(llm, [2], "same", **asked))[-1].outputs[0].token_ids == alone


async def test_wrong_requests_raise_at_once():
    async with local() as (llm, _):
        with pytest.raises(InvalidRequestError, match="token id 13"):
            await collect(llm, [13])
        assert llm.num_unfinished == 0


async def test_a_failing_row_fails_alone():
    async with local() as (llm, client):
        assert isinstance(client.engine.runner, FakeRunner)
        client.engine.runner.failing.add("bad#1")
        bad = asyncio.create_task(collect(llm, [1], "bad", n=2, max_tokens=50, ignore_eos=True))
        good = asyncio.create_task(collect(llm, [1], "good", max_tokens=50, ignore_eos=True))
        with pytest.raises(RequestFailedError, match="no token is allowed"):
            await bad
        assert len((await good)[-1].outputs[0].token_ids) == 50
        assert client.aborted == ["bad#0"]
        assert counted(llm, "request_success_total", finished_reason="error") == 1


async def test_the_engines_death_ends_every_stream():
    async with local() as (llm, client):
        tasks = [asyncio.create_task(collect(llm, [1], max_tokens=200, ignore_eos=True)) for _ in range(3)]
        while client.stats.num_running != 3:
            await asyncio.sleep(0)
        client.die()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
        assert not llm.alive and llm.num_unfinished == 0
        assert not await llm.is_ready()
        with pytest.raises(EngineDeadError):
            await collect(llm)


async def test_a_fault_of_the_reader_leaves_nobody_waiting(monkeypatch, caplog):
    async with local() as (llm, _):
        monkeypatch.setattr(llm._outputs, "process", lambda deltas: 1 / 0)
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            await collect(llm)
        assert not llm.alive


async def test_ready():
    async with local() as (llm, client):
        assert await llm.is_ready()
        num_steps = client.stats.num_steps
        assert num_steps == 1  # a token was made
        assert await llm.is_ready()
        assert client.stats.num_steps == num_steps  # a young token is proof enough
        llm._last_token_time = 0.0
        assert isinstance(client.engine.runner, FakeRunner)
        client.engine.runner.failing.add("ready#1")
        assert not await llm.is_ready()
        client.engine.step = lambda: []  # type: ignore[method-assign]
        assert not await llm.is_ready(timeout=0.05)
        assert llm.num_unfinished == 0


async def test_a_reset_of_the_prefix_cache_while_a_request_runs():
    async with local() as (llm, client):
        expected = expected_answer(make_request("x", [1, 2, 3, 4, 5], max_tokens=9, seed=1), 256).token_ids
        running = asyncio.create_task(collect(llm, [1, 2, 3, 4, 5], max_tokens=9, seed=1, ignore_eos=True))
        while client.stats.num_running != 1:
            await asyncio.sleep(0)
        assert await llm.reset_prefix_cache() is True
        outputs = await collect(llm, [1, 2, 3, 4, 5], max_tokens=9, seed=1, ignore_eos=True)
        assert (outputs[-1].outputs[0].token_ids, outputs[-1].num_cached_tokens) == (expected, 0)
        assert (await running)[-1].outputs[0].token_ids == expected
        again = await collect(llm, [1, 2, 3, 4, 5], max_tokens=9, seed=1, ignore_eos=True)
        assert (again[-1].outputs[0].token_ids, again[-1].num_cached_tokens) == (expected, 4)
        client.die()
        while llm.alive:
            await asyncio.sleep(0)
        with pytest.raises(EngineDeadError):
            await llm.reset_prefix_cache()


async def test_the_user_goes_along():
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    async with local(policy="fair") as (llm, client):
        for options, user in (({"user": "u"}, "u"), ({}, None)):
            async with aclosing(llm.generate([1], params, **options)) as outputs:
                await anext(outputs)
                (request,) = client.engine.scheduler.running
                assert request.source.user == user


async def test_close_ends_what_runs():
    async with local() as (llm, client):
        task = asyncio.create_task(collect(llm, [1], max_tokens=200, ignore_eos=True))
        while client.stats.num_running != 1:
            await asyncio.sleep(0)
        await llm.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await task


def process_client(**options: Any) -> ProcessClient:
    return ProcessClient(EngineConfig(model=json.dumps(options)), command=COMMAND)


async def test_with_a_process_of_its_own():
    client = process_client()
    llm = await AsyncLLM.start(EngineConfig(), client)
    try:
        assert await llm.is_ready()
        outputs = await collect(llm, "Hello", max_tokens=4, seed=1, ignore_eos=True)
        expected = expected_answer(make_request("x", [7, 8], max_tokens=4, seed=1), 256)
        assert outputs[-1].outputs[0].token_ids == expected.token_ids
        task = asyncio.create_task(collect(llm, max_tokens=250, ignore_eos=True))
        while not llm.num_unfinished:
            await asyncio.sleep(0)
        os.kill(pid_of(client), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(task, 5)
    finally:
        await llm.close()


async def test_a_request_that_kills_its_engine_fails_and_the_others_go_on(tmp_path):
    faults = write_faults(tmp_path / "faults.json", [Fault("bad#0", 5, times=EVERY_TIME)])
    client = SupervisedClient(
        EngineConfig(model=json.dumps({"faults": str(faults)})),
        make_client=lambda config: ProcessClient(config, command=COMMAND),
    )
    llm = await AsyncLLM.start(EngineConfig(), client)
    try:
        bad = asyncio.create_task(collect(llm, [1], "bad", max_tokens=20, ignore_eos=True))
        good = asyncio.create_task(collect(llm, [1, 2], max_tokens=40, seed=1, ignore_eos=True))
        with pytest.raises(RequestFailedError, match="the engine died 2 times in a row while it computed this request"):
            await asyncio.wait_for(bad, 20)
        expected = expected_answer(make_request("x", [1, 2], max_tokens=40, seed=1), 256)
        assert (await asyncio.wait_for(good, 20))[-1].outputs[0].token_ids == expected.token_ids
        while client.restarting:
            await asyncio.sleep(0.01)
        assert counted(llm, "engine_restarts_total") == llm.stats.num_restarts >= 2
        dead = asyncio.create_task(llm.wait_until_dead())
        for _ in range(3):
            while client.restarting:
                await asyncio.sleep(0.01)
            os.kill(pid_of(client._engine), signal.SIGKILL)
            while llm.alive and not client.restarting:
                await asyncio.sleep(0.001)
        assert "given up" in (await asyncio.wait_for(dead, 5)).message
        with pytest.raises(EngineDeadError, match="given up"):
            await collect(llm)
    finally:
        await llm.close()


async def test_a_start_that_fails_leaves_no_process(monkeypatch):
    with pytest.raises(CheckpointError, match="no such model"):
        await AsyncLLM.start(EngineConfig(), process_client(error="no such model"))

    def fail(config: EngineConfig) -> None:
        raise CheckpointError("no tokenizer")

    monkeypatch.setattr("octavo.async_llm.load_front_end", fail)
    client = process_client()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        await AsyncLLM.start(EngineConfig(), client)
    assert not client.alive


async def test_nothing_is_left_after_a_whole_life():
    client = process_client()
    llm = await AsyncLLM.start(EngineConfig(), client)
    pid = pid_of(client)
    await llm.close()
    await llm.close()
    assert not is_running(pid)
    assert len(asyncio.all_tasks()) == 1
