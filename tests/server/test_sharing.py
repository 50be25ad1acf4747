"""What concerns other calls too: whose a call is, how urgent it is, and the prefix cache that all share."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

COMPLETIONS, CHAT, RESET = "/v1/completions", "/v1/chat/completions", "/reset_prefix_cache"
BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def asking(path: str, text: str) -> dict[str, Any]:
    return {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}


# ── Whose a call is ──────────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
async def test_the_user_is_who_the_body_says(server, path):
    for fields in ({"user": "u"}, {}, {"user": None}, {"user": ""}):
        for stream in ({}, {"stream": True}):
            response = await server.post(path, **asking(path, "Hello"), n=2, max_tokens=1, **fields, **stream)
            assert response.status_code == 200
    assert [request.user for request in server.engine.requests] == ["u"] * 4 + [None] * 12


@BOTH
async def test_else_it_is_a_name_of_the_key_that_does_not_tell_the_key(serve, path):
    server, other_server = await serve(api_key=["secret-1", "secret-2"]), await serve(api_key=["secret-1"])

    async def user_of(key: str, server: Any = server, **fields: Any) -> str:
        header = {"authorization": f"Bearer {key}"}
        body = {**asking(path, "Hello"), "max_tokens": 1, **fields}
        assert (await server.http.post(path, headers=header, json=body)).status_code == 200
        return server.engine.requests[-1].user

    first, second = await user_of("secret-1"), await user_of("secret-2")
    assert first == await user_of("secret-1") and first != second
    assert first.startswith("key-") and len(first) == 20 and "secret" not in first
    assert await user_of("secret-1", user="u") == "u"
    assert await user_of("secret-1", other_server) != first  # no list of guessed keys can be held against it


@BOTH
async def test_users_take_turns_under_the_fair_policy(serve_engine, path):
    async with serve_engine("fair", max_num_seqs=1) as (server, client):
        ended: list[str] = []

        async def ask(user: str) -> None:
            response = await server.post(path, **asking(path, "ab"), user=user, max_tokens=2, ignore_eos=True)
            assert response.status_code == 200, response.text
            ended.append(user)

        many = [asyncio.create_task(ask("many")) for _ in range(6)]
        while client.stats.num_waiting != 5:
            await asyncio.sleep(0)
        await asyncio.gather(ask("one"), *many)
        assert ended.index("one") <= 2


# ── How urgent it is ─────────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
async def test_the_priority_goes_along(serve, path):
    server = await serve(engine_options={"scheduling_policy": "priority"})
    for stream in (False, True):
        response = await server.post(path, **asking(path, "Hello"), max_tokens=1, priority=-3, stream=stream)
        assert response.status_code == 200
    assert [request.priority for request in server.engine.requests] == [-3, -3]


@BOTH
async def test_who_is_more_urgent_preempts_who_came_before_and_both_get_what_they_get_alone(serve_engine, path):
    async with serve_engine("priority", num_blocks=6) as (server, client):
        scheduler = client.engine.scheduler

        async def ask(text: str, priority: int) -> dict[str, Any]:
            body = {**asking(path, text), "max_tokens": 12, "ignore_eos": True, "seed": 1, "return_token_ids": True}
            return (await server.post(path, **body, priority=priority)).json()["choices"][0]["token_ids"]

        texts = {5: "aabbccd", -1: "bbccdde"}
        alone = {priority: await ask(text, priority) for priority, text in texts.items()}
        assert scheduler.num_preemptions == 0
        low = asyncio.create_task(ask(texts[5], 5))
        while client.stats.num_running != 1:
            await asyncio.sleep(0)
        high = await ask(texts[-1], -1)
        assert not low.done() and scheduler.num_preemptions == 1
        assert {5: await low, -1: high} == alone


# ── The prefix cache ─────────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
async def test_batch_2_cached_tokens_are_in_every_form_of_usage(server, path):
    server.engine.num_cached_tokens = 3
    body = {**asking(path, "Hello world"), "max_tokens": 3, "n": 2}  # the samples share one prompt
    usage = (await server.post(path, **body)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    for options in ({}, {"continuous_usage_stats": True}):
        events = await server.events(path, **body, stream_options={"include_usage": True, **options})
        *chunks, last = map(json.loads, events[:-1])
        assert last["choices"] == [] and last["usage"] == usage
        for chunk in chunks:
            assert ("usage" in chunk) == bool(options)
            assert not options or chunk["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_cached_tokens_are_summed_over_prompts(server):
    server.engine.num_cached_tokens = 3
    response = await server.post(COMPLETIONS, prompt=["Hello", "world"], max_tokens=1)
    assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


@BOTH
async def test_a_reset_makes_the_next_call_compute_its_prompt_and_say_the_same(serve_engine, path):
    async with serve_engine() as (server, _):

        async def ask() -> tuple[list[int], int]:
            body = {**asking(path, "abcdeabcdeabc"), "max_tokens": 6, "seed": 1, "return_token_ids": True}
            answer = (await server.post(path, **body)).json()
            return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        (cold, _), warm = await ask(), await ask()
        assert warm == (cold, 12)
        response = await server.http.post(RESET)
        assert (response.status_code, response.content) == (200, b"")
        assert await ask() == (cold, 0)
        assert await ask() == (cold, 12)


async def test_the_reset_is_guarded_like_any_route(serve, server):
    guarded = await serve(api_key=["k"])
    assert (await guarded.http.post(RESET)).status_code == 401
    assert guarded.engine.num_resets == 0
    assert (await guarded.http.post(RESET, headers={"authorization": "Bearer k"})).status_code == 200
    assert guarded.engine.num_resets == 1
    assert (await server.http.get(RESET)).status_code == 405
    server.engine.die()
    assert (await server.http.post(RESET)).status_code == 503
