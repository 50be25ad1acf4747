"""A plan's integers as arrays: what the ops read in one step. Knows blocks and positions; knows no tensor of floats."""

from __future__ import annotations

import numpy as np

from octavo.core.plan import ScheduledRequest, StepPlan
from octavo.ops.api import Batch, Int32Array


def make_batch(plan: StepPlan, block_size: int) -> Batch:
    """The Batch of a plan; token rows in the plan's order, `logit_rows` as `wanted_rows` lists them."""
    rows = plan.scheduled
    counts = np.fromiter((row.num_tokens for row in rows), np.int32, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int32, len(rows))
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    # positions[t] = start of t's request + t's place among that request's rows
    positions = np.arange(query_start[-1], dtype=np.int32) + np.repeat(starts - query_start[:-1], counts)
    block_tables = np.zeros((len(rows), max(len(row.block_table) for row in rows)), np.int32)
    token_ids = np.empty(len(positions), np.int32)
    logit_rows: list[Int32Array] = []
    for r, row in enumerate(rows):
        # np.array copies: the scheduler appends to both, which an outstanding view would forbid.
        block_tables[r, : len(row.block_table)] = np.array(row.block_table, np.int32)
        tokens = np.frombuffer(row.request.token_ids, np.int32, row.num_tokens, 4 * row.start)
        token_ids[query_start[r] : query_start[r + 1]] = tokens
        logit_rows.append(query_start[r] + wanted_rows(row))
    owners = np.repeat(np.arange(len(rows)), counts)
    blocks = block_tables[owners, positions // block_size]
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=blocks * np.int32(block_size) + positions % np.int32(block_size),
        query_start=query_start,
        seq_lens=starts + counts,
        block_tables=block_tables,
        logit_rows=np.concatenate(logit_rows).astype(np.int32, copy=False),
    )


def wanted_rows(row: ScheduledRequest) -> Int32Array:
    """Which of a request's rows need logits, counted from its first: those that score a prompt token, where asked for
    (the row at position p scores the token at p + 1), then the one that samples."""
    last = [row.num_tokens - 1] if row.samples else []
    return np.array([*range(num_scored(row)), *last], np.int32)


def num_scored(row: ScheduledRequest) -> int:
    """How many of the row's first tokens predict a prompt token whose logprob the request wants."""
    if row.request.params.prompt_logprobs is None:
        return 0
    return max(0, min(row.start + row.num_tokens, row.request.num_prompt_tokens - 1) - row.start)
