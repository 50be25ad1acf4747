"""Tokenizers of GGUF files, against transformers (byte-level BPE) and SentencePiece itself."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from octavo.errors import CheckpointError
from octavo.text.gguf_tokenizer import tokenizer_from_metadata
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from support.checkpoints import CORPUS, smol_tokenizer, spm_processor, tiny_tokenizer
from support.texts import NASTY_TEXTS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@pytest.fixture(scope="module")
def smol(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="module")
def smol_oracle() -> Any:
    """transformers' reading of the file, with the pre-tokenizer that the file names: each digit alone, then GPT-2's
    pattern. (transformers knows no `smollm` and takes GPT-2's alone, which differs where blanks precede a digit.)"""
    backend = copy.deepcopy(smol_tokenizer().backend_tokenizer)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_smol_has_the_ids_of_transformers(smol: Tokenizer, smol_oracle: Any, text: str) -> None:
    ids = smol_oracle.encode(text).ids
    assert smol.encode(text) == ids
    assert smol.decode(ids, skip_special_tokens=False) == text
    assert smol.decode(ids) == smol_tokenizer().decode(ids, skip_special_tokens=True)


@given(st.text(max_size=60))
def test_smol_has_the_ids_of_transformers_for_any_text(smol: Tokenizer, smol_oracle: Any, text: str) -> None:
    assert smol.encode(text) == smol_oracle.encode(text).ids


def test_smol_properties(smol: Tokenizer) -> None:
    assert smol.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert smol.vocab_size == 49152 and smol.special_ids == set(range(17))
    assert not smol.add_bos
    assert smol.chat_template == smol_tokenizer().chat_template


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    """tiny_tokenizer() as GGUF metadata. Keys in `changes` lack their `tokenizer.ggml.`; None takes a key away."""
    model = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


@pytest.mark.parametrize("pre", ["gpt-2", "default", None])
def test_gpt2_is_the_default(pre: str | None) -> None:
    tokenizer = tokenizer_from_metadata(bpe_metadata(pre=pre))
    for text in NASTY_TEXTS:
        assert tokenizer.encode(text) == tiny_tokenizer().encode(text)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_pre_tokenizers_cut_as_those_of_transformers(pre: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    ours = tokenizer_from_metadata(bpe_metadata(pre=pre)).backend.pre_tokenizer
    theirs = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in NASTY_TEXTS:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_llama_3_adds_bos_unless_the_file_says_otherwise() -> None:
    assert tokenizer_from_metadata(bpe_metadata(pre="llama-bpe")).add_bos
    assert not tokenizer_from_metadata(bpe_metadata(pre="llama-bpe", add_bos_token=False)).add_bos
    assert not tokenizer_from_metadata(bpe_metadata()).add_bos


def test_qwen_2_composes_characters() -> None:
    tokenizer = tokenizer_from_metadata(bpe_metadata(pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_add_eos_and_further_end_tokens() -> None:
    tokenizer = tokenizer_from_metadata(bpe_metadata(add_bos_token=True, add_eos_token=True, eot_token_id=0))
    assert tokenizer.encode("") == [1, 2]
    assert tokenizer.end_token_ids == (2, 0)


def test_user_defined_tokens_stay_whole_and_are_text() -> None:
    tokens = [*bpe_metadata()["tokenizer.ggml.tokens"], "<tool>", "é!"]
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 5) + [USER_DEFINED] * 2
    tokenizer = tokenizer_from_metadata(bpe_metadata(tokens=tokens, token_type=types))
    first, second = len(tokens) - 2, len(tokens) - 1
    assert tokenizer.encode("<tool>é!") == [first, second]
    assert tokenizer.decode([first, second, 1]) == "<tool>é!"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; known: gpt2, llama"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"pre": "new"}, "tokenizer.ggml.pre is 'new'; known: command-r, .*smollm"),
        ({"token_type": [NORMAL]}, "tokenizer.ggml.token_type has 1 entries for 379 tokens"),
        ({"merges": ["no such"]}, "vocabulary and merges do not fit"),
        ({"model": "llama", "scores": [0.0]}, "tokenizer.ggml.scores has 1 entries for 379 tokens"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_metadata(bpe_metadata(**changes))


def spm_metadata(**changes: Any) -> dict[str, Any]:
    processor = spm_processor()
    ids = range(processor.GetPieceSize())

    def kind(i: int) -> int:
        tests = {UNKNOWN: processor.IsUnknown, CONTROL: processor.IsControl, BYTE: processor.IsByte}
        return next((kind for kind, test in tests.items() if test(i)), NORMAL)

    values = {
        "model": "llama",
        "tokens": [processor.IdToPiece(i) for i in ids],
        "scores": [processor.GetScore(i) for i in ids],
        "token_type": [kind(i) for i in ids],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    return tokenizer_from_metadata(spm_metadata())


SPM_TEXTS = [text for text in NASTY_TEXTS if "<|" not in text and "</s>" not in text]


@pytest.mark.parametrize("text", [*SPM_TEXTS, *CORPUS.splitlines()])
def test_spm_has_the_ids_of_sentencepiece(spm: Tokenizer, text: str) -> None:
    ids = spm_processor().EncodeAsIds(text)
    assert spm.encode(text, add_special_tokens=False) == ids
    assert spm.encode(text) == [1, *ids]
    assert spm.decode(spm.encode(text)) == text.replace("▁", " ")


@given(st.text(alphabet=st.sampled_from([*sorted(set(CORPUS)), "日", "😀", "▁"]), max_size=40))
def test_spm_has_the_ids_of_sentencepiece_for_any_text(spm: Tokenizer, text: str) -> None:
    assert spm.encode(text, add_special_tokens=False) == spm_processor().EncodeAsIds(text)


def test_spm_without_a_blank_before() -> None:
    tokenizer = tokenizer_from_metadata(spm_metadata(add_space_prefix=False, add_bos_token=False))
    ids = tokenizer.encode("the fox")
    assert tokenizer.token_bytes(ids[0]) == b"t" or not tokenizer.token_bytes(ids[0]).startswith(b" ")
    assert tokenizer.decode(ids) == "the fox"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"
    assert not tokenizer.add_bos


def test_spm_token_bytes(spm: Tokenizer) -> None:
    newline = spm.backend.token_to_id("<0x0A>")
    assert spm.token_bytes(newline) == b"\n"
    assert spm.token_bytes(1) == b"<s>"
    blank = spm.backend.token_to_id("▁")
    assert spm.token_bytes(blank) == b" "


def test_text_that_looks_like_a_byte_token_is_text(spm: Tokenizer) -> None:
    newline = spm.backend.token_to_id("<0x0A>")
    assert newline not in spm.encode("<0x0A>")


def test_user_defined_spm_tokens_are_matched_first_the_longest_first() -> None:
    metadata = spm_metadata()
    size = len(metadata["tokenizer.ggml.tokens"])
    extra = ["  ", "   ", "the quick"]
    metadata["tokenizer.ggml.tokens"] += extra
    metadata["tokenizer.ggml.scores"] += [-1000.0] * 3
    metadata["tokenizer.ggml.token_type"] += [USER_DEFINED] * 3
    metadata["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = tokenizer_from_metadata(metadata)
    assert tokenizer.encode("     the quick", add_special_tokens=False) == [size + 1, size, size + 2]
    assert tokenizer.decode([size + 1, size, size + 2]) == "     the quick"
