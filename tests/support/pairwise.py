"""Few rows of a large matrix, in which each value of each factor meets each value of every other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Pair: TypeAlias = frozenset[tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Greedy: each row begins with a pair that no row has yet, and then takes, factor by factor, the value that meets
    most others for the first time; of equals the one that was taken least so far. The same rows every time."""
    values = [(name, value) for name in factors for value in factors[name]]
    missing = {frozenset(pair): None for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0]}
    num_taken = dict.fromkeys(values, 0)
    rows = []
    while missing:
        row = dict(sorted(next(iter(missing)), key=lambda item: list(factors).index(item[0])))
        for name in factors:
            if name not in row:
                row[name] = max(
                    factors[name],
                    key=lambda value: (
                        sum(frozenset([(name, value), other]) in missing for other in row.items()),
                        -num_taken[name, value],
                    ),
                )
        for pair in pairs_of(row):
            missing.pop(pair, None)
        for item in row.items():
            num_taken[item] += 1
        rows.append({name: row[name] for name in factors})
    return rows
