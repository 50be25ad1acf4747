"""A whole server in this process, on a scripted engine, and clients of it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from octavo.async_llm import AsyncLLM
from octavo.config import EngineConfig, ServerConfig
from octavo.server.app import create_app
from octavo.text.chat_template import load_chat_template
from octavo.text.tokenizer import Tokenizer
from support.fake_runner import make_engine
from support.front import LocalClient, small_front_end, small_tokenizer
from support.scripted_engine import ScriptedEngine, scripted_llm

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


class Harness:
    """A server, the engine behind it, and two clients of it."""

    def __init__(self, llm: AsyncLLM, engine: ScriptedEngine, config: ServerConfig) -> None:
        self.llm = llm
        self.engine = engine
        self.tokenizer = llm.tokenizer
        self.app = create_app(llm, config)
        self.front = self.app.state.front
        transport = httpx.ASGITransport(app=self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://server")
        self.openai = openai.AsyncOpenAI(
            base_url="http://server/v1", api_key="none", http_client=self.http, max_retries=0
        )

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def leave_while_waiting(self, path: str, **body: Any) -> None:
        """A client that goes before its request has been computed; the engine is to be held."""
        asking = asyncio.ensure_future(self.post(path, **body))
        while not self.engine.live:
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def events(self, path: str, **body: Any) -> list[str]:
        """The data of a stream's events."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        events = response.text.split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") for event in events)
        return [event.removeprefix("data: ") for event in events]

    async def close(self) -> None:
        await self.http.aclose()
        await self.llm.close()

    def assert_idle(self) -> None:
        assert not self.engine.live
        assert self.llm.num_unfinished == 0
        assert self.front.num_calls == 0


Serve = Callable[..., Awaitable[Harness]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Makes servers: `await serve(max_model_len=64, api_key=["k"])`; options are those of engine and server."""
    harnesses: list[Harness] = []

    async def make(
        max_model_len: int = 256,
        chat_template: bool = True,
        defaults: dict[str, Any] | None = None,
        engine_options: dict[str, Any] | None = None,
        tokenizer: Tokenizer | None = None,
        **server_options: Any,
    ) -> Harness:
        llm, engine = scripted_llm(
            max_model_len=max_model_len,
            chat_template=chat_template,
            defaults=defaults,
            tokenizer=tokenizer,
            **(engine_options or {}),
        )
        harnesses.append(Harness(llm, engine, ServerConfig(**server_options)))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        await harness.close()


@pytest.fixture
async def server(serve: Serve) -> Harness:
    return await serve()


@pytest.fixture
async def serve_engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Makes servers on the real control plane (support/fake_runner.py); options are those of `make_engine`."""
    front_end = small_front_end()
    template = load_chat_template(TEMPLATE, small_tokenizer())
    front_end = dataclasses.replace(front_end, chat_template=template)
    monkeypatch.setattr("octavo.async_llm.load_front_end", lambda config: front_end)

    @asynccontextmanager
    async def serve(policy: str = "fcfs", **options: Any) -> AsyncIterator[tuple[Harness, LocalClient]]:
        client = LocalClient(make_engine(policy=policy, **options))
        llm = await AsyncLLM.start(EngineConfig(model="tiny", scheduling_policy=policy), client)
        harness = Harness(llm, client, ServerConfig())  # type: ignore[arg-type]
        try:
            yield harness, client
        finally:
            await harness.close()

    yield serve
