"""Reading a JSON body into a record: the checks of single fields, and the refusal of fields that nobody knows.

Owns types; the ranges of sampling fields belong to SamplingParams. Messages name the field, the value and what is
allowed, and are bounded whatever the client sends. `null` means absent, everywhere.
"""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

from octavo.errors import InvalidRequestError, refuse

Check = Callable[[str, Any], Any]  # (field name, value that is not None) -> the value to keep
R = TypeVar("R", bound="Record")


def wire(check: Check | type[Record], default: Any = None, *, required: str | None = None) -> Any:
    """A field of a Record that is read from the body; one that is a Record itself is an object there. A field that must
    be there says in `required` what it must be."""
    return dataclasses.field(default=default, metadata={"check": check, "required": required})


class Record:
    """Base of the request records: dataclasses whose `wire` fields are read by `parse`."""

    # Fields that go to SamplingParams as they are; they are collected in `sampling`.
    SAMPLING: ClassVar[frozenset[str]] = frozenset()
    # Fields that OpenAI or vLLM defines and that mean nothing here.
    NO_OPS: ClassVar[frozenset[str]] = frozenset()
    # Fields that octavo cannot honour yet, and the values that ask nothing of it.
    LATER: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


def parse(record: type[R], body: Mapping[str, Any], *, allow_unknown: bool = False, path: str = "") -> R:
    """The record that `body` describes. Raises InvalidRequestError."""
    checks = _checks(record)
    values: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in body.items():
        if name in checks:
            check = checks[name]
            if value is None:
                continue
            if isinstance(check, type):
                inner = mapping(path + name, value)
                values[name] = parse(check, inner, allow_unknown=allow_unknown, path=f"{path}{name}.")
            else:
                values[name] = check(path + name, value)
        elif name in record.SAMPLING:
            if value is not None:
                sampling[name] = value
        elif name in record.LATER:
            if value is not None and not any(_same(value, idle) for idle in record.LATER[name]):
                raise InvalidRequestError(
                    f"{path}{name} is {reprlib.repr(value)}, but octavo does not support {path}{name} yet",
                    param=path + name,
                )
        elif name not in record.NO_OPS and not allow_unknown:
            _refuse_unknown(name, {*checks, *record.SAMPLING, *record.NO_OPS, *record.LATER}, path)
    for name, allowed in required_fields(record).items():
        if name not in values:
            raise InvalidRequestError(f"{path}{name} is missing; it must be {allowed}", param=path + name)
    if record.SAMPLING:
        values["sampling"] = sampling
    return record(**values)


def _checks(record: type[Record]) -> dict[str, Check | type[Record]]:
    fields = dataclasses.fields(record)  # type: ignore[arg-type]  # the subclasses are dataclasses
    return {field.name: field.metadata["check"] for field in fields if "check" in field.metadata}


def required_fields(record: type[Record]) -> dict[str, str]:
    """The fields that a body must have, and what they must be."""
    fields = dataclasses.fields(record)  # type: ignore[arg-type]  # the subclasses are dataclasses
    return {field.name: field.metadata["required"] for field in fields if field.metadata.get("required")}


def boolean(name: str, value: Any) -> Any:
    if not isinstance(value, bool):
        refuse(name, value, "true or false")
    return value


def string(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        refuse(name, value, "a string")
    return value


def short_string(max_length: int) -> Check:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, str) or not 1 <= len(value) <= max_length:
            refuse(name, value, f"a string of 1 to {max_length} characters")
        return value

    return check


def one_of(*words: str) -> Check:
    def check(name: str, value: Any) -> Any:
        if value not in words:
            refuse(name, value, f"one of {', '.join(map(repr, words))}")
        return value

    return check


def integer(low: int, high: int | None = None) -> Check:
    allowed = f"an integer from {low} on" if high is None else f"an integer in [{low}, {high}]"

    def check(name: str, value: Any) -> Any:
        if type(value) is not int or value < low or (high is not None and value > high):
            refuse(name, value, allowed)
        return value

    return check


def number(low: float, high: float) -> Check:
    def check(name: str, value: Any) -> Any:
        if type(value) not in (int, float) or not low <= value <= high:  # the body's JSON has no NaN
            refuse(name, value, f"a number in [{low}, {high}]")
        return value

    return check


def mapping(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        refuse(name, value, "an object")
    return value


def list_of(kind: type, kinds: str, *, min_length: int = 0) -> Check:
    """A list whose entries are all of exactly this JSON type."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, list) or len(value) < min_length or not all(type(entry) is kind for entry in value):
            refuse(name, value, f"a list of {kinds}" + (", not empty" if min_length else ""))
        return value

    return check


def anything(name: str, value: Any) -> Any:
    return value


def _same(value: Any, idle: Any) -> bool:
    """Equal and of one type: false is not 0."""
    return type(value) is type(idle) and bool(value == idle)


def _refuse_unknown(name: str, known: Iterable[str], path: str) -> NoReturn:
    shown = repr(path + name[:100])
    nearest = difflib.get_close_matches(name[:100], sorted(known), n=1)
    hint = f"; did you mean {path + nearest[0]!r}?" if nearest else ""
    raise InvalidRequestError(f"unknown field {shown}{hint}", param=(path + name)[:100], code="unknown_field")
