"""text-1: characters of many tokens, by SMOL's own tokenizer, through every route that streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.text.tokenizer import load_tokenizer

TEXT = "😀👩‍👩‍👧‍👦🇨🇭日本語歪✅ď"
HELLO = [{"role": "user", "content": "Hello"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Q", "max_tokens": 90},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 90},
    "/v1/responses": {"input": HELLO, "max_output_tokens": 90},
    "/v1/messages": {"messages": HELLO, "max_tokens": 90},
}


@pytest.fixture
async def smol(serve, smollm2_gguf) -> Any:
    """Says TEXT, in SMOL's tokens, and ends."""
    server = await serve(tokenizer=load_tokenizer(smollm2_gguf))
    said = [*server.tokenizer.encode(TEXT), 2]
    assert len(said) > 2 * len(TEXT)
    server.engine.script = lambda request: said
    return server


def text_of(record: dict[str, Any]) -> str:
    """What an answer, or a chunk or an event of a stream, adds to the text."""
    if "choices" in record:
        choice = record["choices"][0]
        return choice.get("text") or choice.get("delta", choice.get("message", {})).get("content") or ""
    if record.get("type") in ("content_block_delta", "response.output_text.delta"):
        return record["delta"] if isinstance(record["delta"], str) else record["delta"]["text"]
    if record.get("type") == "message":
        return record["content"][0]["text"]
    return record["output"][0]["content"][0]["text"] if record.get("object") == "response" else ""


@pytest.mark.parametrize("path", CALLS)
async def test_text_1_characters_over_several_tokens_come_whole(smol, path):
    whole = await smol.post(path, **CALLS[path])
    assert text_of(whole.json()) == TEXT
    response = await smol.post(path, stream=True, **CALLS[path])
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    deltas = [text_of(json.loads(line)) for line in lines if line != "[DONE]"]
    assert "".join(deltas) == TEXT and "\ufffd" not in response.text
    assert sum(map(bool, deltas)) > 10  # they do come one by one
