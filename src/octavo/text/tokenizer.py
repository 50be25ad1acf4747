"""Text to token ids and back, whatever file the vocabulary came from.

Owns encoding, decoding and what a token spells. Decoding is the concatenation of the tokens' bytes, read as UTF-8
with U+FFFD for what is not: no clean-up of spaces, none added. Reading files is left to `hf_tokenizer.py` and
`gguf_tokenizer.py`; nothing here knows of models or requests.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import tokenizers

from octavo.errors import InvalidRequestError
from octavo.text.token_bytes import read_spelling


def load_tokenizer(path: pathlib.Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or of a .gguf file. Raises CheckpointError where there is none."""
    if path.suffix == ".gguf":
        from octavo.checkpoint.gguf import read_metadata
        from octavo.text.gguf_tokenizer import tokenizer_from_metadata

        return tokenizer_from_metadata(read_metadata(path))
    from octavo.text.hf_tokenizer import tokenizer_from_folder

    return tokenizer_from_folder(path)


def frame_with(backend: tokenizers.Tokenizer, bos_token: str | None, eos_token: str | None) -> None:
    """Make `add_special_tokens` put `bos_token` before a text and `eos_token` after it (None: nothing there)."""
    tokens = [token for token in (bos_token, eos_token) if token is not None]
    template = [token for token in (bos_token, "$A", eos_token) if token is not None]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=[(token, backend.token_to_id(token)) for token in tokens]
    )


class Tokenizer:
    """A vocabulary. The names that Hugging Face tokenizers share with it mean the same there.

    `special_tokens` maps roles to tokens, as templates see them: {"bos_token": "<s>", "eos_token": "</s>", …}.
    `end_token_ids` end an answer: the eos token and its like (end of turn, end of message).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        end_tokens: Iterable[str] = (),
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.bos_token_id = self._id_of(self.bos_token)
        self.eos_token_id = self._id_of(self.eos_token)
        ends = [self.eos_token_id, *map(self._id_of, end_tokens)]
        self.end_token_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.add_bos = self.bos_token_id is not None and backend.encode("").ids[:1] == [self.bos_token_id]
        self._spelling = read_spelling(backend)
        self._bytes = {i: t.content.encode() for i, t in added.items()} if self._spelling.is_byte_level else {}

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    def special_ids_of(self, tokens: Iterable[str]) -> list[int]:
        """The ids of those `tokens` that are special ones."""
        ids = map(self._id_of, tokens)
        return [i for i in ids if i is not None and i in self.special_ids]

    @cached_property
    def vocab_size(self) -> int:
        """The highest id that has a token, plus 1 (there may be holes below it)."""
        size = self.backend.get_vocab_size(with_added_tokens=True)
        if all(self.backend.id_to_token(i) is not None for i in range(size)):
            return int(size)
        return int(max(self.backend.get_vocab(with_added_tokens=True).values())) + 1

    @cached_property
    def max_token_chars(self) -> int:
        """Characters in the longest entry of the vocabulary: a quick upper bound of what one token stands for, unless
        the tokenizer shortens texts first (Unicode composition, added tokens that swallow blanks)."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

    @property
    def drops_leading_blank(self) -> bool:
        """SentencePiece puts a blank before a text; decoding a whole text takes it away again."""
        return self._spelling.drops_leading_blank

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written in the text become those tokens. Raises InvalidRequestError for what is not text."""
        if not isinstance(text, str):
            raise InvalidRequestError(f"only text can be tokenized, not {type(text).__name__}")
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # tokenizers takes a string that UTF-8 cannot hold for no string
            raise _not_unicode(text) from None
        return ids

    def decode(
        self,
        token_ids: Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Ids without a token spell nothing. `spaces_between_special_tokens` is accepted for compatibility: blanks come
        from the vocabulary alone, whatever it says."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(i) for i in token_ids if i not in hidden)
        return (data.removeprefix(b" ") if self.drops_leading_blank else data).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for inside a text; b"" for an id without a token."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            data = b"" if token is None else self._bytes.setdefault(token_id, self._spelling.to_bytes(token))
        return data

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD where a token is only part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def convert_ids_to_tokens(self, token_ids: int | Iterable[int]) -> Any:
        """The entries as the vocabulary writes them (`Ġthe`, `▁the`); None for an id without one."""
        if isinstance(token_ids, int):
            return self.backend.id_to_token(token_ids)
        return [self.backend.id_to_token(i) for i in token_ids]

    def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool = True, **options: Any) -> Any:
        """The prompt of a chat, as token ids (or as text); `options` are those of `ChatTemplate.render`."""
        from octavo.text.chat_template import encode_chat, load_chat_template, require_chat_template

        template = require_chat_template(load_chat_template(options.pop("chat_template", None), self))
        text = template.render(messages, **options)
        return encode_chat(self, text) if tokenize else text

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.special_ids)

    def __len__(self) -> int:
        return self.vocab_size


def _not_unicode(text: str) -> InvalidRequestError:
    at = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), 0)
    return InvalidRequestError(
        f"the text has the lone surrogate U+{ord(text[at]):04X} at character {at}: no valid Unicode"
    )
