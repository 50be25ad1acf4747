"""The two forms of a line: JSON objects and text; and that an engine's process writes what its server asks for."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.client import ProcessClient
from octavo.engine.logs import JsonLines, TextLines
from octavo.request import EngineRequest, SamplingParams
from support.faults import Fault, write_faults

FAKE_PROCESS = str(Path(__file__).parents[1] / "support" / "fake_engine_process.py")


def record(level: int = logging.INFO, message: str = "%s", *args: Any, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("octavo.a", level, __file__, 1, message, args or ("text",), None)
    made.__dict__.update(extra)
    return made


def failed() -> logging.LogRecord:
    made = record(logging.ERROR)
    try:
        try:
            raise OSError(28, "No space left")
        except OSError as cause:
            raise ZeroDivisionError("why") from cause
    except ZeroDivisionError:
        made.exc_info = sys.exc_info()
    return made


def test_a_record_is_one_object_in_one_line() -> None:
    line = JsonLines(may_quote=True).format(record(logging.WARNING, '%d a\n\u2028"b"', 3))
    assert "\n" not in line
    entry = json.loads(line)
    assert datetime.fromisoformat(entry.pop("time")).utcoffset() is not None
    assert entry == {"level": "warning", "logger": "octavo.a", "message": '3 a\n\u2028"b"'}


def test_requests_are_named() -> None:
    lines = JsonLines(may_quote=True)
    assert json.loads(lines.format(record(request_id="r1")))["request_id"] == "r1"
    assert json.loads(lines.format(record(request_ids=["r1", "r2"])))["request_ids"] == ["r1", "r2"]
    assert "request_id" not in json.loads(lines.format(record(request_id=None)))


@pytest.mark.parametrize("may_quote", [True, False])
def test_messages_of_exceptions(may_quote: bool) -> None:
    for form in (JsonLines(may_quote), TextLines(may_quote)):
        text = form.format(failed()) if isinstance(form, TextLines) else json.loads(form.format(failed()))["exception"]
        assert text.count("Traceback (most recent call last):") == 2
        assert "OSError: [Errno 28] No space left" in text  # it speaks of the machine
        assert text.endswith("ZeroDivisionError: why") is may_quote
        assert ("why" in text.replace('ZeroDivisionError("why")', "")) is may_quote  # but for the line of code


async def test_an_engines_lines_are_what_the_server_asks_for(tmp_path, capfd) -> None:
    faults = write_faults(tmp_path / "faults", [Fault("cmpl-r1#0", kind="raise")])
    config = EngineConfig(model=json.dumps({"faults": str(faults)}))
    client = ProcessClient(config, command=(sys.executable, FAKE_PROCESS, "json", "info"))
    await client.start()
    request = EngineRequest(request_id="cmpl-r1#0", prompt_token_ids=[1], params=SamplingParams(), seed=1)
    client.add_request(request)
    while not any(delta.finish_reason for delta in await client.receive()):
        pass
    await client.close()
    (line,) = capfd.readouterr().err.splitlines()
    entry = json.loads(line)
    assert entry["message"] == "a step of 1 requests failed" and entry["level"] == "error"
    assert entry["request_ids"] == ["cmpl-r1"] and entry["exception"].startswith("Traceback")


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_warnings_and_the_last_words_of_a_process(log_format: str) -> None:
    script = (
        "import threading, warnings; from octavo.engine.logs import set_up_logs; "
        f"set_up_logs({log_format!r}, 'info'); warnings.warn('careful'); "
        "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); raise KeyError('x')"
    )
    done = subprocess.run([sys.executable, "-W", "default", "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    if log_format == "json":
        entries = [json.loads(line) for line in done.stderr.splitlines()]
        assert [entry["level"] for entry in entries] == ["warning", "critical", "critical"]
        assert entries[1]["exception"].endswith("ZeroDivisionError: division by zero")
        assert entries[2]["exception"].endswith("KeyError: 'x'")
    else:
        assert "UserWarning: careful" in done.stderr and done.stderr.rstrip().endswith("KeyError: 'x'")
