"""The engine in a process of its own: messages both ways, its end, its death and its parent's."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.client import ProcessClient
from octavo.errors import CheckpointError, EngineDeadError
from octavo.request import FinishReason
from support.engine_processes import is_running, make_client, pid_of, stop
from support.fake_runner import expected_answer, make_request
from support.faults import LONG_STEP_SECONDS, Fault, write_faults


@asynccontextmanager
async def started(**options: Any) -> AsyncIterator[ProcessClient]:
    client = make_client(**options)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
def temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


async def test_a_picture_comes_where_it_is_asked_for():
    async with started() as client:
        client.request_picture()
        assert await client.receive() == [] and client.picture is not None
        assert client.picture.requests == [] and client.picture.tables == []
        client.add_request(make_request("a", [1, 2, 3], max_tokens=200, ignore_eos=True))
        client.request_picture()
        while not client.picture.requests:
            await client.receive()
        (shown,) = client.picture.requests
        assert (shown.number, shown.phase, shown.num_prompt_tokens) == (1, "decode", 3)
        ((number, table),) = client.picture.tables
        assert number == 1 and array("i", table)[0] == 0


async def test_a_request_from_start_to_end(temporary_folder):
    client = make_client(max_model_len=99)
    assert not client.alive
    await client.start()
    assert client.alive and client.info.max_model_len == 99
    assert list(temporary_folder.iterdir()) == []  # no file stays behind, whatever happens later
    source = make_request("a", [1, 2, 3], max_tokens=6, seed=-3, logprobs=0, stop=["x"], logit_bias={1: 0.5})
    client.add_request(source)
    token_ids: list[int] = []
    reason = None
    while reason is None:
        for delta in await client.receive():
            assert delta.request_id == "a"
            token_ids += delta.token_ids
            reason = delta.finish_reason
    assert (token_ids, reason) == (expected_answer(source, 256).token_ids, FinishReason.LENGTH)
    assert (client.stats.num_steps, client.stats.num_running, client.stats.kv_cache_usage) == (6, 0, 0.0)
    pid = pid_of(client)
    await client.close()
    await client.close()
    assert not client.alive and not is_running(pid)


async def test_messages_larger_than_the_socket_holds():
    async with started() as client:
        client.add_request(make_request("a", [1] * 10**6, max_tokens=1))
        (refused,) = await client.receive()
        assert "prompt has 1000000 tokens" in (refused.error or "")
        name = "b" * 10**6
        client.add_request(make_request(name, [1], max_tokens=1))
        assert [delta.request_id for delta in await client.receive()] == [name]


async def test_abort_and_the_stats_that_follow():
    async with started() as client:
        for name in ("a", "b"):
            client.add_request(make_request(name, [1] * 10, max_tokens=200))
        while client.stats.num_running != 2:
            await client.receive()
        client.abort(["a", "b", "unknown"])
        while client.stats.num_running:
            await asyncio.wait_for(client.receive(), 5)  # comes without a further request
        assert client.stats.kv_cache_usage == 0.0


async def test_a_reset_holds_for_what_is_added_later():
    async with started() as client:

        async def num_cached_tokens(name: str) -> int:
            client.add_request(make_request(name, list(range(1, 13)), max_tokens=1))
            while not (deltas := await asyncio.wait_for(client.receive(), 5)):
                pass
            return deltas[0].num_cached_tokens

        assert [await num_cached_tokens(name) for name in "ab"] == [0, 11]
        client.reset_prefix_cache()
        assert [await num_cached_tokens(name) for name in "cd"] == [0, 11]
    with pytest.raises(EngineDeadError):
        client.reset_prefix_cache()


async def test_a_refused_request_is_told_apart():
    async with started(num_blocks=2) as client:
        client.add_request(make_request("big", [1] * 100, max_tokens=1))
        client.add_request(make_request("small", [1], max_tokens=1))
        deltas = {}
        while len(deltas) < 2:
            deltas |= {delta.request_id: delta for delta in await client.receive()}
        assert deltas["big"].finish_reason == FinishReason.ERROR
        assert "the whole KV cache holds 8" in (deltas["big"].error or "")
        assert deltas["small"].finish_reason == FinishReason.LENGTH


async def test_a_record_that_cannot_be_read_ends_its_request_alone():
    async with started() as client:
        broken = make_request("broken", [1], max_tokens=1)
        broken.params.top_p = "most"  # type: ignore[assignment]  # past all checks
        client.add_request(broken)
        client.add_request(make_request("small", [1], max_tokens=1))
        deltas = {}
        while len(deltas) < 2:
            deltas |= {delta.request_id: delta for delta in await client.receive()}
        assert deltas["broken"].finish_reason == FinishReason.ERROR and "top_p" in (deltas["broken"].error or "")
        assert deltas["small"].finish_reason == FinishReason.LENGTH


async def test_a_start_that_fails_has_the_engines_own_error(temporary_folder):
    client = make_client(error="tensor model.norm.weight is missing")
    with pytest.raises(CheckpointError, match=r"^tensor model\.norm\.weight is missing$"):
        await client.start()
    assert not client.alive
    assert list(temporary_folder.iterdir()) == []


async def test_a_start_that_crashes(capfd):
    client = ProcessClient(EngineConfig(), command=(sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(EngineDeadError, match="exit code 3"):
        await client.start()
    assert not client.alive


async def test_what_the_engine_prints_goes_to_stderr(capfd):
    client = ProcessClient(EngineConfig(), command=(sys.executable, "-c", "print('hello')"))
    with pytest.raises(EngineDeadError, match="exit code 0"):
        await client.start()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "hello\n")


async def test_death_is_noticed():
    async with started() as client:
        client.add_request(make_request("a", [1], max_tokens=200))
        await client.receive()
        os.kill(pid_of(client), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            for _ in range(300):
                await asyncio.wait_for(client.receive(), 5)
        assert not client.alive
        with pytest.raises(EngineDeadError):
            client.add_request(make_request("b", [1]))
        client.abort(["a"])  # nothing to do, no error


async def test_death_while_idle_is_noticed():
    async with started() as client:
        receiving = asyncio.create_task(client.receive())
        await asyncio.sleep(0.05)
        os.kill(pid_of(client), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(receiving, 5)


async def test_a_sign_of_life_comes_in_the_middle_of_a_step(tmp_path):
    faults = write_faults(tmp_path / "faults.json", [Fault("a", 0, "long")])
    async with started(faults=str(faults)) as client:
        client.add_request(make_request("a", [1], max_tokens=1))
        began = time.monotonic()
        client.ask_for_beat()  # what came with the start
        while json.loads(faults.read_text())[0]["times"]:
            await asyncio.sleep(0.001)  # until the step has begun
        while not client.ask_for_beat():
            await asyncio.sleep(0.001)
        assert not client.has_news
        assert (await client.receive())[0].finish_reason == FinishReason.LENGTH
        assert time.monotonic() - began >= LONG_STEP_SECONDS


async def test_a_stopped_engine_gives_no_sign():
    async with started() as client:
        stop(client)
        client.ask_for_beat()
        await asyncio.sleep(0.2)
        assert not client.ask_for_beat() and not client.has_news
        os.kill(pid_of(client), signal.SIGCONT)
        while not client.ask_for_beat():
            await asyncio.sleep(0.001)
        assert not client.has_news and client.alive
    assert not client.ask_for_beat()


async def test_a_process_that_waits_to_be_an_engine():
    client = make_client(max_model_len=99)
    client.spawn()
    assert client.is_standby and not client.alive and not client.ask_for_beat()
    pid = pid_of(client)
    await client.start()
    assert not client.is_standby and pid_of(client) == pid and client.info.max_model_len == 99
    await client.close()
    assert not client.is_standby and not is_running(pid)


async def test_a_process_that_dies_while_it_waits_is_replaced():
    client = make_client()
    client.spawn()
    pid = pid_of(client)
    os.kill(pid, signal.SIGKILL)
    while client.is_standby:
        await asyncio.sleep(0.001)
    await client.start()
    assert pid_of(client) != pid and client.alive
    await client.close()


async def test_a_process_that_waits_is_closed_without_having_been_used():
    client = make_client()
    client.spawn()
    pid = pid_of(client)
    await client.close()
    assert not client.is_standby and not is_running(pid)


async def test_no_process_can_be_started():
    client = ProcessClient(EngineConfig(), command=("/nowhere/python",))
    with pytest.raises(EngineDeadError, match=r"no process can be started for the engine .*nowhere"):
        await client.start()
    assert not client.alive


async def test_no_descriptor_is_left_for_a_socket(monkeypatch):
    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    client = make_client()
    monkeypatch.setattr(socket, "socketpair", refuse)
    with pytest.raises(EngineDeadError, match=r"no process can be started for the engine .*Too many open files"):
        await client.start()
    monkeypatch.undo()
    await client.start()
    await client.close()


async def test_the_engine_ignores_signals_to_the_group():
    async with started() as client:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid_of(client), number)
        client.add_request(make_request("a", [1], max_tokens=1))
        assert (await asyncio.wait_for(client.receive(), 5))[0].request_id == "a"


async def test_an_idle_engine_uses_no_cpu():
    async with started() as client:
        client.add_request(make_request("a", [1], max_tokens=1))
        await client.receive()

        def ticks() -> int:
            fields = Path(f"/proc/{pid_of(client)}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])  # user and system time, 1/100 s

        await asyncio.sleep(0.1)
        before = ticks()
        await asyncio.sleep(0.5)
        assert ticks() - before <= 1


def test_the_engine_does_not_outlive_its_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from support.engine_processes import make_client, pid_of\n"
        "async def main():\n"
        "    client = make_client()\n"
        "    await client.start()\n"
        "    print(pid_of(client), flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)
