"""HTTP by hand, as attackers and odd clients send it: whoever does so harms nobody, and gets no more answers than it
has sent requests. (Heads without end and clients that stop: test_connection.py.)"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.server.connection import MAX_PIPELINED
from support.served import ServerProcess

HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n"
VERSION = b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
LAST = VERSION.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")  # with it, an answer ends by the connection's end
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
WEBSOCKET = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    script = str(Path(__file__).with_name("scripted_server.py"))
    server = ServerProcess("--max-model-len", "4096", program=(sys.executable, script, "0.01", "0"))
    server.wait_until_ready()
    yield server
    assert server.complete(prompt=[5, 6], max_tokens=2, seed=1)["choices"][0]["text"] == " one two"
    server.wait_until_idle()
    server.close()


@pytest.fixture(autouse=True)
def unharmed(server: ServerProcess) -> Iterator[None]:
    """Whatever a test sent: the server answers, and has nothing unexpected to tell."""
    yield
    assert statuses(say(server, LAST)) == [200]
    assert "Traceback" not in server.log and "ERROR" not in server.log


def connect(server: ServerProcess) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port))
    client.settimeout(10)
    return client


def say(server: ServerProcess, *pieces: bytes) -> bytes:
    """All that the server answers until it closes; the last piece must make it do so."""
    with connect(server) as client:
        for piece in pieces:
            client.sendall(piece)
            if len(pieces) > 1:
                time.sleep(0.02)  # so that they come one by one
        received = b""
        try:
            while data := client.recv(1 << 16):
                received += data
        except ConnectionResetError:  # it had not read all there was
            pass
        return received


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


def post(body: dict[str, Any], head: bytes = b"") -> bytes:
    data = json.dumps(body).encode()
    return POST + head + b"content-length: %d\r\n\r\n" % len(data) + data


def test_every_answer_has_its_date(server):
    with httpx.Client() as client:
        for _ in range(2):
            before = int(time.time())
            date = client.get(f"{server.url}/version").headers["date"]
            assert before <= parsedate_to_datetime(date).timestamp() <= time.time()
            time.sleep(1.1)  # the next one is of another second


SMALL = {"prompt": [5], "max_tokens": 1}
LONG = {"prompt": [5], "max_tokens": 4000, "ignore_eos": True}

SMUGGLED = b"0\r\n\r\n" + VERSION  # one request to who believes in the one length, two to who believes in the other
LENGTHS = {
    "both": b"content-length: 3\r\ntransfer-encoding: chunked\r\n",
    "both, the other way round": b"transfer-encoding: chunked\r\ncontent-length: 3\r\n",
    "chunked twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
    "not quite chunked": b"transfer-encoding: xchunked\r\n",
    "chunked, but not last": b"transfer-encoding: chunked, identity\r\n",
    "identity": b"transfer-encoding: identity\r\n",
    "a blank before the colon": b"transfer-encoding : chunked\r\n",
    "a vertical tab": b"transfer-encoding: \x0bchunked\r\n",
    "a folded line": b"transfer-encoding:\r\n chunked\r\n",
    "two lengths": b"content-length: 1\r\ncontent-length: 2\r\n",
    "one length twice": b"content-length: 1\r\ncontent-length: 1\r\n",
    "a list of lengths": b"content-length: 1, 1\r\n",
    "negative": b"content-length: -1\r\n",
    "plus": b"content-length: +1\r\n",
    "hexadecimal": b"content-length: 0x1\r\n",
    "beyond 64 bits": b"content-length: 99999999999999999999999\r\n",
    "two numbers": b"content-length: 1 1\r\n",
    "no number": b"content-length: \r\n",
}


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
def test_a_length_with_two_meanings_is_a_400_and_the_end_of_the_connection(server, length):
    received = say(server, POST + length + b"\r\n" + SMUGGLED)
    assert statuses(received) == [400] and b'"invalid_http"' in received


CHUNKS = {
    "negative": b"-1\r\n",
    "hexadecimal": b"0x1\r\na\r\n0\r\n\r\n",
    "beyond 64 bits": b"fffffffffffffffff\r\n",
    "line feeds": b"1\na\n0\n\n",
    "longer than it says": b"1\r\nab0\r\n\r\n",
    "a blank behind the size": b"1 \r\na\r\n0\r\n\r\n",
    "no size": b"\r\n",
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_a_broken_chunk_is_a_400_and_the_end_of_the_connection(server, chunks):
    assert statuses(say(server, POST + b"transfer-encoding: chunked\r\n\r\n" + chunks + VERSION)) == [400]


HEADS = {
    "line feeds": b"GET /version HTTP/1.1\nhost: a\n\n",
    "null byte in a header": HEALTH + b"a: \0\r\n\r\n",
    "null byte in the path": b"GET /\0 HTTP/1.1\r\nhost: a\r\n\r\n",
    "bytes beyond ASCII in the path": b"GET /v\xc3\xa9 HTTP/1.1\r\nhost: a\r\n\r\n",
    "a lone return": HEALTH + b"a: b\rc: d\r\n\r\n",
    "a header without a colon": HEALTH + b"abc\r\n\r\n",
    "a header with a blank in its name": HEALTH + b"a b: c\r\n\r\n",
    "a header without a name": HEALTH + b": c\r\n\r\n",
    "a method that nobody knows": b"BREW /version HTTP/1.1\r\nhost: a\r\n\r\n",
    "a method in small letters": b"get /version HTTP/1.1\r\nhost: a\r\n\r\n",
    "a version that nobody knows": b"GET /version HTTP/1.2\r\nhost: a\r\n\r\n",
    "a tunnel": b"CONNECT a:80 HTTP/1.1\r\nhost: a:80\r\n\r\n",
    "a tunnel with a path": b"CONNECT / HTTP/1.1\r\nhost: a:80\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_a_head_that_is_no_http_is_a_400(server, head):
    received = say(server, head + VERSION)
    assert statuses(received) == [400] and b'"invalid_http"' in received


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "PROPFIND", "PATCH", "PUT", "DELETE", "M-SEARCH", "QUERY"])
def test_a_method_that_a_route_lacks_is_a_405(server, method):
    received = say(server, method.encode() + VERSION.removeprefix(b"GET") + LAST)
    assert statuses(received) == [405, 200] and re.search(rb"\r\nallow: (GET, HEAD|HEAD, GET)\r\n", received)


def test_head_is_get_without_a_body(server):
    received = say(server, b"HEAD" + VERSION.removeprefix(b"GET") + LAST)
    assert statuses(received) == [200, 200] and received.count(b'{"version"') == 1
    refused = say(server, b"HEAD" + POST.removeprefix(b"POST") + b"\r\n" + LAST)
    assert statuses(refused) == [405, 200] and b'{"error"' not in refused


@pytest.mark.parametrize("path", [b"http://other.example/version", b"//version", b"/%2e%2e/version", b"*"])
def test_odd_targets(server, path):
    received = say(server, b"GET " + path + b" HTTP/1.1\r\nhost: a\r\n\r\n" + LAST)
    assert statuses(received) == [200 if path.startswith(b"http") else 404, 200]


def test_http_1_0_has_one_answer(server):
    for head in (b"GET /version HTTP/1.0\r\n\r\n", b"GET /version HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"):
        assert statuses(say(server, head + VERSION)) == [200]
    stream = post({**SMALL, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
    assert b"[DONE]" in say(server, stream)


@pytest.mark.parametrize("offer", [OFFER, WEBSOCKET], ids=["HTTP/2", "WebSocket"])
def test_an_offer_of_another_protocol_is_ignored(server, offer):
    """As Java's client and curl make one with each request, also those that have a body."""
    got = VERSION[:-2] + offer + b"\r\n"
    posted = post(SMALL, offer)
    data = json.dumps(SMALL).encode()
    chunked = POST + offer + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    received = say(server, got + posted + chunked + LAST)
    assert statuses(received) == [200] * 4 and received.count(b'"text":" one"') == 2
    assert statuses(say(server, got, posted[:-9], posted[-9:], chunked[:-9], chunked[-9:], LAST)) == [200] * 4
    assert "pgrade" not in server.log


def test_pipelined_requests_are_answered_in_order(server):
    received = say(server, post(SMALL) + VERSION + post({**SMALL, "max_tokens": 2}) + HEALTH + b"\r\n" + LAST)
    assert statuses(received) == [200] * 5
    order = re.findall(rb'"completion_tokens":\d|"version"', received)
    assert order == [b'"completion_tokens":1', b'"version"', b'"completion_tokens":2', b'"version"']


def test_as_many_as_may_wait_behind_a_request_are_answered(server):
    received = say(server, VERSION + VERSION * (MAX_PIPELINED - 1) + LAST)
    assert statuses(received) == [200] * (MAX_PIPELINED + 1)


def test_more_requests_than_may_wait_end_the_connection(server):
    """They cost memory before they run, and reading them keeps the loop from answering others."""
    with connect(server) as client:
        client.sendall(post({**LONG, "stream": True}))
        received = client.recv(1 << 16)
        client.settimeout(10)
        try:
            client.sendall(VERSION * 100 * MAX_PIPELINED)
            while data := client.recv(1 << 16):
                received += data
        except (ConnectionResetError, BrokenPipeError):
            pass
    assert statuses(received) == [200] and b"[DONE]" not in received


@pytest.mark.parametrize("streams", [True, False])
def test_a_request_ends_with_its_connection_whatever_waits_behind_it(server, streams):
    with connect(server) as client:
        client.sendall(post({**LONG, "stream": streams}) + VERSION * 3)
        deadline = time.monotonic() + 10
        while not server.metric("num_requests_running"):
            assert time.monotonic() < deadline
    deadline = time.monotonic() + 5  # the request alone would take 40 s
    while server.metric("num_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nothing_is_said_in_the_middle_of_an_answer(server):
    """What is no HTTP behind a stream closes it; an error would be read as a part of it."""
    with connect(server) as client:
        client.sendall(post({**LONG, "stream": True}))
        received = client.recv(1 << 16)
        client.sendall(b"this is no HTTP\r\n\r\n")
        try:
            while data := client.recv(1 << 16):
                received += data
        except ConnectionResetError:
            pass
    assert statuses(received) == [200] and b"invalid_http" not in received
    assert say(server, post({**SMALL, "max_tokens": 50}) + b"this is no HTTP\r\n\r\n") == b""


def test_a_body_that_breaks_after_its_answer_gets_no_second_one(server):
    lost = b"POST /nothing HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    assert statuses(say(server, lost, b"no chunk\r\n")) == [404]


def test_a_body_that_comes_after_its_answer_is_passed_over(server):
    late = b"POST /nothing HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n"
    assert statuses(say(server, late, b"hello" + LAST)) == [404, 200]
    assert statuses(say(server, HEALTH + b"content-length: 5\r\n\r\nhello" + LAST)) == [200, 200]


def test_who_asks_before_it_sends_is_told_to(server):
    whole = post(SMALL, b"expect: 100-continue\r\n")
    head, _, body = whole.partition(b"\r\n\r\n")
    assert statuses(say(server, head + b"\r\n\r\n", body, LAST)) == [100, 200, 200]
    too_large = POST + b"expect: 100-continue\r\ncontent-length: 99999999999\r\n\r\n"
    with connect(server) as client:
        client.sendall(too_large)
        assert statuses(client.recv(1 << 16)) == [413]


@pytest.mark.parametrize(
    "body", [post(LONG), post({**LONG, "stream": True}), post(SMALL)[:-1]], ids=["whole", "stream", "cut"]
)
def test_half_a_connection_is_none(server, body):
    with connect(server) as client:
        client.sendall(body)
        client.shutdown(socket.SHUT_WR)
        received = b""
        while data := client.recv(1 << 16):
            received += data
    assert b"[DONE]" not in received
