"""From the hidden states of a step's tokens to the embeddings of the prompts that end in it.

Owns the arithmetic, and the sum that a mean carries from chunk to chunk. Knows no model and no step beyond its rows.

An embedding depends on its prompt alone, to the bit. A token's hidden state does, wherever its chunk began. A mean sums
them in float64, token by token from the first one on, whatever is in a chunk; a request that has to begin again after a
preemption begins its sum again. The squares of a vector's length are summed in order, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.core.plan import RowResult, ScheduledRequest
from octavo.ops.api import Float32Array, Int32Array
from octavo.pooling import PoolingParams

Float64Array: TypeAlias = npt.NDArray[np.float64]
# int32 [n] -> float32 [n, hidden]: of these token rows of the step, after the model's last norm.
FinalStates: TypeAlias = Callable[[Int32Array], Float32Array]

MAX_STATES = 256  # rows normed and summed at a time: at 4,096 columns, 4 MB of float32 and 8 of float64
SMALLEST_LENGTH = 1e-12  # what a shorter vector is divided by, as in torch's normalize


class RunningSum:
    """Of hidden states, added in the order of their tokens. That of a `last` has one."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def add(self, state: Float64Array) -> None:
        """[hidden]. One by one: NumPy's own sums choose their order by the shape."""
        if self.num_tokens == 0:
            self._total = state.copy()
        else:
            self._total += state
        self.num_tokens += 1

    @property
    def mean(self) -> Float64Array:
        return self._total / self.num_tokens


def pool(final_states: FinalStates, scheduled: Sequence[ScheduledRequest], results: Sequence[RowResult]) -> None:
    """Give each row that ends a prompt its embedding, in its result. One that is not finite is an error of that row."""
    wanted: list[int] = []  # token rows of the step, and …
    sums: list[RunningSum] = []  # … to which sum each of them belongs
    ended: list[tuple[RunningSum, PoolingParams, RowResult]] = []
    first = 0  # the row's first token among the step's
    for row, result in zip(scheduled, results, strict=True):
        pooling, end = row.request.source.pooling, first + row.num_tokens
        if pooling is not None:
            is_mean, ends_prompt = pooling.pooling_type == "mean", row.start + row.num_tokens == row.request.num_tokens
            if is_mean or ends_prompt:
                pooled = _sum_of(row) if is_mean else RunningSum()
                begin = first if is_mean else end - 1
                wanted += range(begin, end)
                sums += [pooled] * (end - begin)
            if ends_prompt:
                ended.append((pooled, pooling, result))
        first = end
    for offset in range(0, len(wanted), MAX_STATES):
        chunk = slice(offset, offset + MAX_STATES)
        states = final_states(np.array(wanted[chunk], np.int32)).astype(np.float64)
        for pooled, state in zip(sums[chunk], states, strict=True):
            pooled.add(state)
    for pooled, pooling, result in ended:
        _finish(pooled.mean, pooling, result)


def _sum_of(row: ScheduledRequest) -> RunningSum:
    """Of the tokens before this row: its request's own, or a new one where it begins (again)."""
    request = row.request
    if row.start == 0:
        request.pooled = RunningSum()
    pooled = request.pooled
    assert isinstance(pooled, RunningSum) and pooled.num_tokens == row.start, "a token is not in the sum"
    return pooled


def _finish(vector: Float64Array, pooling: PoolingParams, result: RowResult) -> None:
    if pooling.normalize is not False and np.isfinite(vector).all():
        length = math.sqrt(np.add.accumulate(vector * vector)[-1])
        vector = vector / max(length, SMALLEST_LENGTH)
    embedding = vector.astype("<f4")
    if np.isfinite(embedding).all():
        result.embedding = embedding.tobytes()
    else:
        result.error = result.error or "the embedding has values that are not finite"
