"""Thousands of hostile requests to a whole server: no 5xx, no hang, nothing left behind, the same answers afterwards.

More of them: OCTAVO_FUZZ=20000 pytest tests/server/test_fuzz.py, or `python -m support.fuzz URL` against any server.
Requests that found a fault stand in FOUND.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fuzz import Hostile, fuzz, hostiles
from support.mutations import hostile_call
from support.served import ServerProcess

NUM_QUICK = 1500
NUM = int(os.environ.get("OCTAVO_FUZZ", NUM_QUICK))
HERE = Path(__file__).parent
HELLO = [{"role": "user", "content": "Hello"}]

# (path, body): each was a 5xx, a hang or a wrong answer.
FOUND: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"front": 1}}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"add_special_tokens": 1}}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"self": 1}}),
    ("/v1/completions", {"prompt": "a", "use_beam_search": True, "beam_width": 2, "early_stopping": 1}),
    ("/v1/completions", {"prompt": "a", "use_beam_search": True, "beam_width": 2, "early_stopping": 0.0}),
    ("/v1/completions", {"prompt": [5], "max_tokens": 2, "min_tokens": 1, "stop_token_ids": list(range(13))}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"add_special_tokens": 1}}),
)


@pytest.fixture(scope="module", params=["scripted", "calling", "control plane"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    scripts = {
        "scripted": [str(HERE / "scripted_server.py"), "0", "0", "--max-model-len", "64", "--enable-responses-store"],
        "calling": [str(HERE / "calling_server.py"), "--enable-responses-store"],
        "control plane": [str(HERE / "control_plane_server.py")],
    }
    server = ServerProcess(program=(sys.executable, *scripts[request.param]))
    server.wait_until_ready()
    yield server
    assert server.process.poll() is None
    assert "Traceback" not in server.log and "ERROR" not in server.log
    server.close()


async def test_hostile_requests(server):
    findings = await fuzz(server.url, hostiles(NUM, seed=1))
    assert findings.faults == []
    assert findings.num_sent == NUM and set(findings.statuses) <= {"200", "400", "404", "405", "413", "431", "503"}
    assert findings.statuses["200"] > 0.1 * NUM  # they are not all refused for the same reason


async def test_what_found_a_fault_once(server):
    found: list[Hostile] = [hostile_call(path, body) for path, body in FOUND]
    assert (await fuzz(server.url, found)).faults == []
