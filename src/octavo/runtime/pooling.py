"""From the hidden states of a step's tokens to the embeddings of the prompts that end in it.

Owns the arithmetic, and the sum that a mean carries from chunk to chunk. Knows no model and no step beyond its rows.

An embedding depends on its prompt alone, to the bit. A token's hidden state does, wherever its chunk began. A mean sums
them in float64, token by token from the first one on, whatever is in a chunk; a request that has to begin again after a
preemption begins its sum again. The length of a vector is the exact sum of squares (fsum), rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.core.plan import RowResult, ScheduledRequest
from octavo.ops.api import Float32Array

Float64Array: TypeAlias = npt.NDArray[np.float64]
# (first, count) -> float32 [count, hidden]: of token rows of the step, after the model's last norm.
FinalStates: TypeAlias = Callable[[int, int], Float32Array]

MAX_STATES = 256  # rows normed and summed at a time: at 4,096 columns, 4 MB of float32 and 8 of float64
SMALLEST_LENGTH = 1e-12  # what a shorter vector is divided by, as in torch's normalize


@dataclass(slots=True)
class RunningSum:
    """Of the hidden states of a request's first `num_tokens` tokens."""

    total: Float64Array  # [hidden]
    num_tokens: int


def pool(final_states: FinalStates, scheduled: Sequence[ScheduledRequest], results: Sequence[RowResult]) -> None:
    """Give each row that ends a prompt its embedding, in its result. One that is not finite is an error of that row."""
    first = 0  # the row's first token among the step's
    for row, result in zip(scheduled, results, strict=True):
        pooling = row.request.source.pooling
        if pooling is not None:
            mean = pooling.pooling_type == "mean"
            vector = (_mean if mean else _last)(final_states, row, first)
            if vector is not None:
                _finish(vector, pooling.normalize is not False, result)
        first += row.num_tokens


def _ends_prompt(row: ScheduledRequest) -> bool:
    return row.start + row.num_tokens == row.request.num_prompt_tokens


def _last(final_states: FinalStates, row: ScheduledRequest, first: int) -> Float64Array | None:
    if not _ends_prompt(row):
        return None
    return final_states(first + row.num_tokens - 1, 1)[0].astype(np.float64)


def _mean(final_states: FinalStates, row: ScheduledRequest, first: int) -> Float64Array | None:
    request = row.request
    for offset in range(0, row.num_tokens, MAX_STATES):
        states = final_states(first + offset, min(MAX_STATES, row.num_tokens - offset)).astype(np.float64)
        if row.start + offset == 0:
            request.pooled = RunningSum(np.zeros(states.shape[1]), 0)
        pooled = request.pooled
        assert isinstance(pooled, RunningSum) and pooled.num_tokens == row.start + offset, "a token is not in the sum"
        for state in states:  # one by one: NumPy's own sums choose their order by the shape
            pooled.total += state
        pooled.num_tokens += len(states)
    if not _ends_prompt(row):
        return None
    request.pooled = None
    return pooled.total / pooled.num_tokens


def _finish(vector: Float64Array, normalize: bool, result: RowResult) -> None:
    if normalize and np.isfinite(vector).all():
        vector = vector / max(math.sqrt(math.fsum((vector * vector).tolist())), SMALLEST_LENGTH)
    embedding = vector.astype("<f4")
    if np.isfinite(embedding).all():
        result.embedding = embedding.tobytes()
    else:
        result.error = result.error or "the embedding has values that are not finite"
