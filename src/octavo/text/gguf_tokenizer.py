"""The tokenizer that a GGUF file describes in its metadata.

Two kinds: `gpt2` is byte-level BPE with a list of merges and a named pre-tokenizer; `llama` is SentencePiece BPE with
scores and byte fallback. Both follow the tokenizer that the model was trained with: the pre-tokenizer is the one that
`tokenizer.ggml.pre` names, and user-defined tokens are matched in the text before anything else, the longest first.

Keys and token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from octavo.errors import CheckpointError
from octavo.text.token_bytes import BLANK
from octavo.text.tokenizer import Tokenizer, frame_with

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # tokenizer.ggml.token_type

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
# How text is cut before the merges. GPT-2's own pattern is built into ByteLevel.
_PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "default", "phi-2"), "gpt2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), "digits"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
}


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises CheckpointError for a kind or a pre-tokenizer that is not known, or where keys are missing."""
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        raise CheckpointError("the GGUF file has no tokenizer: tokenizer.ggml.tokens is missing")
    if kind == "gpt2":
        backend, adds_bos = _byte_level_bpe(metadata)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece_bpe(metadata), True
    else:
        raise CheckpointError(f"tokenizer.ggml.model is {kind!r}; known: gpt2, llama")
    _add_tokens(backend, metadata)
    special_tokens = {
        role: token
        for role, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
        if (token := _special_token(metadata, key)) is not None
    }
    frame_with(
        backend,
        special_tokens.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None,
        special_tokens.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    end_tokens = [token for key in ("eot", "eom") if (token := _special_token(metadata, key)) is not None]
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        end_tokens=end_tokens,
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _special_token(metadata: Mapping[str, Any], key: str) -> str | None:
    tokens = metadata["tokenizer.ggml.tokens"]
    token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if token_id is None or not 0 <= token_id < len(tokens):
        return None
    return str(tokens[token_id])


def _token_types(metadata: Mapping[str, Any]) -> list[int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())] or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    return types


def _byte_level_bpe(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    """The backend, and whether such a tokenizer puts BOS before a text where the file does not say."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    rule = _PRE_TOKENIZERS.get(name)
    if rule is None:
        raise CheckpointError(f"tokenizer.ggml.pre is {name!r}; known: {', '.join(sorted(_PRE_TOKENIZERS))}")
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [merge.partition(" ")[::2] for merge in metadata.get("tokenizer.ggml.merges", ())]
    # Llama 3 takes a piece that is an entry as it is, even where the merges would not lead to it.
    backend = tokenizers.Tokenizer(_bpe(vocab, merges, ignore_merges=rule == "llama3"))
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    patterns = {"digits": r"\p{N}", "llama3": _LLAMA_3, "qwen2": _QWEN_2}
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
        use_regex=rule in ("gpt2", "digits"),
    )
    split = [pre_tokenizers.Split(Regex(patterns[rule]), "isolated")] if rule in patterns else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend, rule == "llama3"


def _bpe(vocab: dict[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"the GGUF file's vocabulary and merges do not fit: {error}") from None


def _sentencepiece_bpe(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    types = _token_types(metadata)
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges_of_scores(tokens, types, metadata)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        _bpe(
            vocab,
            merges,
            unk_token=unknown or _special_token(metadata, "unknown"),
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    blanks = normalizers.Replace(" ", BLANK)
    steps: list[Any] = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), blanks])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = blanks
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_of_scores(tokens: Sequence[str], types: list[int], metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose joint entry has the best score. As a list of merges: every cut of
    every entry into two entries, the best-scored entry first; among cuts of one entry, the longest left part first."""
    scores = [float(score) for score in metadata.get("tokenizer.ggml.scores", ())]
    if len(scores) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    joinable = [i for i, kind in enumerate(types) if kind == _NORMAL]
    joinable.sort(key=scores.__getitem__, reverse=True)
    parts = {tokens[i] for i in joinable}
    merges = []
    for i in joinable:
        token = tokens[i]
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in parts and (right := token[cut:]) in parts:
                merges.append((left, right))
    return merges


def _add_tokens(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Control tokens are special; user-defined ones are text, but never cut nor joined."""
    marked = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(metadata["tokenizer.ggml.tokens"], _token_types(metadata), strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(marked)
