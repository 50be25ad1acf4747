"""The built-in page in a real Chromium (Debian: `apt-get install chromium`), before a real server with a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.browser import CHROMIUM, Browser
from support.served import ServerProcess

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

KEY = "a-key"
IS_RUNNING = "document.querySelector('#status')?.textContent === 'running'"
LAST_FIGURES = "document.querySelector('#log article:last-child .quiet')?.textContent ?? ''"


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[ServerProcess]:
    options = ("--served-model-name", "smollm2", "--max-model-len", "1024", "--num-gpu-blocks-override", "72")
    server = ServerProcess(str(smollm2_gguf), *options, "--api-key", KEY)
    server.wait_until_ready()
    yield server
    server.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path)
    yield browser
    browser.close()


def open_with_key(browser: Browser, server: ServerProcess) -> None:
    """As somebody who has given the key in this tab before."""
    browser.open(f"{server.url}/")
    browser.wait_for("document.querySelector('#status')?.textContent.includes('API key')")
    browser.evaluate(f"sessionStorage.setItem('octavo.key', {json.dumps(KEY)})")
    browser.complaints.clear()  # of the 401
    browser.evaluate("location.reload()")
    browser.wait_for(IS_RUNNING)


def set_field(browser: Browser, name: str, value: str) -> None:
    browser.evaluate(f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)}")


def ask(browser: Browser, question: str) -> None:
    browser.evaluate("document.querySelector('#question').focus()")
    browser.type(question)
    browser.press("Enter")


def test_a_chat_with_settings_is_what_the_api_answers(server, browser):
    open_with_key(browser, server)
    assert browser.text("#model") == "smollm2"
    settings = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "max_tokens": 24, "seed": 11}
    for name, value in settings.items():
        set_field(browser, name, str(value))
    set_field(browser, "system", "You are a sailor.")
    set_field(browser, "stop", "\\n")
    ask(browser, "What is a <b>reef</b>?")
    browser.wait_for(f"({LAST_FIGURES}).includes('seed 11')")
    messages = [
        {"role": "system", "content": "You are a sailor."},
        {"role": "user", "content": "What is a <b>reef</b>?"},
    ]
    response = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"messages": messages, "stop": ["\n"], **settings},
        headers={"authorization": f"Bearer {KEY}"},
        timeout=30,
    )
    expected = response.json()["choices"][0]["message"]["content"]
    assert len(expected) > 10
    assert browser.text("#log article:last-child .text") == expected
    assert browser.text("#log article.user") == "What is a <b>reef</b>?"
    assert browser.complaints == []


def test_the_live_view_shows_a_request_while_it_runs_and_escape_stops_it(server, browser):
    open_with_key(browser, server)
    set_field(browser, "max_tokens", "900")
    set_field(browser, "temperature", "2")  # no end in sight
    ask(browser, "Count without end.")
    browser.wait_for("document.querySelector('#counts').textContent.startsWith('1 decoding')")
    browser.wait_for("Number(document.querySelector('#map').dataset.used) > 2")
    assert browser.text("#requests tr td:nth-child(2)") == "decode"
    # The colour of the request's swatch is somewhere in the map.
    seen = browser.evaluate(
        """(() => {
          const canvas = document.querySelector('#map'), probe = document.createElement('canvas').getContext('2d');
          probe.fillStyle = document.querySelector('#requests .swatch').style.background;
          probe.fillRect(0, 0, 1, 1);
          const wanted = probe.getImageData(0, 0, 1, 1).data.join();
          const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          for (let i = 0; i < data.length; i += 4) if (data.slice(i, i + 4).join() === wanted) return true;
          return false;
        })()"""
    )
    assert seen
    browser.wait_for("Number(document.querySelector('#speed').textContent) > 0")
    browser.press("Escape")
    browser.wait_for(f"({LAST_FIGURES}).endsWith('stopped')")
    browser.wait_for("document.querySelector('#map').dataset.used === '0'")
    assert browser.text("#send") == "Send" and browser.complaints == []


def test_a_key_is_asked_for_and_stays_in_the_tab(server, browser):
    browser.open(f"{server.url}/")
    browser.wait_for("document.querySelector('#status')?.textContent.includes('API key')")
    ask(browser, "Hello")
    browser.wait_for("document.activeElement.id === 'key'")
    browser.type(KEY)
    browser.press("Tab")
    browser.wait_for(IS_RUNNING)
    assert browser.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_nothing_is_wider_than_the_window(server, browser, width):
    open_with_key(browser, server)
    browser.resize(width, 700)
    browser.evaluate("document.querySelector('#settings').open = true")
    browser.wait_for(f"innerWidth === {width}")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
