"""A plan's integers as arrays: what the ops read in one step. Knows blocks and positions; knows no tensor of floats.

Built in `array.array`s, one row after the other: a decoding step has few integers, and a dozen NumPy calls on them
would cost more than the loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from octavo.core.plan import ScheduledRequest, StepPlan
from octavo.ops.api import Batch, Int32Array


def make_batch(plan: StepPlan, block_size: int) -> Batch:
    """The Batch of a plan; token rows in the plan's order, `logit_rows` those that `wanted_rows` lists."""
    token_ids, positions, slot_mapping = array("i"), array("i"), array("i")
    query_start, seq_lens, logit_rows = array("i", [0]), array("i"), array("i")
    for row in plan.scheduled:
        start, end = row.start, row.start + row.num_tokens
        token_ids += row.request.token_ids[start:end]
        positions.extend(range(start, end))
        _extend_slots(slot_mapping, row.block_table, start, end, block_size)
        first = query_start[-1]
        logit_rows.extend(first + i for i in wanted_rows(row))
        query_start.append(first + row.num_tokens)
        seq_lens.append(end)
    return Batch(
        token_ids=_view(token_ids),
        positions=_view(positions),
        slot_mapping=_view(slot_mapping),
        query_start=_view(query_start),
        seq_lens=_view(seq_lens),
        block_tables=_stack([row.block_table for row in plan.scheduled]),
        logit_rows=_view(logit_rows),
    )


def wanted_rows(row: ScheduledRequest) -> Sequence[int]:
    """Which of a request's rows need logits, counted from its first: those that score a prompt token, where asked for
    (the row at position p scores the token at p + 1), then the one that samples."""
    last = row.num_tokens - 1
    num_scored = 0
    if row.request.params.prompt_logprobs is not None:
        num_scored = max(0, min(row.start + row.num_tokens, row.request.num_prompt_tokens - 1) - row.start)
    return (*range(num_scored), last) if row.samples else range(num_scored)


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
