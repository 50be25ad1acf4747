"""`octavo chat` and `octavo complete` against a scripted server: what they ask, and what they show."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.cli.chat import Conversation
from octavo.cli.client import Client
from octavo.cli.main import main
from octavo.cli.sources import ServerSource
from octavo.cli.terminal import Answer, Piece, show_answer
from octavo.errors import OctavoError

ANSWER = "Grass is grün 😀.\n"


def talk(source: Any, *lines: str) -> str:
    """What a conversation shows when these lines are typed; an exception among them is raised at the prompt."""
    out, typed = io.StringIO(), iter(lines)

    def read_line(prompt: str) -> str:
        out.write(prompt)
        try:
            line = next(typed)
        except StopIteration:
            raise EOFError from None
        if line == "^C":
            raise KeyboardInterrupt
        return line

    Conversation(source, {}, out).talk(read_line)
    return out.getvalue()


class Script:
    """A source that answers in one word and records what it was asked. "broken" fails, "slow" is interrupted."""

    where = "script"

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.closed = 0

    def chat(self, messages: list[dict[str, str]], sampling: dict[str, Any]) -> Iterator[Piece]:
        self.asked.append(messages)
        try:
            yield Piece("an")
            if messages[-1]["content"] == "broken":
                raise OctavoError("it broke")
            if messages[-1]["content"] == "slow":
                raise KeyboardInterrupt
            yield Piece("swer", 2, "stop")
        finally:
            self.closed += 1


def test_one_message(fake_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--url",
        fake_server.url,
        "--max-tokens",
        "9",
        "--temperature",
        "0",
        "--stop",
        "x",
        "--system",
        "Be brief.",
    ]
    assert main(["chat", "Why?", *words, "--api-key", "secret"]) == 0
    assert capsys.readouterr() == (ANSWER, "")
    models, (path, body, key) = fake_server.requests
    assert models[0] == "/v1/models" and path == "/v1/chat/completions" and key == "Bearer secret"
    assert body == {
        "model": "fake",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "temperature": 0.0,
        "min_p": 0.1,  # what a chat leaves out where nothing else is asked for
        "stop": ["x"],
    }


def test_message_from_a_pipe(fake_server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped\n"))
    monkeypatch.setenv("OCTAVO_API_KEY", "from-env")
    assert main(["chat", "--url", fake_server.url + "/v1/", "--served-model-name", "other"]) == 0
    [(_, body, key)] = fake_server.requests
    assert body["messages"] == [{"role": "user", "content": "piped"}] and body["model"] == "other"
    assert key == "Bearer from-env"


def test_complete(fake_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "Grass", "--url", fake_server.url, "--seed", "1"]) == 0
    assert capsys.readouterr().out == ANSWER
    path, body, _ = fake_server.requests[-1]
    assert path == "/v1/completions" and body["prompt"] == "Grass" and body["seed"] == 1 and "messages" not in body


def test_usage_gives_the_number_of_tokens(fake_server: Any) -> None:
    answer = show_answer(ServerSource(fake_server.url, None, None).complete("x", {}), io.StringIO())
    assert (answer.text, answer.num_tokens, answer.finish_reason) == (ANSWER.strip(), 7, "stop")
    assert 0 <= answer.first_seconds <= answer.seconds


def test_refused_request_shows_the_servers_words(fake_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.status = 400
    assert main(["chat", "x", "--url", fake_server.url, "--served-model-name", "fake"]) == 1
    assert capsys.readouterr() == ("", "octavo: error: max_tokens is -1; it must be at least 1\n")


def test_error_in_the_middle_of_an_answer(fake_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.failure = "the engine process is gone"
    assert main(["chat", "x", "--url", fake_server.url]) == 1
    assert capsys.readouterr().err == "octavo: error: the engine process is gone\n"


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "x", "--url", "http://127.0.0.1:9"]) == 1
    said = (
        "no server answers at http://127.0.0.1:9 (Connection refused); start one with `octavo serve`, or give its --url"
    )
    assert capsys.readouterr().err == f"octavo: error: {said}\n"


@pytest.mark.parametrize("url", ["ftp://x", "http://", ""])
def test_url_that_is_none(url: str) -> None:
    with pytest.raises(OctavoError, match="is not a URL of a server"):
        Client(url)


def test_history_reset_and_system() -> None:
    source = Script()
    shown = talk(source, "one", "two", "/reset", "/system  Be kind. ", "three", "/system", "/quit", "never")
    user, assistant = (
        [{"role": "user", "content": c} for c in ("one", "two", "three")],
        {"role": "assistant", "content": "answer"},
    )
    assert source.asked == [
        [user[0]],
        [user[0], assistant, user[1]],
        [{"role": "system", "content": "Be kind."}, user[2]],
    ]
    assert shown.count("answer\n") == 3 and "system prompt: Be kind." in shown
    assert source.closed == 3


def test_line_is_continued() -> None:
    source = Script()
    talk(source, "first \\", "second\\", "third")
    assert source.asked == [[{"role": "user", "content": "first \nsecond\nthird"}]]


def test_failed_question_is_forgotten_and_the_talk_goes_on() -> None:
    source = Script()
    shown = talk(source, "broken", "again")
    assert "it broke" in shown
    assert source.asked[1] == [{"role": "user", "content": "again"}]


def test_interrupt_stops_the_answer_and_keeps_what_came() -> None:
    source = Script()
    talk(source, "slow", "^C", "on")
    assert source.asked[1] == [
        {"role": "user", "content": "slow"},
        {"role": "assistant", "content": "an"},
        {"role": "user", "content": "on"},
    ]
    assert source.closed == 2


def test_help_and_unknown_commands() -> None:
    shown = talk(Script(), "/help", "/resett", "")
    for command in ("/reset", "/system TEXT", "/help", "/quit"):
        assert command in shown
    assert "no command /resett; did you mean /reset?" in shown


def test_terminal_gets_colours_but_no_control_characters(monkeypatch: Any) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    answer = show_answer(iter_pieces("\x1b[2Jred\x9b", "\tand\nblue"), out)
    assert out.getvalue() == "[2Jred\tand\nblue\n" and answer.text == "\x1b[2Jred\x9b\tand\nblue"
    Conversation(Script(), {}, out).answer("x")
    assert "\x1b[2m  2 tokens" in out.getvalue()


def iter_pieces(*texts: str) -> Iterator[Piece]:
    yield from (Piece(text) for text in texts)


def test_figures() -> None:
    answer = Answer("x", num_tokens=11, finish_reason="length", first_seconds=0.5, seconds=2.5)
    assert answer.figures() == "11 tokens · 5.0 tokens/s · first after 0.50 s · ended by length"
    answer = Answer("", num_tokens=0, finish_reason=None, first_seconds=1.0, seconds=1.0)
    assert answer.figures() == "0 tokens · first after 1.00 s · stopped"
