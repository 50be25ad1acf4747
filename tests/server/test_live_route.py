"""GET /live: what is in a record, and that there is no work for it while nobody looks."""

from __future__ import annotations

import asyncio
import json
from array import array
from contextlib import aclosing

import pytest

from octavo.core.picture import Picture
from octavo.server import live
from octavo.server.errors import ShuttingDownError


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(live, "ANSWER_SECONDS", 0.001)
    monkeypatch.setattr(live, "INTERVAL_SECONDS", 0.004)


def record_of(event: bytes) -> dict:
    assert event.startswith(b"data: ") and event.endswith(b"\n\n")
    return json.loads(event[6:])


async def test_a_record_tells_what_the_engine_does(serve_engine):
    async with serve_engine(num_blocks=8, block_size=4) as (server, _), aclosing(server.front.live.events()) as events:
        record = record_of(await anext(events))
        assert record["model"] == "tiny" and record["alive"] is True
        assert record["tokens_per_second"] == 0.0 and record["first_token_seconds"] is None
        assert record["prefix_cache_hit_rate"] is None
        assert record["requests"] == {"num_waiting": 0, "num_prefill": 0, "num_decode": 0, "shown": []}
        assert record["blocks"] == {"num_blocks": 8, "block_size": 4, "usage": 0.0, "runs": [8, 0, 0]}

        answers = [server.post("/v1/completions", prompt="abcdeab", max_tokens=1, ignore_eos=True) for _ in range(2)]
        for answer in answers:
            assert (await answer).status_code == 200
        await anext(events)
        record = record_of(await anext(events))
        assert record["num_generation_tokens"] == 2 and record["tokens_per_second"] > 0
        assert 0 < record["first_token_seconds"] < 5
        assert record["prefix_cache_hit_rate"] == pytest.approx(6 / 14)
        assert record["blocks"]["runs"][1] == -1  # cached


async def test_running_requests_are_numbers_with_a_phase(serve_engine):
    async with serve_engine(num_blocks=64, block_size=4, max_model_len=250) as (server, _):
        asking = asyncio.ensure_future(
            server.http.post(
                "/v1/completions",
                json={"prompt": "abcde", "max_tokens": 200, "ignore_eos": True},
                headers={"x-request-id": "a-secret-name"},
            )
        )
        async with aclosing(server.front.live.events()) as events:
            async for event in events:
                if (record := record_of(event))["requests"]["num_decode"]:
                    break
        (shown,) = record["requests"]["shown"]
        assert shown["number"] == 1 and shown["phase"] == "decode" and shown["num_prompt_tokens"] == 5
        assert record["blocks"]["runs"][1:3] == [1, 1]
        assert b"a-secret-name" not in event
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_nothing_is_asked_while_nobody_looks(serve_engine):
    async with serve_engine() as (server, client):
        front = server.front
        await asyncio.sleep(0.02)
        assert client.num_pictures == 0
        async with aclosing(front.live.events()) as first, aclosing(front.live.events()) as second:
            both = await asyncio.gather(anext(first), anext(second))
            assert both[0] == both[1] and client.num_pictures == 1  # one clock for all
            assert front.live.num_listeners == 2
        asked = client.num_pictures
        await asyncio.sleep(0.02)
        assert client.num_pictures == asked and front.live.num_listeners == 0
        async with aclosing(front.live.events()) as events:
            await anext(events)
        assert client.num_pictures > asked


async def test_the_end_of_the_server_ends_the_streams(serve_engine):
    async with serve_engine() as (server, _):
        events = server.front.live.events()
        await anext(events)
        server.front.live.close()
        with pytest.raises(StopAsyncIteration):
            await anext(events)
        with pytest.raises(ShuttingDownError):
            await anext(server.front.live.events())


async def test_a_dead_engine_is_told(serve_engine):
    async with serve_engine() as (server, client), aclosing(server.front.live.events()) as events:
        await anext(events)
        client.die()
        async for event in events:
            if not record_of(event)["alive"]:
                break


async def test_what_is_over_is_not_shown(serve_engine):
    async with serve_engine(num_blocks=64, block_size=4, max_model_len=250) as (server, client):
        body = {"prompt": "abcde", "max_tokens": 200, "ignore_eos": True}
        asking = asyncio.ensure_future(server.post("/v1/completions", **body))
        async with aclosing(server.front.live.events()) as events:
            async for event in events:
                if record_of(event)["requests"]["num_decode"]:
                    break
        assert (await asking).status_code == 200
        client.request_picture = lambda: None  # the engine is in a long step, and does not answer
        async with aclosing(server.front.live.events()) as events:  # somebody looks again
            record = record_of(await anext(events))
        assert record["requests"] == {"num_waiting": 0, "num_prefill": 0, "num_decode": 0, "shown": []}
        assert record["blocks"]["runs"] == [64, 0, 0]


async def test_it_is_guarded(serve):
    server = await serve(api_key=["k"])
    assert (await server.http.get("/live")).status_code == 401


def test_runs_join_what_is_alike():
    picture = Picture([], 0, 0, 0, [(1, _ids(0, 1)), (2, _ids(0, 3, 2))], _ids(4))
    assert live.runs(picture, 7) == [1, 1, 2, 1, 1, 1, 2, 2, 1, 1, -1, 0, 2, 0, 0]
    assert live.runs(None, 7) == [7, 0, 0]


def _ids(*block_ids: int) -> bytes:
    return array("i", block_ids).tobytes()
