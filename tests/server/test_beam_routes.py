"""use_beam_search on completions and chat, over the real control plane and a made-up model."""

from __future__ import annotations

import json

import pytest

from octavo.request import BeamSearchParams
from support.beams import search_alone

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
PROMPT = [7, 8]
END = [0]


async def test_the_choices_are_the_best_beams(serve_engine):
    expected = search_alone(PROMPT, BeamSearchParams(beam_width=4, max_tokens=6), END)
    async with serve_engine() as (server, client):
        body = {"prompt": PROMPT, "use_beam_search": True, "beam_width": 4, "n": 2, "max_tokens": 6}
        answer = (await server.post(COMPLETIONS, **body, return_token_ids=True)).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == [beam.token_ids for beam in expected[:2]]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"]["prompt_tokens"] == 2
        assert answer["usage"]["completion_tokens"] == sum(len(beam.token_ids) for beam in expected[:2])
        streamed = await server.post(COMPLETIONS, **body, stream=True)
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        text = {event["choices"][0]["index"]: event["choices"][0]["text"] for event in events}
        assert text == {choice["index"]: choice["text"] for choice in answer["choices"]}
        assert client.stats.num_running == 0


async def test_n_is_the_width_where_none_is_given(serve_engine):
    expected = search_alone(PROMPT, BeamSearchParams(beam_width=3, max_tokens=4, length_penalty=0.0), END)
    async with serve_engine() as (server, _):
        body = {"prompt": PROMPT, "use_beam_search": True, "n": 3, "max_tokens": 4, "length_penalty": 0}
        answer = (await server.post(COMPLETIONS, **body, return_token_ids=True)).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [beam.token_ids for beam in expected]


async def test_a_chat_searches_the_rest_of_the_context(serve_engine):
    async with serve_engine(max_model_len=20) as (server, _):
        messages = [{"role": "user", "content": "Hello"}]
        answer = (await server.post(CHAT, messages=messages, use_beam_search=True, n=2, ignore_eos=True)).json()
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 2 * (20 - answer["usage"]["prompt_tokens"])


@BOTH
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 2}, "beam_width"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "beam_width": 0}, "beam_width"),
        ({"use_beam_search": True, "beam_width": True}, "beam_width"),
        ({"use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width"),
        ({"use_beam_search": True, "beam_width": 9}, "beam_width"),  # more than max_num_seqs
        ({"use_beam_search": True, "length_penalty": "1"}, "length_penalty"),
        ({"use_beam_search": True, "early_stopping": "maybe"}, "early_stopping"),
        ({"use_beam_search": True, "early_stopping": 1}, "early_stopping"),  # once ended the engine's process
        ({"use_beam_search": True, "top_p": 0.9}, "top_p"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
    ],
)
async def test_what_a_search_cannot_be_asked(serve_engine, path, fields, param):
    body = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hello"}]}
    async with serve_engine(max_num_seqs=8) as (server, _):
        response = await server.post(path, **body, **fields, max_tokens=2)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert (await server.post(path, **body, max_tokens=1)).status_code == 200


async def test_logprobs_are_refused(serve_engine):
    async with serve_engine() as (server, _):
        response = await server.post(COMPLETIONS, prompt=PROMPT, use_beam_search=True, logprobs=1)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")
