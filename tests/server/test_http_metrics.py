"""Every answer is counted by route, method and class of status."""

from __future__ import annotations

import contextlib

from prometheus_client.parser import text_string_to_metric_families


async def answers(server, **headers):
    text = (await server.http.get("/metrics", headers=headers)).text
    counters = next(f for f in text_string_to_metric_families(text) if f.name == "http_requests")
    values = {s.name: s for s in counters.samples}
    assert set(values) == {"http_requests_total"}
    return {
        (s.labels["handler"], s.labels["method"], s.labels["status"]): s.value
        for s in counters.samples
        if s.labels["handler"] != "/metrics"
    }


async def test_answers_are_counted_by_route_and_status(serve):
    server = await serve(api_key=["k"], max_num_queued_reqs=1)
    headers = {"authorization": "Bearer k"}
    post = server.http.post
    assert (await post("/v1/completions", json={"prompt": "a"}, headers=headers)).status_code == 200
    assert (await post("/v1/completions", json={"prompt": "a", "stream": True}, headers=headers)).status_code == 200
    assert (await post("/v1/completions", json={"prompt": 3}, headers=headers)).status_code == 400
    assert (await post("/v1/completions", json={"prompt": "a"})).status_code == 401
    assert (await server.http.get("/v1/models/tiny", headers=headers)).status_code == 200
    assert (await server.http.get("/made/up/by-clients", headers=headers)).status_code == 404
    assert (await server.http.get("/v1/completions", headers=headers)).status_code == 405
    assert await answers(server, **headers) == {
        ("/v1/completions", "POST", "2xx"): 2,
        ("/v1/completions", "POST", "4xx"): 1,
        ("/v1/models/{id:path}", "GET", "2xx"): 1,
        ("none", "POST", "4xx"): 1,
        ("none", "GET", "4xx"): 2,
    }


async def test_a_failure_that_nobody_foresaw_is_a_500(serve, monkeypatch):
    server = await serve()

    def fail():
        raise ZeroDivisionError

    monkeypatch.setattr(type(server.llm), "default_sampling_params", property(lambda llm: fail()), raising=False)
    with contextlib.suppress(ZeroDivisionError):  # what Starlette's outermost layer gives the HTTP server
        await server.http.post("/v1/completions", json={"prompt": "a"})
    monkeypatch.undo()
    assert await answers(server) == {("/v1/completions", "POST", "5xx"): 1}
