"""An engine whose process dies or hangs: every request goes on, with the tokens that it would have had."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.core.beams import num_candidates
from octavo.engine.client import ProcessClient
from octavo.engine.supervisor import SupervisedClient
from octavo.errors import CheckpointError, EngineDeadError
from octavo.request import BeamSearchParams, EngineRequest, FinishReason
from support.engine_processes import COMMAND, is_running, pid_of, stop
from support.fake_runner import Answer, expected_answer, make_engine, make_request, run_to_end
from support.faults import EVERY_TIME, Fault, write_faults

SECONDS = 20  # the longest that anything here may take


def make_supervised(*, engine_timeout: float = 0.0, **options: Any) -> SupervisedClient:
    return SupervisedClient(
        EngineConfig(model=json.dumps(options), engine_timeout=engine_timeout),
        make_client=lambda config: ProcessClient(config, command=COMMAND),
    )


class Driver:
    """A client, and what it has said: answers and errors by request id."""

    def __init__(self, client: SupervisedClient) -> None:
        self.client = client
        self.answers: dict[str, Answer] = {}
        self.errors: dict[str, str] = {}

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.answers[request.request_id] = Answer()
            self.client.add_request(request)

    async def run(self, until: Callable[[], bool] | None = None) -> None:
        """Until that holds, or until all requests have ended."""
        done = until or (lambda: all(answer.finish_reason is not None for answer in self.answers.values()))
        async with asyncio.timeout(SECONDS):
            while not done():
                for delta in await self.client.receive():
                    if delta.request_id in self.answers:
                        self.answers[delta.request_id].take(delta)
                        if delta.error is not None:
                            self.errors[delta.request_id] = delta.error

    async def run_until_restarted(self, times: int = 1) -> None:
        await self.run(lambda: self.client.stats.num_restarts == times)

    def kill(self) -> None:
        os.kill(pid_of(self.client._engine), signal.SIGKILL)

    def check(self, *requests: EngineRequest) -> None:
        for request in requests:
            assert self.answers[request.request_id] == expected_answer(request, 256), request.request_id


@asynccontextmanager
async def driven(
    *, faults: list[Fault] | None = None, tmp_path: Path | None = None, **options: Any
) -> AsyncIterator[Driver]:
    if faults is not None:
        assert tmp_path is not None
        options["faults"] = str(write_faults(tmp_path / "faults.json", faults))
    client = make_supervised(**options)
    await client.start()
    try:
        yield Driver(client)
    finally:
        engine = client._engine
        pid = pid_of(engine) if engine.alive else None
        await client.close()
        assert not client.alive
        assert pid is None or not is_running(pid)


def request(name: str, num_tokens: int = 12, **fields: Any) -> EngineRequest:
    defaults: dict[str, Any] = {"seed": len(name), "logprobs": 0, "prompt_logprobs": 0, "ignore_eos": True}
    return make_request(name, [1 + len(name), 2, 3, 4, 5], max_tokens=num_tokens, **(defaults | fields))


def fork(first: EngineRequest, index: int, num_tokens: int = 12) -> EngineRequest:
    name = first.request_id
    return request(f"{name[:-1]}{index}", num_tokens, seed=5, sample_index=index, fork_of=name, prompt_logprobs=None)


@pytest.mark.parametrize("kind", ["die", "hang"])
async def test_at_every_token_of_a_request(tmp_path, kind):
    sources = [request(f"a{at}", 4, seed=at) for at in range(4)]
    faults = [Fault(source.request_id, at, kind) for at, source in enumerate(sources)]
    async with driven(faults=faults, tmp_path=tmp_path, engine_timeout=0.5 if kind == "hang" else 0.0) as driver:
        for source in sources:
            driver.add(source)
            await driver.run()
        driver.check(*sources)
        stats = driver.client.stats
        assert (stats.num_restarts, stats.num_running, stats.num_waiting) == (4, 0, 0)


async def test_just_after_the_last_token(tmp_path):
    first, second = request("a"), request("bb")
    async with driven() as driver:
        driver.add(first)
        await driver.run()
        driver.kill()
        await driver.run_until_restarted()
        driver.add(second)
        await driver.run()
        driver.check(first, second)


@pytest.mark.parametrize("seats", [8, 2])
async def test_requests_at_different_places(tmp_path, seats):
    """One in the middle of its prompt, some decoding, some waiting, one about to end by its end token."""
    early = [request("a", 40), request("bb", 30, stop_token_ids=[3], min_tokens=12, ignore_eos=False)]
    late = [request("ccc", 9, seed=7), make_request("dddd", [5] * 40, max_tokens=9, seed=3, prompt_logprobs=0)]
    faults = [Fault("a", 20), Fault("dddd", 4)]
    async with driven(faults=faults, tmp_path=tmp_path, max_num_seqs=seats, max_num_batched_tokens=16) as driver:
        driver.add(*early)
        await driver.run(lambda: len(driver.answers["a"].token_ids) > 5)
        driver.add(*late)
        await driver.run()
        driver.check(*early, *late)
        assert driver.client.stats.num_restarts == 2


async def test_all_of_a_prompts_samples(tmp_path):
    faults = [Fault("a1", 0), Fault("b1", 1), Fault("c1", 4)]
    async with driven(faults=faults, tmp_path=tmp_path) as driver:
        for name in "abc":
            samples = [request(f"{name}0", seed=5)]
            samples += [fork(samples[0], index) for index in (1, 2)]
            driver.add(*samples)
            await driver.run()
            driver.check(*samples)


async def test_samples_whose_first_is_gone(tmp_path):
    """The others wait for nobody."""
    first = request("a0", 3, seed=5)
    other = fork(first, 1, 9)
    async with driven(faults=[Fault("a1", 5)], tmp_path=tmp_path) as driver:
        driver.add(first, other)
        await driver.run()
        driver.check(first, other)


async def test_a_beam_search_begins_again(tmp_path):
    beams = BeamSearchParams(beam_width=3, max_tokens=8)
    source = make_request("beams", [1, 2, 3], beams=beams, max_tokens=8, logprobs=num_candidates(3, 0), temperature=0.0)
    engine = make_engine()
    engine.add_request(source)
    expected = run_to_end(engine)["beams"].hypotheses
    async with driven(faults=[Fault("beams", 4)], tmp_path=tmp_path) as driver:
        other = request("a", 30)
        driver.add(source, other)
        await driver.run()
        assert driver.answers["beams"].hypotheses == expected
        driver.check(other)
        assert driver.client.stats.num_restarts == 1


async def test_what_comes_and_goes_while_there_is_no_engine(tmp_path):
    running, gone, late, cancelled = request("a", 60), request("bb", 60), request("ccc"), request("dddd")
    async with driven(faults=[Fault("a", 20)], tmp_path=tmp_path) as driver:
        client = driver.client
        driver.add(running, gone)
        await driver.run(lambda: client.restarting)
        assert client.alive and (client.stats.num_running, client.stats.num_waiting) == (0, 2)
        client.reset_prefix_cache()
        driver.add(late, cancelled)
        num_tokens = len(driver.answers["bb"].token_ids)
        client.abort(["bb", "dddd"])
        await driver.run(lambda: driver.answers["a"].finish_reason is driver.answers["ccc"].finish_reason is not None)
        driver.check(running, late)
        assert len(driver.answers["bb"].token_ids) == num_tokens and not driver.answers["dddd"].token_ids
        assert client.stats.num_restarts == 1


async def test_what_comes_before_the_death_is_noticed():
    async with driven() as driver:
        driver.kill()
        while driver.client._engine.alive:
            await asyncio.sleep(0.001)
        source = request("a")
        driver.add(source)
        driver.client.reset_prefix_cache()
        await driver.run()
        driver.check(source)


async def test_a_request_in_the_middle_of_a_restart(tmp_path):
    """The second engine dies before it is ready, and the third hangs."""
    source = request("a", 30)
    faults = [Fault("a", 10), Fault("start", kind="none"), Fault("start"), Fault("start", kind="hang")]
    async with driven(faults=faults, tmp_path=tmp_path, engine_timeout=0.5) as driver:
        driver.client._start_seconds = 0.2  # ten times that, and the timeout: the patience with a start
        driver.add(source)
        await driver.run()
        driver.check(source)
        assert driver.client.stats.num_restarts == 1


async def test_counters_go_on(tmp_path):
    sources = [request(name, 20) for name in ("a", "bb")]
    async with driven(faults=[Fault("a", 10)], tmp_path=tmp_path) as driver:
        driver.add(*sources)
        seen = []
        await driver.run(lambda: seen.append(driver.client.stats) or driver.answers["bb"].finish_reason is not None)
    for counter in ("num_steps", "prefix_cache_queries", "num_preemptions", "num_restarts"):
        values = [getattr(stats, counter) for stats in seen]
        assert values == sorted(values)
    assert 20 <= seen[-1].num_steps <= 40 and seen[-1].num_restarts == 1  # together, or one after the other


async def test_an_engine_that_works_is_not_hurried(tmp_path):
    """It waits for work for longer than its time, and its client is away for longer."""
    async with driven(engine_timeout=1.0) as driver:
        receiving = asyncio.create_task(driver.run(lambda: "a" in driver.answers))
        await asyncio.sleep(1.5)
        driver.add(request("a", 200))
        await receiving
        await driver.run()
        time.sleep(1.5)  # this process stands still, not the engine
        driver.add(request("bb", 100))
        await driver.run()
        assert driver.client.stats.num_restarts == 0


async def test_an_idle_engine_is_left_alone_until_somebody_wants_it(monkeypatch):
    """So an idle server takes no time at all. One that hangs is noticed when somebody asks how it is."""
    async with driven(engine_timeout=1.0) as driver:
        client = driver.client
        receiving = asyncio.create_task(driver.run(lambda: bool(driver.answers)))
        await until_left_alone(client, monkeypatch)
        stop(client._engine)
        client.look_after()
        while not client.stats.num_restarts:
            await asyncio.sleep(0.01)
        source = request("a")
        driver.add(source)
        await receiving
        await driver.run()
        driver.check(source)


async def test_an_engine_that_hung_while_nobody_looked_is_noticed_by_the_next_request(monkeypatch):
    async with driven(engine_timeout=1.0) as driver:
        await until_left_alone(driver.client, monkeypatch)
        stop(driver.client._engine)
        source = request("a")
        driver.add(source)
        await driver.run()
        driver.check(source)
        assert driver.client.stats.num_restarts == 1


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.2, 0.3])
async def test_who_asks_at_any_moment_is_heard(delay):
    """Also between a beat and its answer, or just before the engine would be left alone."""
    async with driven(engine_timeout=1.0) as driver:
        receiving = asyncio.create_task(driver.run(lambda: bool(driver.answers)))
        await asyncio.sleep(delay)
        stop(driver.client._engine)
        driver.client.look_after()
        while not driver.client.stats.num_restarts:
            await asyncio.sleep(0.01)
        driver.add(request("a"))
        await receiving


async def until_left_alone(client: SupervisedClient, monkeypatch) -> None:
    """Until four beats' time has passed without one."""
    beats = count_calls(monkeypatch, client._engine, "ask_for_beat")
    num_beats = -1
    while len(beats) != num_beats:
        num_beats = len(beats)
        await asyncio.sleep(1.0)


def count_calls(monkeypatch, owner, name):
    calls, call = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda: calls.append(name) or call())
    return calls


@pytest.mark.parametrize(
    ("kind", "why"),
    [("stall", "has computed nothing for 0.4 s"), ("circle", r"has computed \d+ tokens, and given none")],
)
async def test_an_engine_that_answers_but_does_not_get_on(tmp_path, caplog, kind, why):
    sources = [request("a", 30), request("bb", 30), make_request("ccc", [3] * 40, max_tokens=9, seed=3)]
    faults = [Fault("a", 12, kind)]
    async with driven(faults=faults, tmp_path=tmp_path, engine_timeout=0.4) as driver:
        driver.add(*sources)
        await driver.run()
        driver.check(*sources)
        assert driver.client.stats.num_restarts == 1
    assert re.search(f"{why}: it is killed", caplog.text)


async def test_the_next_engine_stands_by():
    async with driven(engine_timeout=1.0) as driver:
        client = driver.client
        for times in (1, 2):
            pid = await standby_of(client)
            driver.kill()
            await driver.run_until_restarted(times)
            assert pid_of(client._engine) == pid
            source = request("a" * times)
            driver.add(source)
            await driver.run()
            driver.check(source)
        pid = await standby_of(client)
    assert not is_running(pid)


async def test_a_standby_that_dies_is_replaced():
    async with driven(engine_timeout=1.0) as driver:
        client = driver.client
        pid = await standby_of(client)
        os.kill(pid, signal.SIGKILL)
        while await standby_of(client) == pid:
            client.look_after()
            await asyncio.sleep(0.001)
        os.kill(await standby_of(client), signal.SIGKILL)
        driver.kill()  # both at once
        await driver.run_until_restarted()
        source = request("a")
        driver.add(source)
        await driver.run()
        driver.check(source)
        assert client.stats.num_restarts == 1 and len(client._failures) == 1


async def standby_of(client: SupervisedClient) -> int:
    while client._standby is None or not client._standby.is_standby:
        await asyncio.sleep(0.001)
    return pid_of(client._standby)


@pytest.mark.parametrize("decoding", [False, True])
async def test_a_request_that_kills_the_engine_fails_alone(tmp_path, decoding):
    sources = [request("x" * i, 40) for i in (1, 2, 4, 5)]
    killer = request("xxx", 40)
    faults = [Fault("xxx", None if decoding else 6, times=EVERY_TIME, decoding=decoding)]
    async with driven(faults=faults, tmp_path=tmp_path) as driver:
        driver.add(*sources[:2], killer, *sources[2:])
        await driver.run()
        driver.check(*sources)
        assert "died 2 times in a row while it computed this request" in driver.errors["xxx"]
        assert driver.answers["xxx"].finish_reason is FinishReason.ERROR
        if not decoding:
            assert driver.answers["xxx"].token_ids == expected_answer(killer, 256).token_ids[:6]
        assert list(driver.errors) == ["xxx"] and driver.client.stats.num_restarts <= 4
        again = request("xxxxxx")
        driver.add(again)
        await driver.run()
        driver.check(again)


async def test_a_killer_without_company_has_two_tries(tmp_path):
    faults = [Fault("a", 6, times=EVERY_TIME)]
    async with driven(faults=faults, tmp_path=tmp_path) as driver:
        driver.add(request("a"))
        await driver.run()
        assert "SIGKILL" in driver.errors["a"] and driver.client.stats.num_restarts == 1
        await driver.run_until_restarted(2)


async def test_two_killers(tmp_path):
    sources = [request("x" * i, 30) for i in range(1, 7)]
    faults = [Fault("xx", 3, times=EVERY_TIME), Fault("xxxxx", 0, times=EVERY_TIME)]
    async with driven(faults=faults, tmp_path=tmp_path) as driver:
        driver.add(*sources)
        await driver.run()
        assert sorted(driver.errors) == ["xx", "xxxxx"]
        driver.check(*(source for source in sources if source.request_id not in driver.errors))


async def test_three_deaths_that_no_request_explains():
    async with driven() as driver:
        for times in (1, 2):
            driver.kill()
            await driver.run_until_restarted(times)
        driver.kill()
        with pytest.raises(EngineDeadError, match=r"given up: it died 3 times within 60 s.*SIGKILL"):
            await driver.run_until_restarted(3)
        assert not driver.client.alive and driver.client.stats.num_restarts == 2
        with pytest.raises(EngineDeadError, match="given up"):
            driver.client.add_request(request("a"))
        with pytest.raises(EngineDeadError, match="given up"):
            await driver.client.receive()
        driver.client.abort(["a"])


async def test_an_engine_that_works_in_between_is_not_given_up():
    async with driven() as driver:
        for times in range(1, 5):
            source = request("a" * times)
            driver.add(source)
            await driver.run()
            driver.kill()
            await driver.run_until_restarted(times)
            driver.check(source)


async def test_an_engine_that_cannot_start_again(tmp_path):
    faults = [Fault("start", kind="none"), Fault("start", kind="error"), Fault("a", 5)]
    async with driven(faults=faults, tmp_path=tmp_path) as driver:
        driver.add(request("a"))
        with pytest.raises(EngineDeadError, match="given up: it cannot start again: the file is gone"):
            await driver.run()


async def test_the_first_start_fails_as_it_is():
    client = make_supervised(error="no such model")
    with pytest.raises(CheckpointError, match=r"^no such model$"):
        await client.start()
    assert not client.alive
    client = SupervisedClient(
        EngineConfig(), make_client=lambda config: ProcessClient(config, command=(sys.executable, "-c", "exit(3)"))
    )
    with pytest.raises(EngineDeadError, match="exit code 3"):
        await client.start()
    assert not client.alive


async def test_closed_in_the_middle_of_a_restart(tmp_path):
    async with driven(faults=[Fault("a", 3)], tmp_path=tmp_path) as driver:
        driver.add(request("a"))
        await driver.run(lambda: driver.client.restarting)
        receiving = asyncio.create_task(driver.client.receive())
        while driver.client._engine._process is None:
            await asyncio.sleep(0)
        pid = pid_of(driver.client._engine)
        await driver.client.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await receiving
        assert not is_running(pid)


@pytest.mark.parametrize("restarting", [False, True])
def test_no_process_outlives_the_callers(tmp_path, restarting):
    faults = write_faults(tmp_path / "faults.json", [Fault("a", 3)] if restarting else [])
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from engine.test_supervisor import make_supervised, pid_of, request\n"
        "async def main():\n"
        f"    client = make_supervised(faults={str(faults)!r})\n"
        "    await client.start()\n"
        "    client.add_request(request('a', 8))\n"
        f"    while client.restarting != {restarting}:\n"
        "        await client.receive()\n"
        "    receiving = asyncio.create_task(client.receive())\n"
        "    while client._engine._process is None:\n"
        "        await asyncio.sleep(0)\n"
        "    print(pid_of(client._engine), flush=True)\n"
        "    await receiving\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)
