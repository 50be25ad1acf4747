"""`octavo top`: what a record looks like in characters, and the way there from a server."""

from __future__ import annotations

import copy
import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from octavo.cli import top
from octavo.cli.main import main

COOKED = termios.ECHO | termios.ICANON
RECORD: dict[str, Any] = {
    "model": "tiny",
    "alive": True,
    "restarting": False,
    "tokens_per_second": 123.4,
    "first_token_seconds": 0.0821,
    "num_generation_tokens": 1000,
    "prefix_cache_hit_rate": 0.5,
    "num_preemptions": 2,
    "num_swaps": 1,
    "num_restarts": 0,
    "requests": {
        "num_waiting": 20,
        "num_prefill": 1,
        "num_decode": 1,
        "shown": [
            {
                "number": 1,
                "phase": "decode",
                "num_prompt_tokens": 30,
                "num_output_tokens": 4,
                "num_computed_tokens": 33,
                "num_preemptions": 0,
            },
            {
                "number": 0,
                "phase": "waiting",
                "num_prompt_tokens": 7,
                "num_output_tokens": 0,
                "num_computed_tokens": 0,
                "num_preemptions": 1,
            },
        ],
    },
    "blocks": {"num_blocks": 8, "block_size": 16, "usage": 0.5, "runs": [1, 1, 2, 2, 1, 1, 1, 2, 1, 2, -1, 0, 2, 0, 0]},
}


def drawn(record: dict[str, Any], width: int = 80, speeds: tuple[float, ...] = (), **options: Any) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(top.draw(record, speeds, "http://s", width, **options))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_picture_has_all_figures():
    lines = drawn(RECORD, speeds=(0.0, 5.0, 10.0))
    assert lines[0] == "octavo top · tiny at http://s"
    assert lines[2] == "   123.4 tokens/s  ▁▅█"
    assert lines[3] == "  1 decode, 1 prefill, 20 waiting"
    assert lines[4] == "  first token 82 ms · cache hits 50% · preempted 2 · swapped 1 · restarts 0"
    assert lines[6] == "  8 blocks of 16 tokens, 50% in use"
    assert lines[7] == "  ◆■■■▪▪··"
    rows = [line.split() for line in lines[10:]]
    assert rows[0] == ["request", "phase", "prompt", "computed", "output", "preempted"]
    assert rows[1] == ["■", "1", "decode", "30", "33", "4", "0"]
    assert rows[2] == ["–", "waiting", "7", "0", "0", "1"]
    assert rows[3] == ["and", "20", "more"]


def test_what_is_not_known_is_a_dash():
    record = {**copy.deepcopy(RECORD), "first_token_seconds": None, "prefix_cache_hit_rate": None}
    assert "first token – · cache hits – · preempted 2 · swapped 1 · restarts 0" in drawn(record)[4]


def test_an_engine_that_does_not_work_shows():
    assert drawn({**RECORD, "alive": False})[0].endswith("http://s · the engine is dead")
    assert drawn({**RECORD, "restarting": True})[0].endswith("http://s · the engine is being restarted")


@pytest.mark.parametrize("width", [40, 70, 200])
def test_no_line_is_wider_than_the_terminal(width):
    record = {**RECORD, "blocks": {**RECORD["blocks"], "num_blocks": 5000, "runs": [3000, 1, 1, 2000, 0, 0]}}
    assert max(map(len, drawn(record, width, tuple(range(500))))) <= width


def test_a_cell_is_whose_most_of_its_blocks_are():
    runs = [2, 1, 1, 1, 2, 2, 1, 0, 0, 4, -1, 0, 4, 0, 0]
    assert top.cells(runs, 12, 100) == [
        *((1, False), (1, False), (2, True), (0, False)),
        *[(-1, False)] * 4,
        *[(0, False)] * 4,
    ]
    assert top.cells(runs, 12, 3) == [(1, False), (-1, False), (0, False)]
    assert top.cells(runs, 12, 5) == [(1, False), (-1, False), (-1, False), (0, False)]


def test_the_spark_is_as_wide_as_it_may_be():
    assert top.spark([], 5) == ""
    assert top.spark([0, 0], 5) == "▁▁"
    assert top.spark([9, 0, 7, 14], 3) == "▁▅█"


def test_neighbours_have_different_colours():
    assert len({top.colour(number) for number in range(1, 30)}) == 29


def test_once_prints_what_a_server_says(fake_server, capsys):
    fake_server.live = [{**RECORD, "tokens_per_second": 0.0}, {**RECORD, "tokens_per_second": 1.0}, RECORD, {}]
    assert main(["top", "--url", fake_server.url, "--api-key", "k", "--once"]) == 0
    printed = capsys.readouterr().out
    assert "octavo top · tiny" in printed and "   123.4 tokens/s" in printed
    assert fake_server.requests == [("/live", None, "Bearer k")]


def test_without_a_server_there_is_one_line(capsys):
    assert main(["top", "--url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("octavo: error: no server answers at http://127.0.0.1:9")


@pytest.mark.parametrize(("num_requests", "height"), [(0, 24), (3, 24), (200, 24), (200, 60), (200, 16)])
def test_no_picture_is_higher_than_the_terminal(num_requests, height):
    shown = [{**RECORD["requests"]["shown"][0], "number": i + 1} for i in range(num_requests)]
    requests = {"num_waiting": 0, "num_prefill": 0, "num_decode": num_requests, "shown": shown}
    blocks = {**RECORD["blocks"], "num_blocks": 5000, "runs": [3000, 1, 1, 2000, 0, 0]}
    lines = drawn({**RECORD, "requests": requests, "blocks": blocks}, height=height)
    assert len(lines) <= height
    if num_requests == 200:
        assert lines[-1].startswith(" ") and "more" in lines[-1] and len(lines) >= min(height, 32) - 1


def test_what_is_shown_while_there_is_no_server():
    problem = top.problem_of(12.4, "no server answers at http://s (Connection refused)")
    lines = drawn(RECORD, width=70, problem=problem)
    assert lines[1].startswith("silent for 12 s, connecting again: no server answers at")
    assert len(lines[1]) <= 70 and lines[2] == drawn(RECORD)[2]
    assert top.problem_of(4.0, "") == "silent for 4 s"


class Terminal:
    """`octavo top` in a pseudo-terminal of 80 columns and 24 lines."""

    def __init__(self, url: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        command = [sys.executable, "-m", "octavo", "top", "--url", url]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        self._slave = slave
        self.seen = ""

    def wait_for(self, text: str) -> None:
        """Until it is on the screen; what was there before is forgotten."""
        deadline = time.monotonic() + 20
        while text not in self.seen:
            ready = select.select([self._master], [], [], 1)[0]
            assert time.monotonic() < deadline, (text, self.seen)
            if not ready:
                continue
            self.seen += os.read(self._master, 1 << 16).decode(errors="replace")
        self.seen = self.seen[self.seen.index(text) + len(text) :]

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        """The exit code; the terminal is as it was."""
        self.wait_for("\x1b[?1049l")  # the other screen
        code = self.process.wait(20)
        assert termios.tcgetattr(self._slave)[3] & COOKED == COOKED
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def terminal() -> Iterator[Any]:
    made: list[Terminal] = []

    def make(url: str) -> Terminal:
        made.append(Terminal(url))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("key", [b"q", b"Q"])
def test_a_key_ends_it(terminal, fake_server, key):
    fake_server.live, _ = [RECORD], fake_server.live_goes_on.clear()
    screen = terminal(fake_server.url)
    screen.wait_for("octavo top · tiny")
    screen.press(b"x")  # nothing
    screen.press(key)
    assert screen.end() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])  # the first is Ctrl-C's
def test_a_signal_ends_it_and_leaves_the_terminal_as_it_was(terminal, fake_server, number, code):
    fake_server.live, _ = [RECORD], fake_server.live_goes_on.clear()
    screen = terminal(fake_server.url)
    screen.wait_for("octavo top · tiny")
    screen.process.send_signal(number)
    assert screen.end() == code


def test_a_server_that_goes_away_is_waited_for(terminal, fake_server_at):
    with fake_server_at(0) as server:
        server.live, _ = [RECORD], server.live_goes_on.clear()
        screen = terminal(server.url)
        screen.wait_for("restarts 0")
    screen.wait_for("connecting again")
    screen.wait_for("no server answers")
    with fake_server_at(server.server_port) as server:
        server.live, _ = [{**RECORD, "model": "another", "num_restarts": 3}], server.live_goes_on.clear()
        screen.wait_for("octavo top · another")
        screen.wait_for("restarts 3")
        screen.press(b"q")
        assert screen.end() == 0
