"""Tokenizers of Hugging Face folders: the ids and texts of transformers, and octavo's own promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from octavo.errors import CheckpointError, InvalidRequestError
from octavo.text.token_bytes import byte_alphabet, read_spelling
from octavo.text.tokenizer import Tokenizer, frame_with, load_tokenizer
from support.checkpoints import smol_tokenizer, tiny_tokenizer
from support.texts import NASTY_TEXTS


@pytest.fixture(scope="module")
def smol_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smol")
    smol_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def smol(smol_folder: Path) -> Tokenizer:
    return load_tokenizer(smol_folder)


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_ids_and_texts_are_those_of_transformers(smol: Tokenizer, text: str) -> None:
    oracle = smol_tokenizer()
    ids = oracle.encode(text)
    assert smol.encode(text) == ids
    assert smol.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False)
    assert smol.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert smol.decode(ids, skip_special_tokens=False) == oracle.decode(ids) == text


def test_known_ids(smol: Tokenizer) -> None:
    assert smol.encode("😀") == [10813, 242, 218]
    assert smol.encode("歪") == [34978, 120]
    assert smol.encode("✅") == [38083, 223]
    assert smol.encode(" London") == [4528]
    assert len(smol.encode("0123456789")) == 10


def test_properties(smol: Tokenizer) -> None:
    assert (smol.bos_token, smol.bos_token_id) == ("<|im_start|>", 1)
    assert (smol.eos_token, smol.eos_token_id) == ("<|im_end|>", 2)
    assert smol.end_token_ids == (2,)
    assert not smol.add_bos
    assert smol.vocab_size == len(smol) == 49152
    assert smol.special_ids == set(range(17)) == set(smol.all_special_ids)
    assert smol.max_token_chars == max(map(len, smol_tokenizer().get_vocab()))
    assert smol.chat_template == smol_tokenizer().chat_template
    assert smol.convert_ids_to_tokens([1, 4528, 60000]) == ["<|im_start|>", "ĠLondon", None]
    assert smol.convert_ids_to_tokens(4528) == "ĠLondon"


def test_token_bytes_are_true_bytes(smol: Tokenizer) -> None:
    assert [smol.token_bytes(i) for i in (10813, 242, 218)] == [b"\xf0\x9f", b"\x98", b"\x80"]
    assert smol.token_text(10813) == "\ufffd"
    assert smol.token_bytes(4528) == b" London"
    assert smol.token_bytes(1) == b"<|im_start|>"
    assert smol.token_bytes(49152) == smol.token_bytes(-1) == smol.token_bytes(1 << 40) == b""


def test_special_tokens_get_no_spaces(smol: Tokenizer) -> None:
    assert smol.decode([1, 4093, 2, 2], skip_special_tokens=False) == "<|im_start|>user<|im_end|><|im_end|>"
    assert smol.decode([1, 4093, 2, 2]) == "user"


@given(st.lists(st.integers(0, 400), max_size=30), st.booleans())
def test_decoding_any_ids_is_that_of_transformers(ids: list[int], skip: bool) -> None:
    tokenizer = Tokenizer(tiny_tokenizer().backend_tokenizer)
    assert tokenizer.decode(ids, skip) == tiny_tokenizer().decode(
        [i for i in ids if i < len(tokenizer)], skip_special_tokens=skip
    )


def test_truncation_and_padding_of_the_file_are_ignored(tiny_folder: Path) -> None:
    path = tiny_folder / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(path))
    ids = load_tokenizer(tiny_folder).encode("Hello world, how are you?")
    assert ids == tiny_tokenizer().encode("Hello world, how are you?") and len(ids) > 4


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("add_bos", [True, False])
def test_tokenizer_json_alone_decides_about_bos(tiny_folder: Path, add_bos: bool) -> None:
    from transformers import AutoTokenizer

    path = tiny_folder / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    frame_with(backend, "<|im_start|>" if add_bos else None, None)
    backend.save(str(path))
    _edit(tiny_folder / "tokenizer_config.json", add_bos_token=not add_bos, add_eos_token=True)
    tokenizer, oracle = load_tokenizer(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)
    assert tokenizer.add_bos is add_bos
    for text in ("", "Hello"):
        assert tokenizer.encode(text) == oracle.encode(text)
        assert tokenizer.encode(text) == [1] * add_bos + tokenizer.encode(text, add_special_tokens=False)


def test_tokens_that_only_the_configuration_names_are_added(tiny_folder: Path) -> None:
    from transformers import AutoTokenizer

    spec = {"content": "<tool>", "single_word": False, "lstrip": False, "rstrip": True, "special": False}
    spec["normalized"] = False
    _edit(
        tiny_folder / "tokenizer_config.json",
        eos_token={"__type": "AddedToken", "content": "<turn>", "normalized": False, "special": True},
        added_tokens_decoder={"380": spec},
        additional_special_tokens=["<extra>"],
    )
    tokenizer, oracle = load_tokenizer(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)
    text = "a<tool>  b<turn>c<extra>"
    assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.eos_token_id == oracle.eos_token_id
    assert tokenizer.decode(tokenizer.encode(text)) == oracle.decode(oracle.encode(text), skip_special_tokens=True)


def test_the_configuration_may_mark_a_token_otherwise(tiny_folder: Path) -> None:
    from transformers import AutoTokenizer

    path = tiny_folder / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.add_tokens([AddedToken("<x>", normalized=False)])
    backend.save(str(path))
    spec = {"content": "<x>", "single_word": False, "lstrip": False, "rstrip": True, "special": True}
    _edit(tiny_folder / "tokenizer_config.json", added_tokens_decoder={"379": {**spec, "normalized": False}})
    tokenizer, oracle = load_tokenizer(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)
    ids = tokenizer.encode("a<x>  b")
    assert ids == oracle.encode("a<x>  b")
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True) == "ab"


def test_the_model_configuration_names_the_end_token_as_a_last_resort(tiny_folder: Path) -> None:
    path = tiny_folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))
    (tiny_folder / "config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert load_tokenizer(tiny_folder).eos_token == "<|im_end|>"


def test_chat_template_sources(tiny_folder: Path) -> None:
    (tiny_folder / "chat_template.jinja").unlink(missing_ok=True)
    _edit(tiny_folder / "tokenizer_config.json", chat_template="one")
    assert load_tokenizer(tiny_folder).chat_template == "one"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    _edit(tiny_folder / "tokenizer_config.json", chat_template=named)
    assert load_tokenizer(tiny_folder).chat_template == "d"
    (tiny_folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tiny_folder).chat_template == "file"


@pytest.mark.parametrize("name", ["tokenizer.model", None])
def test_a_folder_without_tokenizer_json_is_refused(tmp_path: Path, name: str | None) -> None:
    if name is not None:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json" + (rf".*{name}" if name else "")):
        load_tokenizer(tmp_path)


def test_broken_files_are_refused(tiny_folder: Path) -> None:
    (tiny_folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(tiny_folder)
    (tiny_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tiny_folder)


@pytest.mark.parametrize("text", ["a\ud83d", "\udc00", "ok \ud800\udc00"])
def test_lone_surrogates_are_a_bad_request(smol: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"lone surrogate U\+D|lone surrogate U\+DC"):
        smol.encode(text)


def test_what_is_not_text_is_a_bad_request(smol: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="not NoneType"):
        smol.encode(None)  # type: ignore[arg-type]


def test_an_added_token_spells_its_own_text() -> None:
    """In the byte alphabet "é" would stand for the byte E9, which is no text."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("é", normalized=False)])
    assert Tokenizer(backend).decode([0, 1]) == "aé"


def test_holes_in_the_vocabulary() -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 5}, "a")))
    assert tokenizer.vocab_size == 6
    assert tokenizer.token_bytes(3) == b""


def test_byte_alphabet_is_that_of_tokenizers() -> None:
    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))


WORDS = ["▁Hello", "wor", "▁", "##ld", "<0xE6>", "<0x97>", "<0xA5>", "▁▁b", "x y"]
DECODERS = [
    decoders.ByteLevel(),
    decoders.Metaspace(),
    decoders.Metaspace(prepend_scheme="never"),
    decoders.WordPiece(cleanup=False),
    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    None,
]


@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
@given(ids=st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=8))
def test_every_known_decoder_is_a_concatenation(decoder: decoders.Decoder | None, ids: list[int]) -> None:
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, []))
    if decoder is not None:
        backend.decoder = decoder
    expected = backend.decode(ids)
    first = WORDS[ids[0]]
    odd = (
        "\ufffd" in expected  # tokenizers writes one for each byte of a run that is not all UTF-8
        or (
            isinstance(decoder, decoders.Metaspace) and first.startswith("▁▁")
        )  # takes away all blanks of a first token
        or (isinstance(decoder, decoders.WordPiece) and first.startswith("##"))  # leaves the mark of a first token
    )
    assert odd or Tokenizer(backend).decode(ids) == expected


@pytest.mark.parametrize(
    "decoder", [decoders.CTC(), decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])], ids=repr
)
def test_other_decoders_are_refused(decoder: decoders.Decoder) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoder
    with pytest.raises(CheckpointError, match="is not supported; known: ByteLevel"):
        read_spelling(backend)
