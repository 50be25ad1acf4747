"""What fails in the server while an answer is made (text, logprobs) ends that answer alone, and says so."""

from __future__ import annotations

import asyncio
import json

import pytest

from octavo.engine import output_processor
from octavo.engine.detokenizer import IncrementalDetokenizer

BAD = "eleven"  # the prompt whose answer fails


@pytest.fixture
def broken_text(monkeypatch):
    """The detokenizer fails at the third token after this prompt."""
    append = IncrementalDetokenizer.append
    broken: set[int] = set()
    make = output_processor.IncrementalDetokenizer

    def made(tokenizer, prompt_token_ids, params):
        detokenizer = make(tokenizer, prompt_token_ids, params)
        if tokenizer.decode(prompt_token_ids) == BAD:
            broken.add(id(detokenizer))
        return detokenizer

    def fail(self, token_ids):
        if id(self) in broken and self.num_released_tokens >= 2:
            raise UnicodeError("half a character")
        return append(self, token_ids)

    monkeypatch.setattr(output_processor, "IncrementalDetokenizer", made)
    monkeypatch.setattr(IncrementalDetokenizer, "append", fail)


@pytest.fixture
def broken_logprobs(monkeypatch):
    """Logprobs of this many cannot be made."""
    make = output_processor.as_logprob_dict

    def fail(entry, token_text):
        if len(entry.token_ids) == 4:
            raise ValueError("no logprobs")
        return make(entry, token_text)

    monkeypatch.setattr(output_processor, "as_logprob_dict", fail)


async def check(server, **bad) -> None:
    """Streamed and not, beside others that go on."""
    good = [{"prompt": f"{index}", "max_tokens": 30, "logprobs": 1} for index in range(3)]
    for stream in (False, True):
        *others, failed = await asyncio.gather(
            *(server.post("/v1/completions", **body) for body in good),
            server.post("/v1/completions", max_tokens=30, stream=stream, **bad),
        )
        assert [other.status_code for other in others] == [200] * 3
        assert all(other.json()["usage"]["completion_tokens"] == 30 for other in others)
        if failed.headers["content-type"].startswith("text/event-stream"):
            assert stream
            *_, last = [line for line in failed.text.split("\n") if line]
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert failed.status_code == 500
            error = failed.json()["error"]
        assert error["code"] == "request_failed" and error["message"]
    server.assert_idle()
    assert (await server.post("/v1/completions", prompt="again", max_tokens=3)).status_code == 200


@pytest.mark.usefixtures("broken_text")
async def test_a_detokenizer_that_fails(serve):
    await check(await serve(), prompt=BAD)


@pytest.mark.usefixtures("broken_logprobs")
async def test_logprobs_that_fail(serve):
    await check(await serve(), prompt="5", logprobs=3)
