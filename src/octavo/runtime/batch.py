"""A plan's integers as arrays: what the ops read in one step. Knows blocks and positions; knows no tensor of floats.

This is the definition, which eager execution uses. The program's batches are written by native code
(native/bindings/step.cpp), at a tenth of the cost.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from octavo.core.plan import StepPlan
from octavo.ops.api import Batch, Int32Array


def make_batch(plan: StepPlan, block_size: int) -> Batch:
    """The Batch of a plan: token rows in the plan's order, `logit_rows` first those that sample, once for each sample,
    then those that score."""
    token_ids, positions, slot_mapping = array("i"), array("i"), array("i")
    query_start, seq_lens, sampling, scored = array("i", [0]), array("i"), array("i"), array("i")
    for row in plan.scheduled:
        start, end = row.start, row.start + row.num_tokens
        token_ids += row.request.token_ids[start:end]
        positions.extend(range(start, end))
        _extend_slots(slot_mapping, row.block_table, start, end, block_size)
        first = query_start[-1]
        scored.extend(range(first, first + row.num_scored))
        query_start.append(first + row.num_tokens)
        sampling.extend([query_start[-1] - 1] * len(row.sampling))
        seq_lens.append(end)
    return Batch(
        token_ids=_view(token_ids),
        positions=_view(positions),
        slot_mapping=_view(slot_mapping),
        query_start=_view(query_start),
        seq_lens=_view(seq_lens),
        block_tables=_stack([row.block_table for row in plan.scheduled]),
        logit_rows=_view(sampling + scored),
    )


def _extend_slots(slots: array[int], block_table: Sequence[int], start: int, end: int, block_size: int) -> None:
    """Where tokens start … end - 1 go, block by block."""
    for block in range(start // block_size, (end - 1) // block_size + 1):
        # Position p of this block lies at slot p + shift.
        shift = (block_table[block] - block) * block_size
        slots.extend(range(max(start, block * block_size) + shift, min(end, (block + 1) * block_size) + shift))


def _stack(block_tables: list[array[int]]) -> Int32Array:
    """[R, longest], padded with zeros."""
    num_bytes = 4 * max(map(len, block_tables))
    padded = b"".join([table.tobytes().ljust(num_bytes, b"\0") for table in block_tables])
    return np.frombuffer(padded, np.int32).reshape(len(block_tables), -1)


def _view(values: array[int]) -> Int32Array:
    return np.frombuffer(values, np.int32)
