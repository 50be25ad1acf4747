"""Lines for programs are JSON objects; and whatever the log level, nothing of a prompt gets into the log."""

from __future__ import annotations

import io
import json
import logging
import sys
from datetime import datetime
from typing import Any

import pytest

from octavo.server.logs import JsonLines

SECRET = "xyzzy-plugh"


def record(level: int = logging.INFO, message: str = "%s", *args: Any, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("octavo.a", level, __file__, 1, message, args or ("text",), None)
    made.__dict__.update(extra)
    return made


def test_a_record_is_one_object_in_one_line() -> None:
    line = JsonLines().format(record(logging.WARNING, '%d a\n\u2028"b"', 3))
    assert "\n" not in line
    entry = json.loads(line)
    assert datetime.fromisoformat(entry.pop("time")).utcoffset() is not None
    assert entry == {"level": "warning", "logger": "octavo.a", "message": '3 a\n\u2028"b"'}


def test_request_and_exception_are_named() -> None:
    try:
        raise ZeroDivisionError("why")
    except ZeroDivisionError:
        made = record(request_id="r1")
        made.exc_info = sys.exc_info()
    entry = json.loads(JsonLines().format(made))
    assert entry["request_id"] == "r1"
    assert entry["exception"].startswith("Traceback") and entry["exception"].endswith("ZeroDivisionError: why")


@pytest.fixture
def log() -> Any:
    """What the server would write as JSON at the lowest level."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("octavo")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(before)


async def test_nothing_of_a_prompt_is_logged(serve, log):
    server = await serve(max_model_len=64)
    say = [{"role": "user", "content": SECRET}]
    bodies = [
        ("/v1/completions", {"prompt": SECRET}),
        ("/v1/completions", {"prompt": SECRET, "stream": True}),
        ("/v1/completions", {"prompt": SECRET * 100}),
        ("/v1/completions", {"prompt": [SECRET, 1]}),
        ("/v1/completions", {"prompt": "a", "stop": SECRET, "max_tokens": SECRET}),
        ("/v1/completions", {"prompt": "a", "model": SECRET}),
        ("/v1/chat/completions", {"messages": say}),
        ("/v1/chat/completions", {"messages": [{"role": SECRET}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"text": SECRET}}]}),
        ("/v1/responses", {"input": SECRET, "model": "tiny"}),
        ("/v1/messages", {"messages": say, "max_tokens": 4}),
        ("/tokenize", {"prompt": SECRET, "add_special_tokens": SECRET}),
    ]
    statuses = {(await server.post(path, **body)).status_code for path, body in bodies}
    assert statuses >= {200, 400, 404}
    entries = log()
    assert SECRET not in json.dumps(entries)
    assert {"octavo.server.errors"} <= {entry["logger"] for entry in entries}
    assert all(entry["request_id"] in entry["message"] for entry in entries if "request_id" in entry)
