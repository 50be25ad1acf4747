"""The incremental detokenizer: against whole decoding for any tokens, and stop strings against a search of the text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.request import SamplingParams
from octavo.text.tokenizer import Tokenizer
from support.checkpoints import CORPUS, smol_tokenizer
from support.texts import NASTY_TEXTS


def _byte_level() -> Tokenizer:
    """3 special tokens, 256 bytes and a few merges."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([CORPUS], trainer)
    return Tokenizer(backend)


def _sentencepiece() -> Tokenizer:
    """<s> 0, </s> 1, then 256 bytes, then words; a blank before a text is no part of it."""
    words = ["▁", "▁Once", "▁upon", "▁a", "▁time", "a", "b", "▁▁", "é", "▁日本", "lo", "▁wor"]
    vocab = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


BYTE_LEVEL, SENTENCEPIECE = _byte_level(), _sentencepiece()
TOKENIZERS = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}


@pytest.fixture(scope="module")
def smol() -> Tokenizer:
    return Tokenizer(smol_tokenizer().backend_tokenizer)


def one_by_one(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    ids = [tokenizer.encode(word, add_special_tokens=False) for word in words]
    assert all(len(i) == 1 for i in ids), list(zip(words, ids, strict=True))
    return [i[0] for i in ids]


def run(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    prompt: Sequence[int] = (),
    *,
    stop_token_id: int | None = None,
    **params: Any,
) -> tuple[IncrementalDetokenizer, list[str], str | None]:
    """Tokens one by one, as in a stream: (detokenizer, delta after each token and at the end, stop string)."""
    detokenizer = IncrementalDetokenizer(tokenizer, list(prompt), SamplingParams(**params))
    deltas = []
    for token_id in ids:
        found = detokenizer.append([token_id])
        deltas.append(detokenizer.take_delta())
        if found is not None:
            break
    else:
        found = detokenizer.finish(stop_token_id)
        deltas.append(detokenizer.take_delta())
    assert detokenizer.text == "".join(deltas)
    return detokenizer, deltas, found


# Characters and blanks


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_a_stream_never_carries_half_a_character(smol: Tokenizer, text: str) -> None:
    _, deltas, _ = run(smol, smol.encode(text), skip_special_tokens=False)
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


def test_emoji_arrive_whole(smol: Tokenizer) -> None:
    text = "😀👩‍👩‍👧‍👦🇨🇭日本語歪✅ď"
    _, deltas, _ = run(smol, smol.encode(text))
    assert "".join(deltas) == text
    assert deltas[:3] == ["", "", "😀"]


def test_an_incomplete_character_at_the_end_is_one_replacement(smol: Tokenizer) -> None:
    _, deltas, _ = run(smol, smol.encode("a😀")[:-1])
    assert "".join(deltas) == "a\ufffd"
    assert deltas[-1] == "\ufffd"


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_deltas_are_the_whole_decoding(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=40))
    skip = data.draw(st.booleans())
    detokenizer, deltas, _ = run(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip)
    assert detokenizer.num_kept_tokens == detokenizer.num_released_tokens == len(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_text_is_what_the_output_adds_to_the_prompt(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    prompt = ids[: data.draw(st.integers(0, len(ids)))]
    # A character that the prompt leaves incomplete belongs to the output: the prompt's text ends before it.
    hidden = tokenizer.special_ids
    prompt_bytes = b"".join(tokenizer.token_bytes(i) for i in prompt if i not in hidden)
    if tokenizer.drops_leading_blank:
        prompt_bytes = prompt_bytes.removeprefix(b" ")
    prompt_text = codecs.getincrementaldecoder("utf-8")("replace").decode(prompt_bytes)
    _, deltas, _ = run(tokenizer, ids[len(prompt) :], prompt)
    assert prompt_text + "".join(deltas) == tokenizer.decode(ids)


def test_sentencepiece_keeps_its_blanks() -> None:
    prompt, first, second = (
        SENTENCEPIECE.backend.token_to_id("▁Once"),
        *map(SENTENCEPIECE.backend.token_to_id, ("▁upon", "▁a")),
    )
    _, deltas, _ = run(SENTENCEPIECE, [first, second], [0, prompt])
    assert deltas == [" upon", " a", ""]
    _, deltas, _ = run(SENTENCEPIECE, [first, second], [0])  # nothing to see before: the blank is no part of the text
    assert deltas == ["upon", " a", ""]


def test_special_tokens_are_skipped_unless_asked(smol: Tokenizer) -> None:
    ids = [1, *smol.encode(" red"), 2]
    assert run(smol, ids)[0].text == " red"
    assert run(smol, ids, skip_special_tokens=False)[0].text == "<|im_start|> red<|im_end|>"


def test_deltas_and_text_mix() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [], SamplingParams())
    words = BYTE_LEVEL.encode("Hello world")
    detokenizer.append(words[:1])
    first = detokenizer.take_delta()
    detokenizer.append(words[1:2])
    assert detokenizer.text == BYTE_LEVEL.decode(words[:2])
    detokenizer.append(words[2:])
    detokenizer.finish()
    assert first + detokenizer.take_delta() == detokenizer.text == "Hello world"
    assert detokenizer.take_delta() == ""


# Stop tokens


def test_the_text_of_a_stop_token(smol: Tokenizer) -> None:
    red, green = one_by_one(smol, [" red", " green"])
    for include, text in [(False, " red"), (True, " red green")]:
        detokenizer, _, found = run(
            smol, [red], stop_token_id=green, stop_token_ids=[green], include_stop_str_in_output=include
        )
        assert (detokenizer.text, detokenizer.num_kept_tokens, found) == (text, 2, None)


@pytest.mark.parametrize("end", [2, 4528])  # an end token need not be special
def test_the_text_of_an_end_token(smol: Tokenizer, end: int) -> None:
    (red,) = one_by_one(smol, [" red"])
    assert run(smol, [red], stop_token_id=end)[0].text == " red"
    assert run(smol, [red], stop_token_id=end, include_stop_str_in_output=True)[0].text == " red"
    shown = run(smol, [red], stop_token_id=end, skip_special_tokens=False)[0]
    assert shown.text == " red" + smol.token_text(end)
    assert shown.num_kept_tokens == 2


def test_an_end_token_that_is_a_stop_string_too(smol: Tokenizer) -> None:
    (red,) = one_by_one(smol, [" red"])
    detokenizer, _, found = run(smol, [red], stop_token_id=2, skip_special_tokens=False, stop=["<|im_end|>"])
    assert (detokenizer.text, found) == (" red", "<|im_end|>")


# Stop strings


def test_a_stop_string_across_tokens(smol: Tokenizer) -> None:
    ids = one_by_one(smol, ["Hello", " world", " how"])
    detokenizer, deltas, found = run(smol, ids, stop=["lo wor"])
    assert (detokenizer.text, found, deltas) == ("Hel", "lo wor", ["Hel", ""])
    assert detokenizer.num_kept_tokens == 1
    detokenizer, deltas, found = run(smol, ids, stop=["lo wor"], include_stop_str_in_output=True)
    assert (detokenizer.text, found, deltas) == ("Hello wor", "lo wor", ["Hel", "lo wor"])
    assert detokenizer.num_kept_tokens == 2
    assert detokenizer.append(ids) == "lo wor"
    assert detokenizer.finish() == "lo wor"
    assert detokenizer.text == "Hello wor"


def test_without_a_partial_match_text_flows_token_by_token(smol: Tokenizer) -> None:
    words = [" one", " two", " three", " four", " five", " six", " seven", " eight", " nine", " ten", " red", " blue"]
    detokenizer, deltas, _ = run(smol, one_by_one(smol, words), stop=["zz"])
    assert deltas == [*words, ""]
    assert detokenizer.num_released_tokens == 12


def test_at_the_end_every_token_is_released(smol: Tokenizer) -> None:
    detokenizer, _, _ = run(smol, one_by_one(smol, ["Hello"]), stop=["lo wor"], stop_token_id=2)
    assert detokenizer.num_kept_tokens == detokenizer.num_released_tokens == 2


def test_what_was_held_back_for_nothing_is_released(smol: Tokenizer) -> None:
    ids = one_by_one(smol, ["Hello", " how"])
    assert run(smol, ids, stop=["lo wor"])[1] == ["Hel", "lo how", ""]
    assert run(smol, ids[:1], stop=["lo wor"])[1] == ["Hel", "lo"]


def test_tokens_held_back_are_not_released(smol: Tokenizer) -> None:
    ids = one_by_one(smol, ["Hello", " world", " how"])
    detokenizer = IncrementalDetokenizer(smol, [], SamplingParams(stop=[" world how"]))
    released = []
    for token_id in ids[:2]:
        detokenizer.append([token_id])
        released.append((detokenizer.num_kept_tokens, detokenizer.num_released_tokens))
    assert released == [(1, 1), (2, 1)]
    assert detokenizer.append(ids[2:]) == " world how"
    assert detokenizer.num_kept_tokens == detokenizer.num_released_tokens == 1


@pytest.mark.parametrize(
    ("stops", "winner", "text"),
    [
        (["world how", "wor"], "wor", "Hello "),  # complete first
        (["rld", "Hello world"], "Hello world", ""),  # a tie: begins first
        (["how", "zz"], "how", "Hello world "),
    ],
)
def test_which_stop_string_wins(smol: Tokenizer, stops: list[str], winner: str, text: str) -> None:
    ids = one_by_one(smol, ["Hello", " world", " how"])
    for order in (stops, stops[::-1]):
        detokenizer, _, found = run(smol, ids, stop=order)
        assert (found, detokenizer.text) == (winner, text)
        whole = IncrementalDetokenizer(smol, [], SamplingParams(stop=order))
        assert whole.append(ids) == winner and whole.text == text


def test_stop_may_be_one_string(smol: Tokenizer) -> None:
    assert run(smol, one_by_one(smol, ["Hello", " world"]), stop="wor")[2] == "wor"


def test_a_stop_string_within_a_character_of_several_tokens(smol: Tokenizer) -> None:
    detokenizer, deltas, found = run(smol, smol.encode("a😀b"), stop=["😀"])
    assert (found, detokenizer.text, detokenizer.num_kept_tokens) == ("😀", "a", 1)
    assert not any("\ufffd" in delta for delta in deltas)


def test_min_tokens_ends_the_part_without_a_search(smol: Tokenizer) -> None:
    words = [" a", "\n", " b", " c", " d", " e", " f", " g", "\n\n", " h"]
    detokenizer, deltas, found = run(smol, one_by_one(smol, words), stop=["\n"], min_tokens=6)
    assert (detokenizer.text, found) == (" a\n b c d e f g", "\n")
    assert detokenizer.num_kept_tokens == 8
    assert deltas[:8] == words[:8]


def test_at_least_min_tokens_are_kept(smol: Tokenizer) -> None:
    ids = one_by_one(smol, ["Hello", " world", " how"])
    detokenizer, _, found = run(smol, ids, stop=["Hello world", "wor", " how"], min_tokens=2)
    assert (found, detokenizer.text, detokenizer.num_kept_tokens) == (" how", "Hello world", 2)
    assert run(smol, ids, stop=["Hello"], min_tokens=5)[0].text == "Hello world how"


@pytest.mark.parametrize("stop", ["", [""], ["", "x"]])
def test_empty_stop_strings_are_refused(stop: str | list[str]) -> None:
    with pytest.raises(ValueError, match="stop"):
        SamplingParams(stop=stop)


ABC = [BYTE_LEVEL.encode(letter)[0] for letter in "aab"] + BYTE_LEVEL.encode("é") + [1]


def expected_stop(ids: list[int], stops: list[str], min_tokens: int, include: bool) -> tuple[str, str | None, int]:
    """(text, stop string, tokens kept) by search of the whole text, character by character."""

    def read(count: int, final: bool = False) -> str:
        data = b"".join(BYTE_LEVEL.token_bytes(i) for i in ids[:count] if i not in BYTE_LEVEL.special_ids)
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)

    text = read(len(ids), final=True)
    first = len(read(min_tokens)) if min_tokens <= len(ids) else len(text) + 1
    for end in range(len(text) + 1):
        for begin in range(first, end):
            if text[begin:end] in stops:
                cut = end if include else begin
                kept = sum(len(read(i)) < cut for i in range(len(ids)))
                return text[:cut], text[begin:end], max(kept, min_tokens)
    return text, None, len(ids)


@given(
    ids=st.lists(st.sampled_from(ABC), max_size=24),
    stops=st.lists(st.text("abé\ufffd", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
    data=st.data(),
)
def test_stop_strings_as_by_search_of_the_whole_text(
    ids: list[int], stops: list[str], min_tokens: int, include: bool, data: st.DataObject
) -> None:
    params = SamplingParams(
        stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include, max_tokens=max(len(ids), min_tokens, 1)
    )
    text, stop, kept = expected_stop(ids, stops, min_tokens, include)
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [], params)
    start, found, deltas, released = 0, None, [], 0
    while start < len(ids) and found is None:
        size = data.draw(st.integers(1, 4))
        found = detokenizer.append(ids[start : start + size])
        deltas.append(detokenizer.take_delta())
        assert released <= detokenizer.num_released_tokens <= detokenizer.num_kept_tokens
        released = detokenizer.num_released_tokens
        start += size
    found = detokenizer.finish()
    deltas.append(detokenizer.take_delta())
    assert (detokenizer.text, found, detokenizer.num_kept_tokens) == (text, stop, kept)
    assert "".join(deltas) == text
    assert released <= kept
