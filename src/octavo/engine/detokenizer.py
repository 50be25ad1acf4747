"""One request's text, token by token, and where a stop string cuts it.

Owns the released text, what is held back, and which tokens a stop string leaves. It knows a tokenizer and the request's
parameters; of engines, steps and finish reasons it knows nothing.

    text so far:   |<---------- released ---------->|<-- window -->|<-- bytes of an incomplete character -->|
                                                     held back: may yet become a stop string
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from octavo.request import SamplingParams

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Feed it the output's tokens with `append`, end with `finish`; read `text`, or `take_delta` while it grows.

    The deltas together are the bytes of the shown tokens read as UTF-8, as `Tokenizer.decode` reads them. No delta ends
    within a character, and none carries what may yet turn out to be the beginning of a stop string. A character that
    the prompt leaves incomplete is completed here.

    Stop strings (`params.stop`): the one that is complete first wins; on a tie, the one that begins first. They are
    looked for behind the text of the first `min_tokens` tokens, so at least that many tokens are kept.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._hidden = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        if params.shown_token_ids:
            self._hidden = self._hidden.difference(params.shown_token_ids)
        self._stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(self._tail(prompt_token_ids))  # for its state: bytes of a last, incomplete character
        self._drop_blank = tokenizer.drops_leading_blank and not any(map(self._shown_bytes, prompt_token_ids))
        self._released: list[str] = []
        self._num_released_chars = 0
        self._num_taken = 0  # pieces of `_released` that take_delta has handed out
        self._window = ""
        self._token_starts: list[int] = []  # [tokens]: characters complete before each token
        self._search_start = 0  # characters: stop strings begin here or later
        self._stop_string: str | None = None
        self._num_kept: int | None = None

    def append(self, token_ids: Iterable[int]) -> str | None:
        """Take in output tokens (not the one that ended the request: see `finish`). The stop string that their text
        completes, or None. After a stop string, further tokens are ignored."""
        if self._stop_string is None:
            for token_id in token_ids:
                self._take(self._shown_bytes(token_id))
            self._settle()
        return self._stop_string

    def finish(self, stop_token_id: int | None = None) -> str | None:
        """No token follows: release what is held back; an incomplete character becomes one U+FFFD.

        `stop_token_id` is the token that ended the request, if one did. One of `params.stop_token_ids` shows its text
        with `include_stop_str_in_output`, an end token of the model's without `skip_special_tokens`. Where that text
        completes a stop string, this string is returned.
        """
        if self._stop_string is None:
            if stop_token_id is not None:
                self._take(self._shown_bytes(stop_token_id) if self._shows_end(stop_token_id) else b"")
            self._window += self._utf8.decode(b"", True)
            self._settle()
            self._release(len(self._window))
            self._num_kept = self.num_kept_tokens  # no stop string can come any more
        return self._stop_string

    @property
    def text(self) -> str:
        """All text released so far."""
        self._released[self._num_taken :] = ["".join(self._released[self._num_taken :])]
        return "".join(self._released)

    def take_delta(self) -> str:
        """The text released since the last call."""
        delta = "".join(self._released[self._num_taken :])
        self._num_taken = len(self._released)
        return delta

    @property
    def num_kept_tokens(self) -> int:
        """Tokens of which something is kept: up to the one in which the text ends, where a stop string cut it; else
        all that came (with the stop token)."""
        return len(self._token_starts) if self._num_kept is None else self._num_kept

    @property
    def num_released_tokens(self) -> int:
        """Tokens that no later stop string can take back: those that may be shown to a client already."""
        if self._num_kept is not None or not self._stops:
            return self.num_kept_tokens
        return self._num_tokens_before(self._num_released_chars)

    def _shown_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id)

    def _shows_end(self, stop_token_id: int) -> bool:
        if stop_token_id in (self._params.stop_token_ids or ()):
            return self._params.include_stop_str_in_output
        return not self._params.skip_special_tokens

    def _tail(self, token_ids: Sequence[int]) -> bytes:
        """The last bytes of a text, enough to hold an incomplete character: it has at most 3."""
        tail = b""
        for token_id in reversed(token_ids):
            tail = self._shown_bytes(token_id) + tail
            if len(tail) >= 3:
                break
        return tail

    def _take(self, data: bytes) -> None:
        self._token_starts.append(self._num_released_chars + len(self._window))
        if data and self._drop_blank:
            data, self._drop_blank = data.removeprefix(b" "), False
        self._window += self._utf8.decode(data)
        if len(self._token_starts) == self._params.min_tokens:
            self._search_start = self._num_released_chars + len(self._window)

    def _settle(self) -> None:
        """Find a stop string in the window; without one, release what cannot be part of one any more."""
        if not self._stops or len(self._token_starts) < self._params.min_tokens:
            self._release(len(self._window))
            return
        start = max(0, self._search_start - self._num_released_chars)
        found = _first_complete(self._window, self._stops, start)
        if found is None:
            self._release(min(_possible_start(self._window, stop, start) for stop in self._stops))
            return
        begin, end, self._stop_string = found
        self._release(end if self._params.include_stop_str_in_output else begin)
        self._num_kept = self._num_tokens_before(self._num_released_chars)
        self._window = ""

    def _release(self, num_chars: int) -> None:
        if num_chars:
            self._released.append(self._window[:num_chars])
            self._window = self._window[num_chars:]
            self._num_released_chars += num_chars

    def _num_tokens_before(self, num_chars: int) -> int:
        """Tokens that begin within the first `num_chars` characters; never fewer than `min_tokens` of those there."""
        return max(bisect_left(self._token_starts, num_chars), min(self._params.min_tokens, len(self._token_starts)))


def _first_complete(text: str, stops: Sequence[str], start: int) -> tuple[int, int, str] | None:
    """(begin, end, stop) of the stop string that ends first in text[start:]; of several, the one that begins first."""
    found = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop, start)) >= 0]
    if not found:
        return None
    end, begin, stop = min(found)
    return begin, end, stop


def _possible_start(text: str, stop: str, start: int) -> int:
    """Where the longest end of text[start:] that is a proper beginning of `stop` begins; len(text) if there is none."""
    at = text.find(stop[0], max(start, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
