"""Hostile requests: valid calls of every route, spoilt one to four times in ways that clients and attackers spoil them.

Owns the calls and the ways. A seed decides all. Knows no server; fuzz.py sends what comes out of here.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from random import Random
from typing import Any

from octavo.server import protocol, protocol_anthropic, protocol_responses, protocol_tools
from octavo.server.fields import Record
from support.hostile_values import CALLS, CONTENT_TYPES, HEADERS, ODD_NAMES, PATHS, PLAUSIBLE, READS, VALUES, Raw


class Pairs(list[tuple[str, Any]]):
    """An object whose keys may come twice."""


@dataclasses.dataclass(slots=True)
class Hostile:
    data: bytes
    head_only: bool = False  # the answer has no body


def _all_names() -> tuple[str, ...]:
    names: set[str] = set()
    for module in (protocol, protocol_anthropic, protocol_responses, protocol_tools):
        for record in vars(module).values():
            if isinstance(record, type) and issubclass(record, Record) and dataclasses.is_dataclass(record):
                names |= {field.name for field in dataclasses.fields(record)}
                names |= record.SAMPLING | record.NO_OPS | set(record.LATER)
    return tuple(sorted(names))


NAMES = _all_names()


def write(value: Any) -> str:
    """JSON, as far as `value` is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{write(each)}" for key, each in value) + "}"
    if isinstance(value, dict):
        return write(Pairs(value.items()))
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


class Mutator:
    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def next(self) -> Hostile:
        random = self._random
        if random.random() < 0.06:
            return self._read()
        path, call = random.choice(CALLS)
        body: Any = _editable(call)
        for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
            self._change(body)
        if random.random() < 0.02:
            body = random.choice(VALUES)
        data = write(body).encode("utf-8", "surrogatepass")
        if random.random() < 0.12:
            data = self._spoil(data)
        return self._request(path, data)

    # Values

    def _change(self, body: Any) -> None:
        """Change one place of it, somewhere."""
        random = self._random
        place = body
        inner = [value for value in _children(place) if isinstance(value, list) and value]
        while inner and random.random() < 0.5:
            place = random.choice(inner)
            inner = [value for value in _children(place) if isinstance(value, list) and value]
        if isinstance(place, Pairs):
            self._change_object(place)
        elif place:
            self._change_list(place)

    def _change_object(self, place: Pairs) -> None:
        random = self._random
        kind = random.random()
        if kind < 0.4 or not place:
            name = random.choice(ODD_NAMES) if random.random() < 0.15 else random.choice(NAMES)
            place.append((name, self._value_of(name)))
            return
        index = random.randrange(len(place))
        name, value = place[index]
        if kind < 0.8:
            place[index] = (name, self._value_of(name, value))
        elif kind < 0.87:
            del place[index]
        elif kind < 0.94:
            place.append((name, self._value(value)))
        else:
            place[index] = (random.choice((name.upper(), name[:-1], name + " ", name * 2)), value)

    def _change_list(self, place: list[Any]) -> None:
        random = self._random
        index, kind = random.randrange(len(place)), random.random()
        if kind < 0.6:
            place[index] = self._value(place[index])
        elif kind < 0.75:
            place.insert(index, self._value())
        elif kind < 0.9:
            place *= random.choice((0, 2, 7))
        else:
            del place[index]

    def _value_of(self, name: str, old: Any = None) -> Any:
        """Often one that may be right, so that the others are reached."""
        if name in PLAUSIBLE and self._random.random() < 0.6:
            return _editable(self._random.choice(PLAUSIBLE[name]))
        return self._value(old)

    def _value(self, old: Any = None) -> Any:
        random = self._random
        if random.random() < 0.25:
            if isinstance(old, bool):
                return int(old)
            if isinstance(old, (int, float)):
                return random.choice((-old, str(old), bool(old), float(old), old + 0.5, old * 10**9, [old], -old - 1))
            if isinstance(old, str) and not isinstance(old, Raw):
                return random.choice(
                    (old[::-1], [old], old * 50, old.encode().hex(), {"a": old}, old.title(), old + "\0")
                )
            if isinstance(old, list):
                return random.choice((None, [old], Pairs([("a", old)]), write(old)))
        return _editable(random.choice(VALUES))

    # Bytes

    def _spoil(self, data: bytes) -> bytes:
        random = self._random
        at = random.randrange(len(data) + 1)
        ways: tuple[Callable[[], bytes], ...] = (
            lambda: data[:at],
            lambda: data[:at] + bytes([random.randrange(256)]) + data[at + 1 :],
            lambda: data[:at] + bytes([random.randrange(256)]) + data[at:],
            lambda: (
                data[:at]
                + random.choice((b"\xed\xa0\xbd", b"\xc0\x80", b"\xff", b"\xf5\x80\x80\x80", b"\0"))
                + data[at:]
            ),
            lambda: data + random.choice((b" ", b"x", data, b"\0", b",", b"\n{}", b"//", b"]" * 9)),
            lambda: random.choice((b"\xef\xbb\xbf", b"\xff\xfe", b" \n\t", b"\0", b")]}'\n", b"\x1f\x8b")) + data,
            lambda: data.decode("utf-8", "replace").encode(
                random.choice(("utf-16", "utf-32", "gbk", "utf-7")), "replace"
            ),
            lambda: random.choice((b"[", b'{"a":', b"{")) * random.choice((1, 50, 20_000)) + data,
            lambda: gzip.compress(data, mtime=0),
            lambda: data.replace(b":", b"=").replace(b"{", b""),
        )
        return random.choice(ways)()

    # HTTP

    def _request(self, path: str, data: bytes) -> Hostile:
        """Mostly plain; sometimes the head is spoilt too."""
        random = self._random
        content_type = b"application/json"
        if random.random() < 0.05:
            content_type = random.choice(CONTENT_TYPES)
        head = b"content-type: " + content_type + b"\r\n"
        if random.random() < 0.08:
            head += random.choice(HEADERS)
        method = "POST"
        if random.random() < 0.03:
            method = random.choice(("PUT", "GET", "PATCH", "DELETE", "OPTIONS", "HEAD"))
        if random.random() < 0.03:
            path = self._path(path)
        if random.random() < 0.1:
            return self._in_chunks(method, path, head, data)
        return _hostile(method, path, head + b"content-length: %d\r\n" % len(data), data)

    def _in_chunks(self, method: str, path: str, head: bytes, data: bytes) -> Hostile:
        random = self._random
        pieces = []
        while data:
            size = random.choice((1, 7, 100, 10**6))
            pieces.append(b"%x\r\n%s\r\n" % (len(data[:size]), data[:size]))
            data = data[size:]
            if len(pieces) > 50:
                pieces.append(b"%X;a=b\r\n%s\r\n" % (len(data), data) if data else b"")
                data = b""
        trailer = random.choice((b"", b"x-trailer: a\r\n"))
        return _hostile(
            method, path, head + b"transfer-encoding: chunked\r\n", b"".join(pieces) + b"0\r\n" + trailer + b"\r\n"
        )

    def _path(self, path: str) -> str:
        return self._random.choice(PATHS).replace("{path}", path)

    def _read(self) -> Hostile:
        random = self._random
        path = random.choice(READS)
        if random.random() < 0.4:
            path = self._path(path)
        method = random.choice(("GET", "GET", "GET", "HEAD", "POST", "DELETE", "OPTIONS"))
        return _hostile(method, path, random.choice(HEADERS) if random.random() < 0.5 else b"", b"")


def hostile_call(path: str, body: Any) -> Hostile:
    """A POST with this body and nothing odd about its head."""
    data = write(_editable(body)).encode("utf-8", "surrogatepass")
    return _hostile("POST", path, b"content-type: application/json\r\ncontent-length: %d\r\n" % len(data), data)


def _hostile(method: str, path: str, head: bytes, data: bytes) -> Hostile:
    start = f"{method} {path} HTTP/1.1\r\n".encode()
    return Hostile(start + b"host: octavo\r\n" + head + b"\r\n" + data, head_only=method == "HEAD")


def _editable(value: Any) -> Any:
    """A copy; objects become Pairs."""
    if isinstance(value, dict):
        return Pairs((key, _editable(each)) for key, each in value.items())
    return [_editable(each) for each in value] if isinstance(value, list) else value


def _children(place: Any) -> list[Any]:
    return [value for _, value in place] if isinstance(place, Pairs) else list(place)
