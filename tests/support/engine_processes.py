"""Processes of the fake engine, as ProcessClient starts them, and what the system says of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.client import ProcessClient

COMMAND = (sys.executable, str(Path(__file__).parent / "fake_engine_process.py"))


def make_client(**options: Any) -> ProcessClient:
    """`options`: those of `make_engine`."""
    return ProcessClient(EngineConfig(model=json.dumps(options)), command=COMMAND)


def pid_of(client: ProcessClient) -> int:
    assert client._process is not None
    return client._process.pid


def stop(client: ProcessClient) -> None:
    """As SIGSTOP does it. Returns when no thread runs any more: only one is given the signal, and on a busy machine the
    others go on until that one has its turn."""
    os.kill(pid_of(client), signal.SIGSTOP)
    tasks = Path(f"/proc/{pid_of(client)}/task")
    while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
        time.sleep(0.001)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
