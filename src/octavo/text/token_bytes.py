"""What a vocabulary entry spells, in bytes: the decoder of a `tokenizers` backend, read once, as a function of a token.

Every decoder that language models use turns tokens into bytes one by one, and at most drops one blank at the very start
of a text. Decoding is therefore the concatenation of token bytes, read as UTF-8. That makes incremental and whole
decoding equal by construction. This file knows spellings only: no ids, no special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers

from octavo.errors import CheckpointError

BLANK = "▁"  # U+2581, SentencePiece's visible blank
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KNOWN = "ByteLevel, Metaspace, WordPiece, none, and sequences of Replace, ByteFallback, Fuse, ByteLevel and Strip"


@dataclass(frozen=True, slots=True)
class Spelling:
    to_bytes: Callable[[str], bytes]
    drops_leading_blank: bool  # one blank at the start of a whole text is not part of it
    is_byte_level: bool  # entries are written in the byte alphabet; added tokens are not


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, character -> byte: printable Latin-1 stands for itself, the other bytes, in order, for the
    characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def read_spelling(backend: tokenizers.Tokenizer) -> Spelling:
    """Raises CheckpointError for a decoder that is not one of those above."""
    if backend.decoder is None:  # plain words, joined by blanks
        return Spelling(lambda token: b" " + token.encode(), True, False)
    spec: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    kind = spec["type"]
    if kind == "WordPiece":
        return Spelling(_word_piece(spec["prefix"]), True, False)
    if kind == "Metaspace":
        mark = spec["replacement"]
        drops = spec.get("prepend_scheme", "always") != "never"
        return Spelling(lambda token: token.replace(mark, " ").encode(), drops, False)
    return _chain(spec["decoders"] if kind == "Sequence" else [spec])


def _word_piece(prefix: str) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        return token.removeprefix(prefix).encode() if token.startswith(prefix) else b" " + token.encode()

    return to_bytes


def _chain(specs: list[dict[str, Any]]) -> Spelling:
    kinds = [spec["type"] for spec in specs]
    replacements: list[tuple[str, str]] = []
    drops_leading_blank = False
    for index, spec in enumerate(specs):
        match spec:
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if "Fuse" not in kinds[:index]:
                replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if "Fuse" in kinds[:index]:
                drops_leading_blank = bool(start)
            case {"type": "ByteFallback" | "Fuse" | "ByteLevel"}:
                pass
            case _:
                raise CheckpointError(f"tokenizer decoder {json.dumps(spec)} is not supported; known: {_KNOWN}")
    is_byte_level, has_byte_tokens = "ByteLevel" in kinds, "ByteFallback" in kinds
    alphabet = byte_alphabet() if is_byte_level else {}

    def to_bytes(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        if has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if is_byte_level and all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
        return token.encode()

    return Spelling(to_bytes, drops_leading_blank, is_byte_level)
