"""What one body may ask for: bounds on counts, so that no call keeps the event loop from the others."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from octavo.sampling.validate import MAX_ALLOWED_TOKEN_IDS, MAX_STOP_TOKEN_IDS
from octavo.server.completions import MAX_CHOICES
from octavo.server.messages import MANY_PARTS, MIN_MAX_PARTS

TURN = {"role": "user", "content": "a"}
PATHS = {
    "/v1/chat/completions": ("messages", {"max_tokens": 1}),
    "/v1/messages": ("messages", {"max_tokens": 1}),
    "/v1/messages/count_tokens": ("messages", {}),
    "/v1/responses": ("input", {"max_output_tokens": 1}),
    "/tokenize": ("messages", {}),
}


async def refused(server: Any, path: str, body: dict[str, Any]) -> str:
    response = await server.post(path, **body)
    assert response.status_code == 400, response.text
    server.assert_idle()
    return response.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("in_parts", [False, True], ids=["messages", "parts"])
async def test_more_messages_than_tokens_are_refused_unread(server, path, in_parts):
    field, body = PATHS[path]
    kind = "input_text" if path == "/v1/responses" else "text"
    part = {"type": kind, "text": "a"}
    content = [{"role": "user", "content": [part] * MIN_MAX_PARTS}] if in_parts else [TURN] * (MIN_MAX_PARTS + 1)
    assert f"at most {MIN_MAX_PARTS}" in await refused(server, path, {**body, field: content})


@pytest.mark.parametrize("path", PATHS)
async def test_many_messages_are_read_beside_the_event_loop(serve, monkeypatch, path):
    server = await serve(max_model_len=MANY_PARTS * 40)
    threads = []
    render = server.llm.chat_template.render

    def watched(*args: Any, **options: Any) -> str:
        threads.append(threading.current_thread() is threading.main_thread())
        return render(*args, **options)

    monkeypatch.setattr(server.llm.chat_template, "render", watched)
    field, body = PATHS[path]
    turns = [TURN, {"role": "assistant", "content": "b"}]
    for count in (2, MANY_PARTS):
        response = await server.post(path, **body, **{field: turns * (count // 2)})
        assert response.status_code == 200, response.text
    assert threads == [True, False]


async def test_the_choices_of_a_call_are_bounded(server):
    prompts = [[5]] * (MAX_CHOICES // 128 + 1)
    message = await refused(server, "/v1/completions", {"prompt": prompts, "n": 128})
    assert message == f"n is 128; it must be at most {MAX_CHOICES // len(prompts)} for {len(prompts)} prompts"


@pytest.mark.parametrize(
    ("name", "limit"), [("stop_token_ids", MAX_STOP_TOKEN_IDS), ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)]
)
async def test_lists_of_ids_are_bounded(server, name, limit):
    assert f"at most {limit}" in await refused(server, "/v1/completions", {"prompt": "a", name: [5] * (limit + 1)})
    assert (await server.post("/v1/completions", prompt="a", max_tokens=1, **{name: [5] * 4096})).status_code == 200
