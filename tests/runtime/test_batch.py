"""A plan as arrays: by hand, and the native writer against the definition."""

from __future__ import annotations

import dataclasses
import random
from array import array

import numpy as np
import pytest

from octavo.core.plan import ScheduledRequest, StepPlan
from octavo.ops import isa
from octavo.runtime.batch import make_batch
from support.sampling import request


def row(start: int, num_tokens: int, blocks: list[int], *, num_held: int, samples: bool, num_scored: int = 0):
    tokens = [100 * blocks[0] + position for position in range(num_held)]
    return ScheduledRequest(request(prompt=tokens), start, num_tokens, array("i", blocks), samples, num_scored)


def test_a_decode_a_chunk_and_a_scored_prompt():
    plan = StepPlan(
        [
            row(17, 3, [5, 2], num_held=30, samples=False),
            row(4, 1, [7], num_held=5, samples=True),
            row(0, 3, [1], num_held=3, samples=True, num_scored=2),
        ]
    )
    batch = make_batch(plan, 16)
    assert batch.token_ids.tolist() == [517, 518, 519, 704, 100, 101, 102]
    assert batch.positions.tolist() == [17, 18, 19, 4, 0, 1, 2]
    assert batch.slot_mapping.tolist() == [33, 34, 35, 116, 16, 17, 18]
    assert batch.query_start.tolist() == [0, 3, 4, 7]
    assert batch.seq_lens.tolist() == [20, 5, 3]
    assert batch.block_tables.tolist() == [[5, 2], [7, 0], [1, 0]]
    assert batch.logit_rows.tolist() == [3, 6, 4, 5]  # who samples, then what scores


def random_plan(seed: int, block_size: int) -> StepPlan:
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randrange(1, 6)):
        num_held = rng.randrange(1, 100)
        start = rng.randrange(num_held)
        num_tokens = rng.randrange(1, num_held - start + 1)
        blocks = rng.sample(range(1000), -(-num_held // block_size) + rng.randrange(2))
        samples = start + num_tokens == num_held
        num_scored = rng.choice([0, num_tokens - samples])
        rows.append(row(start, num_tokens, blocks, num_held=num_held, samples=samples, num_scored=num_scored))
    return StepPlan(rows)


@pytest.mark.parametrize("block_size", [16, 32])
def test_the_native_step_is_the_batch(block_size):
    native = isa.load(isa.available()[0])
    for seed in range(100):
        plan = random_plan(seed, block_size)
        expected = dataclasses.astuple(make_batch(plan, block_size))
        step = native.make_step(plan.scheduled, block_size)
        for mine, theirs in zip(native.step_arrays(step), expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_a_row_outside_its_tokens_or_blocks_is_refused():
    native = isa.load(isa.available()[0])
    for wrong in (row(0, 6, [1], num_held=5, samples=True), row(0, 17, [1], num_held=20, samples=False)):
        with pytest.raises(ValueError, match="within its tokens and blocks"):
            native.make_step([wrong], 16)
