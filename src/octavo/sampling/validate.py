"""What values a SamplingParams may hold. Owns types and normal forms; the ranges stand in request.py. Every wrong value
raises InvalidRequestError, which names the field, the value and what is allowed.

`validate` knows no model (it runs when a SamplingParams is made); `validate_for_model` checks what only a model
decides.
Standard library only: `SamplingParams()` must not load NumPy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, cast

from octavo.errors import InvalidRequestError, refuse
from octavo.request import INT32_MAX, INTEGER_RANGES, NUMBER_RANGES

if TYPE_CHECKING:
    from octavo.request import BeamSearchParams, OutputKind, SamplingParams

MAX_BEAM_WIDTH = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters: the detokenizer holds back up to this much text
MAX_BAD_WORDS = 1024
MAX_STOP_TOKEN_IDS = 4096
MAX_ALLOWED_TOKEN_IDS = 2**18  # the largest vocabularies

_OPTIONAL = frozenset({"max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"})

_OUTPUT_KINDS = ("cumulative", "delta", "final_only")
_BOOLEANS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def validate(params: SamplingParams) -> None:
    """Check every field and bring it to its normal form, in place; a second call changes nothing.

    Normal forms: numbers are plain `int` and `float`; `stop`, `stop_token_ids` and `bad_words` are lists (empty when
    absent); the keys of `logit_bias` are ints; `top_k` -1 becomes 0 (off); `seed` -1 becomes None (drawn at admission).
    """
    for name, (low, high) in INTEGER_RANGES.items():
        _integer(params, name, low, high, optional=name in _OPTIONAL)
    for name, (least, most) in NUMBER_RANGES.items():
        _number(params, name, least, most)
    for name in _BOOLEANS:
        if not isinstance(getattr(params, name), bool):
            refuse(name, getattr(params, name), "true or false")
    _strings(params, "stop", MAX_STOP_STRINGS)
    _strings(params, "bad_words", MAX_BAD_WORDS)
    stop_token_ids = params.stop_token_ids
    params.stop_token_ids = _token_ids(
        "stop_token_ids", [] if stop_token_ids is None else stop_token_ids, MAX_STOP_TOKEN_IDS
    )
    _allowed_token_ids(params)
    _logit_bias(params)
    _bad_words_token_ids(params)
    if params.shown_token_ids is not None:
        params.shown_token_ids = _token_ids("shown_token_ids", params.shown_token_ids)
    _output_kind(params)
    _relations(params)


def validate_beams(params: BeamSearchParams) -> None:
    """The same for a BeamSearchParams."""
    _integer(params, "beam_width", 1, MAX_BEAM_WIDTH)
    _integer(params, "max_tokens", 1, INT32_MAX)
    _number(params, "temperature", 0, 100)
    _number(params, "length_penalty", -100, 100)
    for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
        if not isinstance(getattr(params, name), bool):
            refuse(name, getattr(params, name), "true or false")
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":  # 1 is not true
        refuse("early_stopping", params.early_stopping, "true, false or 'never'")


def validate_for_model(
    params: SamplingParams, *, num_vocab_tokens: int, max_logprobs: int, eos_token_ids: Collection[int] = ()
) -> None:
    """Check against a model: ids must have a token (< `num_vocab_tokens`), logprobs must be within `max_logprobs`
    (-1: no limit), and the masks that hold from the first token on must leave one to sample.

    Run it after `bad_words_token_ids` is filled in. Raises InvalidRequestError.
    """
    id_fields: dict[str, Iterable[int] | None] = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "logit_bias": params.logit_bias,
    }
    for name, token_ids in id_fields.items():
        for token_id in token_ids or ():
            if token_id >= num_vocab_tokens:
                refuse(name, token_id, f"token ids below the vocabulary's size, {num_vocab_tokens}")
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is None or max_logprobs == -1:
            continue
        if (num_vocab_tokens if wanted == -1 else wanted) > max_logprobs:
            refuse(name, wanted, f"at most {max_logprobs} (--max-logprobs)")
    banned = {words[0] for words in params.bad_words_token_ids or () if len(words) == 1}
    if params.min_tokens > 0:
        banned.update(params.stop_token_ids or ())
        if not params.ignore_eos:
            banned.update(eos_token_ids)
    left = "token ids of which bad_words and min_tokens leave at least one"
    if params.allowed_token_ids is not None and banned.issuperset(params.allowed_token_ids):
        refuse("allowed_token_ids", params.allowed_token_ids, left)
    if len(banned) >= num_vocab_tokens and banned.issuperset(range(num_vocab_tokens)):
        refuse("stop_token_ids" if params.stop_token_ids else "bad_words", sorted(banned), left)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _integer(params: object, name: str, low: int, high: int, *, optional: bool = False) -> None:
    value = getattr(params, name)
    if value is None and optional:
        return
    if not _is_integer(value) or not low <= value <= high:
        refuse(name, value, f"an integer in [{low}, {high}]{' or null' if optional else ''}")
    setattr(params, name, int(value))


def _number(params: object, name: str, low: float, high: float) -> None:
    setattr(params, name, _as_number(name, getattr(params, name), low, high))


def _as_number(name: str, value: Any, low: float, high: float) -> float:
    # NaN fails both comparisons.
    if not _is_number(value) or not low <= value <= high:
        refuse(name, value, f"a finite number in [{low}, {high}]")
    return float(value)


def _as_list(name: str, value: Any, kind: str) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        refuse(name, value, f"a list of {kind}")
    return list(value)


def _strings(params: SamplingParams, name: str, max_count: int) -> None:
    value = getattr(params, name)
    if name == "stop" and isinstance(value, str):
        value = [value]
    strings = _as_list(name, [] if value is None else value, "strings")
    if len(strings) > max_count:
        raise InvalidRequestError(f"{name} has {len(strings)} strings; at most {max_count} are allowed", param=name)
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_LENGTH:
            refuse(name, value, f"strings of 1 to {MAX_STOP_LENGTH} characters")
    setattr(params, name, strings)


def _token_ids(name: str, value: Any, max_count: int = MAX_ALLOWED_TOKEN_IDS) -> list[int]:
    token_ids = _as_list(name, value, "token ids")
    if len(token_ids) > max_count:
        raise InvalidRequestError(f"{name} has {len(token_ids)} token ids; at most {max_count} are allowed", param=name)
    for token_id in token_ids:
        _token_id(name, token_id)
    return [int(token_id) for token_id in token_ids]


def _token_id(name: str, value: Any) -> int:
    if not _is_integer(value) or not 0 <= value <= INT32_MAX:
        refuse(name, value, "token ids, integers from 0 on")
    return int(value)


def _allowed_token_ids(params: SamplingParams) -> None:
    if params.allowed_token_ids is None:
        return
    params.allowed_token_ids = _token_ids("allowed_token_ids", params.allowed_token_ids)
    if not params.allowed_token_ids:
        refuse("allowed_token_ids", params.allowed_token_ids, "null or at least one token id")


def _logit_bias(params: SamplingParams) -> None:
    bias: Any = params.logit_bias
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        refuse("logit_bias", bias, "a map from token ids to numbers in [-100, 100]")
    normal: dict[int, float] = {}
    for key, value in bias.items():
        # JSON has only string keys. isdecimal alone would let other scripts' digits through.
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10 else key
        normal[_token_id("logit_bias", token_id)] = _as_number("logit_bias", value, -100, 100)
    params.logit_bias = normal


def _bad_words_token_ids(params: SamplingParams) -> None:
    name = "bad_words_token_ids"
    if params.bad_words_token_ids is None:
        return
    words = [_token_ids(name, word) for word in _as_list(name, params.bad_words_token_ids, "lists of token ids")]
    if not all(words):
        refuse(name, words, "lists of at least one token id")
    params.bad_words_token_ids = words


def _output_kind(params: SamplingParams) -> None:
    kind: Any = params.output_kind
    if not isinstance(kind, str) or kind.lower() not in _OUTPUT_KINDS:
        refuse("output_kind", kind, f"one of {', '.join(_OUTPUT_KINDS)}")
    params.output_kind = cast("OutputKind", kind.lower())


def _relations(params: SamplingParams) -> None:
    """The normal forms and rules that two meanings of one value, or two fields, make."""
    if params.top_k == -1:
        params.top_k = 0
    if params.seed == -1:
        params.seed = None
    if params.truncate_prompt_tokens == 0:
        refuse("truncate_prompt_tokens", 0, "null, -1 (the context's limit) or at least 1")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        refuse("min_tokens", params.min_tokens, f"at most max_tokens, {params.max_tokens}")
    if params.stop and not params.detokenize:
        refuse("stop", params.stop, "empty when detokenize is false: stop strings are looked for in the text")
