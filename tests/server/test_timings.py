"""How long the phases of a call took, for clients that ask."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.request import CompletionOutput, RequestMetrics, RequestOutput
from octavo.server.engine_call import Usage
from octavo.server.timings import Timings

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
NAMES = {
    "queue_seconds",
    "prefill_seconds",
    "decode_seconds",
    "total_seconds",
    "cached_tokens",
    "prefill_tokens_per_second",
    "tokens_per_second",
}


def timings_of(*calls: tuple[RequestMetrics, int, int, int, int]) -> dict[str, Any]:
    """Of requests with (metrics, tokens of the prompt, of those cached, samples, tokens of each)."""
    usage, timings = Usage(), Timings()
    for index, (metrics, num_prompt, num_cached, num_samples, num_tokens) in enumerate(calls):
        samples = [CompletionOutput(i, "", [0] * num_tokens) for i in range(num_samples)]
        output = RequestOutput(str(index), None, [0] * num_prompt, samples, True, None, num_cached, metrics)
        usage.count(index, output)
        timings.count(output)
    return timings.record(usage, sum(num_samples for _, _, _, num_samples, _ in calls))


def test_phases_and_rates_of_a_request():
    assert timings_of((RequestMetrics(100.0, 100.5, 102.5, 106.5), 50, 10, 1, 9)) == {
        "queue_seconds": 0.5,
        "prefill_seconds": 2.0,
        "decode_seconds": 4.0,
        "total_seconds": 6.5,
        "cached_tokens": 10,
        "prefill_tokens_per_second": 20.0,
        "tokens_per_second": 2.0,
    }


def test_a_phase_ends_with_the_first_request_and_the_call_with_the_last():
    first, second = RequestMetrics(100.0, 101.0, 103.0, 104.0), RequestMetrics(100.0, 102.0, 104.0, 107.0)
    record = timings_of((first, 4, 0, 2, 3), (second, 4, 0, 1, 9))
    assert (record["queue_seconds"], record["prefill_seconds"], record["decode_seconds"]) == (1.0, 2.0, 4.0)
    assert record["tokens_per_second"] == (2 * (3 - 1) + (9 - 1)) / 4


def test_what_never_ran_has_waited_and_a_clock_set_back_takes_no_time():
    waited = timings_of((RequestMetrics(100.0, None, None, 103.0), 4, 0, 1, 0))
    assert (waited["queue_seconds"], waited["prefill_seconds"], waited["tokens_per_second"]) == (3.0, 0.0, 0.0)
    back = timings_of((RequestMetrics(100.0, 90.0, 91.0, 92.0), 4, 0, 1, 1))
    assert back["queue_seconds"] == back["total_seconds"] == 0.0
    scored = timings_of((RequestMetrics(100.0, 101.0, None, 103.0), 4, 0, 1, 0))
    assert (scored["prefill_seconds"], scored["decode_seconds"]) == (2.0, 0.0)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_timings_on_the_other_routes(serve_engine, path):
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 4} if path == "/v1/messages" else {"input": "Hello"}
    async with serve_engine(max_model_len=16) as (server, _):
        whole = (await server.post(path, **body, timings=True, ignore_eos=True)).json()
        assert set(whole["timings"]) == NAMES
        for asked in (True, False):
            response = await server.post(path, **body, timings=asked, ignore_eos=True, stream=True)
            lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
            records = [json.loads(line) for line in lines]
            ends = [r for r in records if r["type"] in ("message_delta", "response.completed", "response.incomplete")]
            (end,) = ends
            assert set(end.get("response", end).get("timings", ())) == (NAMES if asked else set())
            assert response.text.count('"timings"') == asked
        assert "timings" not in (await server.post(path, **body, ignore_eos=True)).json()


@pytest.mark.parametrize(("path", "body"), [(PATH, {"prompt": "a"}), (CHAT, {"messages": HELLO})], ids=str)
async def test_timings_come_with_the_answer_and_in_the_last_chunk(serve_engine, path, body):
    async with serve_engine() as (server, _):
        response = await server.post(path, **body, max_tokens=4, timings=True, ignore_eos=True)
        timings = response.json()["timings"]
        assert set(timings) == NAMES and all(value >= 0 for value in timings.values())
        phases = timings["queue_seconds"] + timings["prefill_seconds"] + timings["decode_seconds"]
        assert phases == pytest.approx(timings["total_seconds"], abs=1e-5)
        *chunks, last, done = await server.events(path, **body, max_tokens=4, timings=True, ignore_eos=True)
        assert done == "[DONE]" and not any("timings" in json.loads(chunk) for chunk in chunks)
        assert json.loads(last)["choices"] == [] and set(json.loads(last)["timings"]) == NAMES


async def test_nobody_gets_timings_unasked_and_usage_shares_their_chunk(server):
    for body in ({}, {"timings": False}):
        assert "timings" not in (await server.post(PATH, prompt="a", **body)).json()
        assert not any("timings" in data for data in await server.events(PATH, prompt="a", **body))
    *_, last, _ = await server.events(PATH, prompt="a", timings=True, stream_options={"include_usage": True})
    assert {"usage", "timings"} <= set(json.loads(last))
    response = await server.post(PATH, prompt=["a", "b"], n=2, timings=True)
    assert set(response.json()["timings"]) == NAMES
    assert (await server.post(PATH, prompt="a", timings=1)).json()["error"]["param"] == "timings"
