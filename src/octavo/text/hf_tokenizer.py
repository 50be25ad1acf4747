"""The tokenizer of a Hugging Face folder.

`tokenizer.json` is the vocabulary and decides, alone, what frames a text (flags such as `add_bos_token` beside it do
not count); `tokenizer_config.json`, `special_tokens_map.json` and `config.json` say which tokens are special. Where
they disagree, this file follows transformers.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import tokenizers

from octavo.errors import CheckpointError
from octavo.text.tokenizer import Tokenizer

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_from_folder(folder: pathlib.Path) -> Tokenizer:
    """Raises CheckpointError where a file is missing or broken."""
    backend = _read_backend(folder)
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(folder, config, backend)
    _add_missing_tokens(backend, config, special_tokens)
    return Tokenizer(backend, special_tokens=special_tokens, chat_template=_chat_template(folder, config))


def _read_backend(folder: pathlib.Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()]
        has = f"; {others[0]} alone is not enough: save the tokenizer again with transformers" if others else ""
        raise CheckpointError(f"{folder} has no tokenizer.json{has}")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _read_text(path: pathlib.Path) -> str | None:
    """None where there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    text = _read_text(path)
    try:
        content = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is a {type(content).__name__}; it must be an object")
    return content


def _text_of(token: Any) -> str | None:
    """A token stands as text or as {"content": text, …}."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _special_tokens(folder: pathlib.Path, config: dict[str, Any], backend: tokenizers.Tokenizer) -> dict[str, str]:
    found: dict[str, str] = {}
    tokens_map = _read_json(folder / "special_tokens_map.json")
    for role in _ROLES:
        # An explicit null in the first file that names the role means that there is none.
        source = config if role in config else tokens_map
        if (text := _text_of(source.get(role))) is not None:
            found[role] = text
    model_config = _read_json(folder / "config.json")
    for role in ("bos_token", "eos_token"):
        ids = model_config.get(f"{role}_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        named = role in config or role in tokens_map
        if not named and isinstance(first, int) and (text := backend.id_to_token(first)) is not None:
            found[role] = text
    return found


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Tokens that the configuration names and tokenizer.json does not mark as added, or marks otherwise."""
    present = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    wanted: dict[str, tokenizers.AddedToken] = {}
    for _, spec in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        options = {key: bool(spec.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "special")}
        normalized = bool(spec.get("normalized", not options["special"]))
        wanted[spec["content"]] = tokenizers.AddedToken(spec["content"], normalized=normalized, **options)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extras = extra.values() if isinstance(extra, dict) else extra
    for text in [*special_tokens.values(), *filter(None, map(_text_of, extras))]:
        if text not in present:
            wanted.setdefault(text, tokenizers.AddedToken(text, normalized=False, special=True))
    backend.add_tokens([token for text, token in wanted.items() if repr(token) != present.get(text)])


def _chat_template(folder: pathlib.Path, config: dict[str, Any]) -> str | None:
    text = _read_text(folder / "chat_template.jinja")
    if text is not None:
        return text
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None
