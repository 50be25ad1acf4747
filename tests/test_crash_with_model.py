"""A real engine that is killed or stopped under its streams: they say what they say with an undisturbed one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo import LLM, AsyncLLM, EngineConfig, PoolingParams, SamplingParams
from octavo.engine.supervisor import SupervisedClient
from octavo.request import BeamSearchParams, RequestOutput
from support.checkpoints import tiny_llama, tiny_tokenizer
from support.served import ServerProcess

CONTEXT = 512
OPTIONS: dict[str, Any] = {"max_model_len": CONTEXT, "num_gpu_blocks_override": 400, "max_num_batched_tokens": 128}
PROMPTS = ["The quick brown fox", "1 2 3", "日本語", "Once upon a time there was a small engine " * 4]
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"seed": 1, "temperature": 1.5, "top_p": 0.9, "logprobs": 0},
    {"seed": 2, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"seed": 3, "n": 2, "min_p": 0.01},
    {"seed": 4, "bad_words": ["fox", "the"], "logit_bias": {40: 2.0}, "stop": ["zq"]},
)
Call = tuple[str, SamplingParams]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("crash"), vocab=len(tiny_tokenizer()))


@pytest.fixture(scope="module")
def undisturbed(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), **OPTIONS) as llm:
        yield llm


def calls(num: int, num_tokens: int) -> list[Call]:
    return [
        (
            f"{i} {PROMPTS[i % len(PROMPTS)]}",
            SamplingParams(max_tokens=num_tokens - i, ignore_eos=True, **KINDS[i % len(KINDS)]),
        )
        for i in range(num)
    ]


def said(output: RequestOutput) -> list[Any]:
    return [
        (sample.text, list(sample.token_ids), sample.logprobs, sample.cumulative_logprob, sample.finish_reason)
        for sample in output.outputs
    ]


class Streams:
    """Calls of an AsyncLLM, all at once, and how many tokens they have said together."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.num_tokens = 0

    async def run(self, calls: list[Call]) -> list[RequestOutput]:
        return await asyncio.gather(*(self._follow(*call) for call in calls))

    async def _follow(self, prompt: str, params: SamplingParams) -> RequestOutput:
        num_tokens = 0
        async for output in self.llm.generate(prompt, params):
            self.num_tokens -= num_tokens
            num_tokens = sum(len(sample.token_ids) for sample in output.outputs)
            self.num_tokens += num_tokens
        return output

    async def strike(self, number: signal.Signals, times: int, apart: int, moments: random.Random) -> None:
        """The signal to one engine after the other, each after `apart` tokens of its own or somewhat more.

        What an engine said before it died still arrives afterwards, so tokens alone do not show that another is there.
        """
        struck = None
        for _ in range(times):
            while (pid := engine_pid(self.llm)) in (None, struck):
                await asyncio.sleep(0.001)
            wanted = self.num_tokens + apart + moments.randrange(apart)
            while self.num_tokens < wanted:
                await asyncio.sleep(0.001)
            os.kill(pid, number)
            struck = pid


def engine_pid(llm: AsyncLLM) -> int | None:
    """The process that computes; None while there is none."""
    client = llm._client
    assert isinstance(client, SupervisedClient)
    return None if client._engine._process is None else client._engine._process.pid


async def check(
    tiny: Path, undisturbed: LLM, *, num: int, num_tokens: int, number: signal.Signals, times: int, seed: int
) -> None:
    work = calls(num, num_tokens)
    apart = num * num_tokens // (2 * times + 2)
    async with asyncio.timeout(300):
        llm = await AsyncLLM.start(EngineConfig(model=str(tiny), engine_timeout=2.0, **OPTIONS))
        try:
            streams = Streams(llm)
            outputs, _ = await asyncio.gather(
                streams.run(work), streams.strike(number, times, apart, random.Random(seed))
            )
            assert llm.stats.num_restarts >= times and llm.alive and llm.num_unfinished == 0
        finally:
            await llm.close()
    expected = undisturbed.generate([prompt for prompt, _ in work], [params for _, params in work], use_tqdm=False)
    for output, alone in zip(outputs, expected, strict=True):
        assert said(output) == said(alone)


@pytest.mark.parametrize(("number", "times"), [(signal.SIGKILL, 3), (signal.SIGSTOP, 1)])
async def test_eight_streams(tiny, undisturbed, number, times):
    await check(tiny, undisturbed, num=8, num_tokens=300, number=number, times=times, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "times", "seed"), [*((signal.SIGKILL, 10, seed) for seed in range(5)), (signal.SIGSTOP, 5, 9)]
)
async def test_thirty_two_streams(tiny, undisturbed, number, times, seed):
    await check(tiny, undisturbed, num=32, num_tokens=400, number=number, times=times, seed=seed)


async def test_a_beam_search_and_the_probe(tiny, undisturbed):
    beams = BeamSearchParams(beam_width=3, max_tokens=200, ignore_eos=True)
    (expected,) = undisturbed.beam_search([PROMPTS[0]], beams)
    llm = await AsyncLLM.start(EngineConfig(model=str(tiny), **OPTIONS))
    try:
        search = llm.beam_search(PROMPTS[0], beams)
        searching = asyncio.create_task(anext(search))
        while not llm.stats.num_running:
            await asyncio.sleep(0.001)
        pid = engine_pid(llm)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while not llm._client.restarting:
            await asyncio.sleep(0.001)
        assert llm.alive and not await llm.is_ready()
        output = await searching
        await search.aclose()
        assert await llm.is_ready()
        found = [(output.prompt_token_ids + list(sample.token_ids), sample.score) for sample in output.outputs]
        assert found == [(beam.tokens, beam.score) for beam in expected.sequences] and len(found) == 3
        assert b'vllm:engine_restarts_total{engine="0"' in llm.metrics.render()
    finally:
        await llm.close()


async def test_embeddings(tiny, undisturbed):
    """Of prompts of several steps each, with streams beside them; those cut off begin again."""
    prompts = [f"{i} " + "Once upon a time there was a small engine. " * (10 * (i % 3)) for i in range(9)]
    params = [PoolingParams(pooling_type="mean" if i % 2 else "last") for i in range(9)]
    expected = undisturbed.embed(prompts, pooling_params=params, use_tqdm=False)
    work = calls(4, 300)
    llm = await AsyncLLM.start(EngineConfig(model=str(tiny), **OPTIONS))

    async def embed(index: int) -> list[float]:
        (output,) = [output async for output in llm.encode(prompts[index], params[index])]
        return output.outputs.embedding

    try:
        streams = Streams(llm)
        *found, _, _ = await asyncio.gather(
            *(embed(index) for index in range(9)),
            streams.run(work),
            streams.strike(signal.SIGKILL, 2, 4, random.Random(2)),
        )
        assert found == [output.outputs.embedding for output in expected]
        assert llm.stats.num_restarts == 2
    finally:
        await llm.close()


def test_over_http(tiny):
    """A stream goes on when its engine is killed; three deaths of an idle engine are the server's end."""
    server = ServerProcess(str(tiny), "--max-model-len", str(CONTEXT), "--num-gpu-blocks-override", "400")
    try:
        server.wait_until_ready()
        body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 450, "seed": 5, "ignore_eos": True}
        expected = server.complete(**body)["choices"][0]["text"]
        engine = server.children()[0]
        text = ""
        with server.stream(**body) as response:
            for number, line in enumerate(line for line in response.iter_lines() if line.startswith("data: {")):
                text += httpx.Response(200, content=line.removeprefix("data: ")).json()["choices"][0]["text"]
                if number == 0:  # later it may have said everything already: a client is slower than this model
                    os.kill(engine, signal.SIGKILL)
        assert text == expected
        assert server.metric("engine_restarts_total") == 1
        assert httpx.get(f"{server.url}/health").status_code == httpx.get(f"{server.url}/ready").status_code == 200
        for times in (2, 3):
            os.kill(server.children()[0], signal.SIGKILL)
            while server.metric("engine_restarts_total") != times:
                time.sleep(0.01)
        children = server.children()
        os.kill(children[0], signal.SIGKILL)
        while (answer := httpx.get(f"{server.url}/health")).status_code == 200:
            time.sleep(0.01)
        assert answer.status_code == 503
        assert server.end() == 1
        assert "the engine is given up: it died 3 times" in server.log and "Traceback" not in server.log
        assert not any(Path(f"/proc/{child}").exists() for child in children)
    finally:
        server.close()
