"""A server that nobody asks for anything takes no time at all: neither of its processes wakes up."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.checkpoints import chain_llama
from support.served import ServerProcess

QUIET_SECONDS, PATIENCE_SECONDS = 3.0, 60.0


def num_wakes(server: ServerProcess) -> int:
    """How often a thread of one of its processes has gone to sleep."""
    processes = [server.process.pid, *server.children()]
    tasks = [task for pid in processes for task in Path(f"/proc/{pid}/task").iterdir()]
    lines = [line for task in tasks for line in (task / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


@pytest.mark.slow
def test_an_idle_server_never_wakes_up(tmp_path):
    # Beats every half second, until the engine is left alone.
    server = ServerProcess(str(chain_llama(tmp_path / "chain", ("Q", "Hello", " world"))), "--engine-timeout", "2")
    try:
        server.wait_until_ready()
        server.complete(prompt="Q", max_tokens=1)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            before = num_wakes(server)
            time.sleep(QUIET_SECONDS)
            if (during := num_wakes(server) - before) == 0:
                break
            assert time.monotonic() < deadline, f"{during} wakes in {QUIET_SECONDS} s"
        server.complete(prompt="Q", max_tokens=1)
        assert num_wakes(server) > before
    finally:
        server.close()
