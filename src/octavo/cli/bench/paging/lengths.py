"""Lengths of requests: built-in ones like those of the PagedAttention paper's traces, or those of a CSV file.

The paper (Kwon et al., SOSP 2023, figure 11) gives the means of its ShareGPT and Alpaca traces. Here lengths are
log-normal with the same means, after they are cut where the model's context ends. How far they spread is only a picture
there, so `sigma`, the deviation of a length's logarithm, has these sources:

    ShareGPT, outputs   the paper's figure 2: with Orca (Max), 13.3 % of 15.7 k slots are reserved by 7 requests for
                        tokens to come. That is E[output²] / 2 E[output] each, which is 298 with sigma 0.75.
    ShareGPT, inputs    assumed: first messages of chats are spread wider than answers
    Alpaca              a rough estimate from some forty examples of the data set
"""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from octavo.errors import ConfigError


class Length(NamedTuple):
    """Tokens of a request; both at least 1."""

    input: int
    output: int


@dataclass(frozen=True, slots=True)
class LogNormal:
    mean: float  # tokens, after cutting
    sigma: float


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    input: LogNormal
    output: LogNormal


TRACES = (
    Trace("ShareGPT", LogNormal(161.31, 1.1), LogNormal(337.99, 0.75)),
    Trace("Alpaca", LogNormal(19.31, 0.6), LogNormal(58.45, 0.85)),
)


def draw(trace: Trace, num_requests: int, max_model_len: int, seed: int) -> list[Length]:
    """Lengths of that many requests: the distribution's quantiles in random order, so that `seed` only decides who
    comes when, and with how long an output. A prompt takes at most half the context, the output what is left."""
    generator = random.Random(seed)
    quantiles = [statistics.NormalDist().inv_cdf((i + 0.5) / num_requests) for i in range(num_requests)]
    of_inputs, of_outputs = (generator.sample(quantiles, num_requests) for _ in range(2))
    try:
        inputs = _fit(trace.input, of_inputs, [max_model_len // 2] * num_requests)
        outputs = _fit(trace.output, of_outputs, [max_model_len - num_tokens for num_tokens in inputs])
    except ValueError as error:
        raise ConfigError(f"--max-model-len is {max_model_len}; {trace.name}'s lengths do not fit: {error}") from None
    return [Length(*pair) for pair in zip(inputs, outputs, strict=True)]


def _fit(spread: LogNormal, deviations: Sequence[float], limits: Sequence[int]) -> list[int]:
    """Whole lengths, each within 1 and its limit, with the mean of `spread`. ValueError: the limits are too low."""

    def cut(log_median: float) -> list[int]:
        return [
            min(limit, max(1, round(math.exp(log_median + spread.sigma * z))))
            for z, limit in zip(deviations, limits, strict=True)
        ]

    low, high = 0.0, math.log(max(limits)) + spread.sigma * 4
    if sum(cut(high)) < spread.mean * len(deviations):
        raise ValueError(f"a mean of {spread.mean} tokens")
    for _ in range(40):
        middle = (low + high) / 2
        if sum(cut(middle)) < spread.mean * len(deviations):
            low = middle
        else:
            high = middle
    return cut(high)


def read(path: Path, max_model_len: int) -> list[Length]:
    """The lengths in a CSV file with the columns `input` and `output`; others are passed over."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, skipinitialspace=True)
            missing = [column for column in Length._fields if column not in (rows.fieldnames or ())]
            if missing:
                raise ConfigError(f"{path}, line 1: there is no column {missing[0]!r}; columns are input,output")
            lengths = [_length(row, f"{path}, line {rows.line_num}", max_model_len) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--lengths: {path} cannot be read: {reason}") from None
    if not lengths:
        raise ConfigError(f"--lengths: {path} has no requests")
    return lengths


def _length(row: dict[str, str | None], place: str, max_model_len: int) -> Length:
    for column in Length._fields:
        value = row[column] or ""
        if not (value.isascii() and value.isdigit() and int(value) >= 1):
            raise ConfigError(f"{place}: {column} is {value!r}; it must be a whole number, at least 1")
    length = Length(*(int(row[column] or 0) for column in Length._fields))
    if sum(length) > max_model_len:
        raise ConfigError(f"{place}: input + output is {sum(length)}; --max-model-len allows {max_model_len}")
    return length
