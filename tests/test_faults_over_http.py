"""Faults under a whole server with a real engine: whom they hit, and what is left of it when it dies itself."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.checkpoints import tiny_model, tiny_tokenizer
from support.engine_processes import is_running
from support.faults import EVERY_TIME, Fault, write_faults
from support.served import ServerProcess

POISON = "Q"  # a token whose embedding is no number
OPTIONS = ("--max-model-len", "256", "--num-gpu-blocks-override", "200")
SERVER = str(Path(__file__).parent / "support" / "faulty_server.py")


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tokenizer = tmp_path_factory.mktemp("poisoned"), tiny_tokenizer()
    (poison,) = tokenizer.encode(POISON, add_special_tokens=False)
    model = tiny_model(vocab=len(tokenizer))
    model.model.embed_tokens.weight.data[poison] = float("nan")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_faults(tmp_path_factory.mktemp("faults") / "faults.json", [])


@pytest.fixture(scope="module")
def server(poisoned: Path, faults: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(str(poisoned), *OPTIONS, program=(sys.executable, SERVER, str(faults)))
    server.wait_until_ready()
    yield server
    server.close()


def body(index: int, **fields: Any) -> dict[str, Any]:
    defaults = {"prompt": f"{index} the fox", "max_tokens": 40, "seed": index, "ignore_eos": True}
    return {**defaults, "logit_bias": {_poison_id(): -100}, **fields}


def _poison_id() -> int:
    return int(tiny_tokenizer().encode(POISON, add_special_tokens=False)[0])


async def all_at_once(server: ServerProcess, *bodies: dict[str, Any], id: str | None = None) -> list[httpx.Response]:
    """`id` is that of the last one."""
    async with httpx.AsyncClient(timeout=60) as client:
        calls = [
            client.post(
                f"{server.url}/v1/completions",
                json=each,
                headers={"x-request-id": id} if id is not None and each is bodies[-1] else {},
            )
            for each in bodies
        ]
        return await asyncio.gather(*calls)


def texts(responses: list[httpx.Response]) -> list[str]:
    assert [response.status_code for response in responses] == [200] * len(responses)
    return [response.json()["choices"][0]["text"] for response in responses]


@pytest.mark.parametrize("prompt", [POISON, f"the garden {POISON} in winter, and so on and on"])
async def test_a_row_that_is_no_number_ends_alone(server, prompt):
    bodies = [body(index) for index in range(5)]
    alone = [texts(await all_at_once(server, each))[0] for each in bodies]
    *others, failed = await all_at_once(server, *bodies, body(9, prompt=prompt))
    assert texts(others) == alone
    assert failed.status_code == 500 and failed.json()["error"]["code"] == "request_failed"
    assert "finite" in failed.json()["error"]["message"]
    for _ in range(2):  # nothing of it is in the cache
        begins_alike = body(3, prompt=prompt.partition(POISON)[0] + "the garden in winter")
        (again,) = await all_at_once(server, begins_alike)
        assert len(texts([again])[0]) > 0
    assert server.metric("kv_cache_usage_perc") == 0 and server.metric("engine_restarts_total") == 0


async def test_a_request_that_kills_the_engine_twice_is_a_500_alone(server, faults):
    write_faults(faults, [Fault("killer", 3, times=EVERY_TIME)])
    bodies = [body(index) for index in range(4)]
    alone = [texts(await all_at_once(server, each))[0] for each in bodies]
    *others, failed = await all_at_once(server, *bodies, body(7), id="killer")
    assert texts(others) == alone
    assert failed.status_code == 500 and failed.json()["error"]["code"] == "request_failed"
    assert "died 2 times in a row while it computed this request" in failed.json()["error"]["message"]
    assert server.metric("engine_restarts_total") >= 2
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_nothing_is_left_of_a_server_that_is_killed(poisoned, tmp_path):
    """In the middle of its streams, with a process that stands by."""
    shared_before = set(Path("/dev/shm").iterdir())
    server = ServerProcess(str(poisoned), *OPTIONS, "--engine-timeout", "2")
    try:
        server.wait_until_ready()
        deadline = time.monotonic() + 20
        while len(children := server.children()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with server.stream(**body(1, max_tokens=200)) as response:
            next(response.iter_lines())
            os.kill(server.process.pid, signal.SIGKILL)
            assert server.end() == -signal.SIGKILL
        deadline = time.monotonic() + 5
        while any(map(is_running, children)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with socket.socket() as again:  # the port is free for the next one at once
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", server.port))
            again.listen()
        assert set(Path("/dev/shm").iterdir()) <= shared_before
    finally:
        server.close()
