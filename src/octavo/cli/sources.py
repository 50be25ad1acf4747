"""Where `octavo chat` and `octavo complete` get their answers from: a server, or an engine in this process.

Both take the sampling fields of the HTTP API by name and yield Pieces. They know nothing of terminals.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, Protocol

from octavo.cli.client import Client
from octavo.cli.flags import parse_count, parse_number
from octavo.cli.terminal import Piece
from octavo.config import api_key_of_environment

Message = dict[str, str]  # {"role": …, "content": …}
DEFAULT_URL = "http://127.0.0.1:8000"


class Source(Protocol):
    """`where` says in words who answers."""

    where: str

    def chat(self, messages: list[Message], sampling: dict[str, Any]) -> Iterator[Piece]:
        """The next turn of a conversation."""

    def complete(self, prompt: str, sampling: dict[str, Any]) -> Iterator[Piece]:
        """What follows `prompt`."""

    def close(self) -> None:
        """Frees what the source holds."""


class ServerSource:
    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        self._client = Client(url, api_key)
        self._model = model or self._client.get("/v1/models")["data"][0]["id"]
        self.where = f"{self._model} at {self._client.url}"

    def chat(self, messages: list[Message], sampling: dict[str, Any]) -> Iterator[Piece]:
        return self._stream("/v1/chat/completions", {"messages": messages, **sampling})

    def complete(self, prompt: str, sampling: dict[str, Any]) -> Iterator[Piece]:
        return self._stream("/v1/completions", {"prompt": prompt, **sampling})

    def close(self) -> None:
        """Nothing is held: each request has its own connection."""

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[Piece]:
        body = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}, **body}
        for event in self._client.stream(path, body):
            usage = event.get("usage") or {}
            choice = (event.get("choices") or [{}])[0]
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            yield Piece(text, usage.get("completion_tokens"), choice.get("finish_reason"))


def add_source_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who answers")
    group.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    group.add_argument("--api-key", metavar="KEY", help="the server's key (default: $OCTAVO_API_KEY, $VLLM_API_KEY)")
    group.add_argument("--served-model-name", metavar="NAME", help="which of the server's models (default: its first)")
    text = "run this model in this process instead: a folder, a .gguf file, a hub id or an alias"
    group.add_argument("--model", help=text)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Fields of the HTTP API; those that are not given are left to the server."""
    group = parser.add_argument_group("sampling")
    for name, kind, text in (
        ("max-tokens", parse_count, "most tokens of an answer"),
        ("temperature", parse_number, "0 is greedy"),
        ("top-p", parse_number, "share of probability to sample from, in [0, 1]"),
        ("top-k", parse_count, "number of tokens to sample from; 0: all"),
        (
            "min-p",
            parse_number,
            "least probability relative to the likeliest token, in [0, 1]; chat: 0.1 unless given",
        ),
        ("seed", parse_count, "the same seed gives the same answer"),
    ):
        metavar = "X" if kind is parse_number else "N"
        group.add_argument(f"--{name}", type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text)
    text = "ends an answer; may be repeated"
    group.add_argument("--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS, help=text)


def sampling_from_args(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def open_source(args: argparse.Namespace) -> Source:
    if args.model is not None:
        from octavo.cli.local import LocalSource

        return LocalSource(args.model)
    return ServerSource(args.url, args.api_key or api_key_of_environment(), args.served_model_name)
