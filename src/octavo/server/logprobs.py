"""Logprobs in OpenAI's two shapes: parallel lists for completions, a list of entries for chat.

Knows no request: a position is a token id and its {token id: Logprob}.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from octavo.request import Logprob

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

# None: the first token of a prompt, which nothing precedes.
Position = tuple[int, dict[int, Logprob] | None]

LOWEST = -9999.0  # JSON has no infinity; with --logprobs-mode processed_* a masked token has one


class TokenNames:
    """What stands for a token in an entry: its text, or "token_id:7" where the client asked for that."""

    def __init__(self, tokenizer: Tokenizer, *, as_token_ids: bool) -> None:
        self.tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def name(self, token_id: int, logprob: Logprob | None = None) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self.tokenizer.token_text(token_id)


class CompletionLogprobs:
    """{tokens, token_logprobs, top_logprobs, text_offset}, piece by piece: the offset runs on between the pieces."""

    def __init__(self, names: TokenNames, num_top: int, *, skip_special_tokens: bool, from_prompt: bool) -> None:
        self._names = names
        self._num_top = num_top
        self._hidden = names.tokenizer.special_ids if skip_special_tokens else frozenset()
        self._drop_blank = from_prompt and names.tokenizer.drops_leading_blank
        self._offset = 0  # code points of text before the next token
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def record(self, positions: Iterable[Position]) -> dict[str, list[Any]]:
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, entries in positions:
            own = entries[token_id] if entries else None
            tokens.append(self._names.name(token_id, own))
            token_logprobs.append(finite(own.logprob) if own else None)
            top_logprobs.append(self._top(token_id, entries) if entries else None)
            offsets.append(self._offset)
            self._advance(token_id)
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def _top(self, token_id: int, entries: dict[int, Logprob]) -> dict[str, float]:
        """The most likely tokens, and the token itself where it is not among them."""
        best = most_likely(entries, self._num_top)
        if all(other != token_id for other, _ in best):
            best.append((token_id, entries[token_id]))
        record: dict[str, float] = {}
        for other, logprob in best:  # of two tokens with one text, the likelier
            record.setdefault(self._names.name(other, logprob), finite(logprob.logprob))
        return record

    def _advance(self, token_id: int) -> None:
        if token_id in self._hidden:
            return
        data = self._names.tokenizer.token_bytes(token_id)
        self._offset += len(self._utf8.decode(data.removeprefix(b" ") if self._drop_blank else data))
        self._drop_blank = False


def chat_logprobs(names: TokenNames, positions: Iterable[Position], num_top: int) -> dict[str, Any]:
    content = []
    for token_id, entries in positions:
        assert entries is not None
        entry = _chat_entry(names, token_id, entries[token_id])
        entry["top_logprobs"] = [_chat_entry(names, *each) for each in most_likely(entries, num_top)]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(names: TokenNames, token_id: int, logprob: Logprob) -> dict[str, Any]:
    return {
        "token": names.name(token_id, logprob),
        "logprob": finite(logprob.logprob),
        "bytes": list(names.tokenizer.token_bytes(token_id)),
    }


def prompt_logprobs(
    names: TokenNames, positions: Sequence[dict[int, Logprob] | None]
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's extra: a {token id: entry} for each prompt token, null for the first."""
    return [None if entries is None else _prompt_entry(names, entries) for entries in positions]


def _prompt_entry(names: TokenNames, entries: dict[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(token_id): {
            "logprob": finite(logprob.logprob),
            "rank": logprob.rank,
            "decoded_token": names.name(token_id, logprob),
        }
        for token_id, logprob in entries.items()
    }


def most_likely(entries: dict[int, Logprob], num: int) -> list[tuple[int, Logprob]]:
    return sorted(entries.items(), key=lambda item: (-item[1].logprob, item[0]))[:num]


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)
