"""Spans: what a collector gets, whose trace they are in, and that neither a missing collector nor SDK does harm."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from octavo.cli.main import main
from octavo.errors import ConfigError
from octavo.server import traces

SECRET = "xyzzy-plugh"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LATENCIES = {
    "gen_ai.latency.e2e",
    "gen_ai.latency.time_in_queue",
    "gen_ai.latency.time_in_model_prefill",
    "gen_ai.latency.time_in_model_decode",
    "gen_ai.latency.time_in_model_inference",
    "gen_ai.latency.time_to_first_token",
}


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP. `status` is what it answers."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.status = 200
        self.bodies: list[tuple[str, bytes]] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def spans(self) -> list[dict[str, Any]]:
        found = []
        for path, body in self.bodies:
            assert path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    found.append(
                        {
                            "name": span.name,
                            "service": about["service.name"],
                            "trace": span.trace_id.hex(),
                            "id": span.span_id.hex(),
                            "parent": span.parent_span_id.hex(),
                            "kind": span.kind,
                            "begin": span.start_time_unix_nano,
                            "end": span.end_time_unix_nano,
                            "status": (span.status.code, span.status.message),
                            "attributes": {pair.key: _value(pair.value) for pair in span.attributes},
                        }
                    )
        return found

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append((self.path, body))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.stop()


@pytest.fixture(autouse=True)
def quiet_sdk() -> Iterator[None]:
    logger = logging.getLogger("opentelemetry")
    level = logger.level
    yield
    logger.setLevel(level)


def spans_after_all(server, collector) -> dict[str, dict[str, Any]]:
    """By name; one of each."""
    server.front.tracer.close()
    spans = {span["name"]: span for span in collector.spans}
    assert len(spans) == len(collector.spans)
    return spans


async def test_a_request_is_a_span_with_its_phases(serve, collector):
    server = await serve(otlp_traces_endpoint=collector.url)
    server.engine.num_cached_tokens = 2
    body = {"prompt": SECRET, "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 7, "ignore_eos": True}
    headers = {"x-request-id": "r1", "traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
    before = time.time_ns()
    response = await server.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    spans = spans_after_all(server, collector)
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    root = spans["llm_request"]
    assert (root["trace"], root["parent"], root["kind"]) == (TRACE, PARENT, 2)  # SERVER
    assert root["service"] == "octavo" and root["status"] == (0, "")
    assert before - 10**9 < root["begin"] < root["end"] < time.time_ns() + 10**9
    attributes = dict(root["attributes"])
    latencies = {name: attributes.pop(name) for name in LATENCIES}
    prompt_tokens = response.json()["usage"]["prompt_tokens"]
    assert attributes == {
        "gen_ai.request.id": "cmpl-r1",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.prompt_tokens": prompt_tokens,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 2,
    }
    assert latencies["gen_ai.latency.e2e"] == pytest.approx((root["end"] - root["begin"]) / 1e9, abs=1e-5)
    parts = [latencies[f"gen_ai.latency.time_in_{name}"] for name in ("queue", "model_prefill", "model_decode")]
    assert sum(parts) == pytest.approx(latencies["gen_ai.latency.e2e"])
    assert [spans[name]["begin"] for name in ("queue", "prefill", "decode")] == [
        root["begin"],
        spans["queue"]["end"],
        spans["prefill"]["end"],
    ]
    assert spans["decode"]["end"] == root["end"]
    assert {span["parent"] for span in spans.values()} == {PARENT, root["id"]}
    assert all(SECRET.encode() not in body for _, body in collector.bodies)


async def test_an_embedding_is_a_span_without_a_decode(serve, collector):
    server = await serve(otlp_traces_endpoint=collector.url)
    server.engine.num_cached_tokens = 1
    response = await server.http.post("/v1/embeddings", json={"input": [5, 6]}, headers={"x-request-id": "r1"})
    assert response.status_code == 200
    spans = spans_after_all(server, collector)
    assert set(spans) == {"llm_request", "queue", "prefill"}
    attributes = dict(spans["llm_request"]["attributes"])
    latencies = {name for name in attributes if name in LATENCIES}
    assert latencies == {
        "gen_ai.latency.e2e",
        "gen_ai.latency.time_in_queue",
        "gen_ai.latency.time_in_model_prefill",
    }
    assert {name: value for name, value in attributes.items() if name not in latencies} == {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.request.id": "embd-r1",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.prompt_tokens": 2,
        "gen_ai.usage.completion_tokens": 0,
        "gen_ai.usage.cache_read.input_tokens": 1,
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_every_route_that_generates_is_traced(serve, collector, path):
    server = await serve(otlp_traces_endpoint=f"{collector.url}/v1/traces")
    said = {"input": "a"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "a"}]}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    response = await server.post(path, model="tiny", stream=True, **said, **{limit: 3})
    assert response.status_code == 200
    attributes = spans_after_all(server, collector)["llm_request"]["attributes"]
    assert attributes["gen_ai.usage.completion_tokens"] == 3
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]


async def test_each_prompt_of_a_call_has_a_span(serve, collector):
    server = await serve(otlp_traces_endpoint=collector.url)
    assert (await server.post("/v1/completions", prompt=["a", "b"], max_tokens=1)).status_code == 200
    server.front.tracer.close()
    ids = {s["attributes"]["gen_ai.request.id"][-2:] for s in collector.spans if s["name"] == "llm_request"}
    assert ids == {"-0", "-1"}


async def test_what_is_refused_has_no_span(serve, collector):
    server = await serve(otlp_traces_endpoint=collector.url)
    assert (await server.post("/v1/completions", prompt=[5] * 10_000)).status_code == 400
    assert (await server.post("/v1/embeddings", input=[5] * 10_000)).status_code == 400
    server.front.tracer.close()
    assert collector.spans == []


async def test_a_request_that_fails(serve, collector):
    server = await serve(otlp_traces_endpoint=collector.url)
    token_id = server.tokenizer.encode("a")[-1]
    server.engine.fail[token_id] = f"it broke at {SECRET}"
    assert (await server.post("/v1/completions", prompt=[token_id])).status_code == 500
    root = spans_after_all(server, collector)["llm_request"]
    assert root["status"] == (2, "request_failed")
    assert root["attributes"]["error.type"] == "request_failed"
    assert root["attributes"]["gen_ai.response.finish_reasons"] == ["error"]
    assert all(SECRET.encode() not in body for _, body in collector.bodies)


async def test_a_request_whose_client_goes_while_it_waits(serve, collector):
    server = await serve(otlp_traces_endpoint=collector.url)
    server.engine.hold()
    await server.leave_while_waiting("/v1/completions", prompt="a")
    spans = spans_after_all(server, collector)
    assert set(spans) == {"llm_request", "queue"}
    assert spans["llm_request"]["attributes"]["gen_ai.response.finish_reasons"] == ["abort"]
    assert not LATENCIES - {"gen_ai.latency.e2e", "gen_ai.latency.time_in_queue"} & set(
        spans["llm_request"]["attributes"]
    )


async def test_what_the_caller_does_not_record_is_not_recorded_here(serve, collector):
    server = await serve(otlp_traces_endpoint=collector.url)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    response = await server.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert response.status_code == 200
    server.front.tracer.close()
    assert collector.bodies == []


@pytest.mark.parametrize("traceparent", ["nonsense", "00-" + "0" * 32 + "-" + PARENT + "-01"])
async def test_a_broken_context_begins_a_new_trace(serve, collector, traceparent):
    server = await serve(otlp_traces_endpoint=collector.url)
    headers = {"traceparent": traceparent}
    assert (await server.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)).status_code == 200
    root = spans_after_all(server, collector)["llm_request"]
    assert root["parent"] == "" and root["trace"] != "0" * 32


async def test_a_collector_that_is_away_harms_nobody_and_is_told_once(serve, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.05")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = await serve(otlp_traces_endpoint=f"http://127.0.0.1:{port}")

    async def ask_until(number_of_lines: int) -> None:
        while sum("traces" in record.message for record in caplog.records) < number_of_lines:
            assert (await server.post("/v1/completions", prompt="a", max_tokens=1)).status_code == 200
            await asyncio.sleep(0.01)

    await ask_until(1)
    for _ in range(10):
        assert (await server.post("/v1/completions", prompt="a", max_tokens=1)).status_code == 200
        await asyncio.sleep(0.02)
    collector = Collector(port)
    try:
        await ask_until(2)
        server.front.tracer.close()
        assert collector.spans
    finally:
        collector.stop()
    messages = [record.getMessage() for record in caplog.records]
    where = f"http://127.0.0.1:{port}"
    assert messages == [
        f"traces cannot be sent to {where}: they are dropped until they can",
        f"traces are sent to {where} again",
    ]


async def test_a_collector_that_never_answers_does_not_hold_up_the_end(serve, monkeypatch):
    monkeypatch.setattr(traces, "CLOSE_SECONDS", 0.1)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        server = await serve(otlp_traces_endpoint=f"http://127.0.0.1:{deaf.getsockname()[1]}")
        assert (await server.post("/v1/completions", prompt="a", max_tokens=1)).status_code == 200
        server.front.tracer.close()  # while the thread that sends waits for an answer


async def test_the_spans_of_a_slow_reader_end_with_the_engines_work(serve, collector):
    server = await serve(otlp_traces_endpoint=collector.url)
    from octavo.request import SamplingParams

    params = SamplingParams(max_tokens=2, ignore_eos=True)
    outputs = server.front.tracer.follow(server.llm.generate("a", params, "r"), {"headers": []}, "r", params)
    async with aclosing(outputs):
        async for output in outputs:
            while not output.metrics.finished_time:
                await asyncio.sleep(0.001)
            finished = output.metrics.finished_time
            await asyncio.sleep(0.05)
    root = spans_after_all(server, collector)["llm_request"]
    assert root["end"] == traces.nanoseconds(finished)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://collector:4317", "http://", "traces"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint, capsys):
    assert main(["serve", "m", "--otlp-traces-endpoint", endpoint]) == 2
    assert f"--otlp-traces-endpoint: otlp_traces_endpoint is {endpoint!r}; it must be a URL such as http" in (
        capsys.readouterr().err
    )


def test_without_the_sdk_the_option_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(traces, "PACKAGES", ("opentelemetry.no_such_part",))
    assert main(["serve", "m", "--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1:4318"]) == 2
    assert "pip install 'octavo[otel]'" in capsys.readouterr().err
    monkeypatch.setattr(traces, "PACKAGES", ("no_such_package.sdk",))
    with pytest.raises(ConfigError, match="OpenTelemetry is not installed"):
        traces.check_traces("http://127.0.0.1:4318")
    traces.check_traces(None)


def test_without_the_option_nothing_is_imported():
    script = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
from octavo.config import ServerConfig
from octavo.server.app import create_app
from support.scripted_engine import scripted_llm

async def run():
    llm, _ = scripted_llm()
    create_app(llm, ServerConfig())
    await llm.close()

asyncio.run(run())
print(json.dumps([name for name in sys.modules if name.startswith(("opentelemetry", "google", "requests"))]))
"""
    tests = str(Path(__file__).parent.parent)
    done = subprocess.run([sys.executable, "-c", script, tests], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
