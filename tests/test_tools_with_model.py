"""Tool calls that a real engine makes token by token, also where it dies in the middle of the arguments."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import chain_llama, tiny_tokenizer
from support.faults import Fault, write_faults
from support.served import ServerProcess
from support.tools import CHAT_TOOLS, joined_choices, whole_choice, without_ids

WORDS = [f"word{i} " for i in range(20)]
CALL = [
    "<tool_call>",
    '{"name": "get_weather", ',
    '"arguments": {"city": "',
    *WORDS,
    '", "days": 2',
    "}}",
    "</tool_call>",
]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Q"}], "tools": CHAT_TOOLS}
OPTIONS = (
    *("--max-model-len", "256", "--num-gpu-blocks-override", "200"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--chat-template", "{{ messages[0]['content'] }}"),
)
SERVER = str(Path(__file__).parent / "support" / "faulty_server.py")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_faults(tmp_path_factory.mktemp("faults") / "faults.json", [])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, faults: Path) -> Iterator[ServerProcess]:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(CALL[:1], special_tokens=True)  # as in Hermes' own vocabulary
    tokenizer.add_tokens(CALL[1:])
    folder = chain_llama(
        tmp_path_factory.mktemp("tools"), ["Q", *CALL], tokenizer=tokenizer, end=tokenizer.eos_token_id
    )
    server = ServerProcess(str(folder), *OPTIONS, program=(sys.executable, SERVER, str(faults)))
    server.wait_until_ready()
    yield server
    server.close()


def streamed(server: ServerProcess, request_id: str) -> list[dict[str, Any]]:
    return joined_choices(server.chunks("/v1/chat/completions", request_id=request_id, **BODY))


def test_a_stream_of_arguments_goes_on_after_a_crash(server, faults):
    assert any(
        line.endswith("tool calls: hermes; but the chat template leaves a request's tools out of the prompt\n")
        for line in server.lines
    )
    (choice,) = server.chat(**BODY)["choices"]
    whole = without_ids(whole_choice(choice))
    ((name, arguments),) = whole["calls"]
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "".join(WORDS), "days": 2})
    assert (whole["content"], whole["finish_reason"]) == ("", "tool_calls")
    assert list(map(without_ids, streamed(server, "undisturbed"))) == [whole]
    for at in (1, 2, 9, len(CALL) - 1):  # in the head, in the arguments, before the end
        restarts = server.metric("engine_restarts_total")
        write_faults(faults, [Fault(f"chatcmpl-killer-{at}", at)])
        assert list(map(without_ids, streamed(server, f"killer-{at}"))) == [whole]
        assert server.metric("engine_restarts_total") == restarts + 1
        write_faults(faults, [])
