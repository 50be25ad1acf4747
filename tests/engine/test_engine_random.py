"""Thousands of random schedules: whatever happens around a request, its answer is that of a plain loop."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.request import BeamSearchParams
from support.fake_runner import FakeStore
from support.schedule_world import World

STEMS = ([0, 1, 2, 3] * 5, [0, 1, 2, 3, 4] * 4)
# A piece of a common stem and a tail of few tokens, so that prefixes meet and part at any place.
PROMPTS = st.builds(
    lambda stem, length, tail: [*stem[:length], *tail],
    st.sampled_from(STEMS),
    st.integers(0, 20),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
SHARED_FIELDS = {
    "prompt": PROMPTS,
    "eos_token_ids": st.sampled_from([[], [], [], [3]]),
    "cache_salt": st.sampled_from([None, None, "salt"]),
    "priority": st.integers(0, 2),
    "user": st.sampled_from([None, "a", "b"]),
}
SAMPLES = st.fixed_dictionaries(
    {
        **SHARED_FIELDS,
        "n": st.sampled_from([1, 1, 1, 2, 4]),
        "max_tokens": st.sampled_from([20, None, 9, 4, 2, 1, 0]),
        "min_tokens": st.sampled_from([0, 0, 2, 5]),
        "stop_token_ids": st.sampled_from([[], [], [], [5]]),
        "ignore_eos": st.booleans(),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "logprobs": st.sampled_from([None, 0]),
        "seed": st.integers(0, 3),
    }
)
BEAMS = st.builds(
    BeamSearchParams,
    beam_width=st.sampled_from([2, 3, 4, 1]),
    max_tokens=st.sampled_from([12, 9, 5, 1]),
    length_penalty=st.sampled_from([1.0, 0.0]),
    early_stopping=st.sampled_from([False, True]),
    ignore_eos=st.booleans(),
)
TROUBLES = ("abort", "abort in a step", "row fails", "step fails", "gives way", "gives way")
BEAM_SEARCHES = st.fixed_dictionaries({**SHARED_FIELDS, "beams": BEAMS})
EMBEDDINGS = st.fixed_dictionaries({**SHARED_FIELDS, "pooling_type": st.sampled_from(["mean", "last"])})


class RandomSchedules(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.sampled_from([4, 3, 2, 1]),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        max_num_seqs=st.sampled_from([5, 4, 3, 2, 1]),
        max_num_batched_tokens=st.sampled_from([24, 12, 7, 4, 2, 1]),
        max_model_len=st.sampled_from([40, 30, 16, 4]),
        long_prefill_token_threshold=st.sampled_from([0, 0, 1, 5]),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        num_slots=st.sampled_from([40, 7, 3, 1, 0]),
        preemption_mode=st.sampled_from(["swap", "auto", "recompute"]),
        store=st.sampled_from([None, FakeStore]),
    )
    def start(self, store, **options):
        has_store = store is not None and options["enable_prefix_caching"]
        self.world = World(**options, store=FakeStore() if has_store else None)

    @rule(requests=st.lists(SAMPLES, min_size=1, max_size=4))
    def add_samples(self, requests):
        for fields in requests:
            self.world.add_samples(**fields)

    @rule(searches=st.lists(BEAM_SEARCHES, min_size=1, max_size=2))
    def add_beams(self, searches):
        for fields in searches:
            self.world.add_beams(**fields)

    @rule(requests=st.lists(EMBEDDINGS, min_size=1, max_size=4))
    def add_embeddings(self, requests):
        for fields in requests:
            self.world.add_embedding(**fields)

    @precondition(lambda self: self.world.engine.has_unfinished)
    @rule(num_steps=st.integers(1, 12))
    def steps(self, num_steps):
        for _ in range(num_steps):
            self.world.step()

    @rule()
    def reset_prefix_cache(self):
        self.world.reset_prefix_cache()

    @precondition(lambda self: self.world.store)
    @rule(is_orderly=st.booleans(), damage=st.integers(0, 99))
    def restart(self, is_orderly, damage):
        self.world.restart(is_orderly, damage)

    @precondition(lambda self: self.world.scheduler.running)
    @rule(data=st.data(), trouble=st.sampled_from(TROUBLES))
    def trouble(self, data, trouble):
        cause(self.world, trouble, data.draw(st.sampled_from(self.world.unfinished())))

    def teardown(self):
        self.world.finish()

    @invariant()
    def books_balance(self):
        self.world.check()


def cause(world: World, trouble: str, victim: str) -> None:
    match trouble:
        case "abort":
            world.abort([victim])
        case "abort in a step":
            world.abort_in_a_step(victim)
        case "row fails":
            world.fail_row(victim)
        case "step fails":
            world.fail_step()
        case "gives way":
            world.preempt(victim)


RandomSchedules.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestRandomSchedules = RandomSchedules.TestCase


# ── Crowds: denser than what hypothesis finds, since every one of them is short of something ──────────────────────────


def crowd(rng: random.Random) -> World:
    """Up to a dozen requests, samples, beams and embeddings, with troubles between the steps, run to their end."""
    block_size = rng.choice([1, 2, 3, 4, 4])
    world = World(
        num_blocks=rng.randint(16, 44) // block_size,
        block_size=block_size,
        policy=rng.choice(["fcfs", "priority", "fair"]),
        max_num_seqs=rng.choice([4, 6, 9, 12]),
        max_num_batched_tokens=rng.choice([3, 8, 20, 64]),
        max_model_len=rng.choice([40, 64]),
        long_prefill_token_threshold=rng.choice([0, 0, 4]),
        enable_prefix_caching=rng.random() < 0.8,
        num_slots=rng.choice([0, 2, 6, 100, 100]),
        preemption_mode=rng.choice(["swap", "swap", "auto", "recompute"]),
        store=FakeStore() if rng.random() < 0.5 else None,
    )
    for _ in range(rng.randint(2, 9)):
        add_one(world, rng)
        for _ in range(rng.choice([0, 0, 1, 3, 8])):
            world.step()
        if rng.random() < 0.4 and (unfinished := world.unfinished()):
            cause(world, rng.choice(TROUBLES), rng.choice(unfinished))
        if rng.random() < 0.1:
            world.reset_prefix_cache()
        if rng.random() < 0.05:
            world.restart(rng.random() < 0.7, rng.randrange(99))
    world.finish()
    return world


def add_one(world: World, rng: random.Random) -> None:
    stem = rng.choice([[0, 1, 2, 3] * 5, [0, 1, 2, 3, 4] * 4])
    fields: dict[str, Any] = {
        "prompt": [*stem[: rng.randint(0, 12)], *(rng.randint(0, 2) for _ in range(rng.randint(1, 3)))],
        "eos_token_ids": rng.choice([[], [3]]),
        "priority": rng.randint(0, 2),
        "user": rng.choice("ab"),
    }
    kind = rng.random()
    if kind < 0.2:
        world.add_embedding(pooling_type=rng.choice(["mean", "mean", "last"]), **fields)
    elif kind < 0.5:
        beams = BeamSearchParams(
            beam_width=rng.choice([2, 3, 4]),
            max_tokens=rng.choice([4, 9, 14]),
            early_stopping=rng.random() < 0.5,
            ignore_eos=rng.random() < 0.5,
        )
        world.add_beams(beams=beams, **fields)
    else:
        n, max_tokens = rng.choice([1, 1, 2, 3, 5]), rng.choice([3, 9, 16, None])
        world.add_samples(n=n, max_tokens=max_tokens, min_tokens=0, seed=rng.randint(0, 3), logprobs=0, **fields)


@pytest.mark.parametrize("part", range(4))
def test_crowds(part):
    happened: Counter[str] = Counter()
    for number in range(75):
        world = crowd(random.Random(f"{part} {number}"))
        happened["embeddings"] += sum(answer.embedding is not None for answer in world.answers.values())
        happened["preemptions"] += world.scheduler.num_preemptions
        happened["swaps"] += world.scheduler.num_swaps
        happened["hits"] += world.scheduler.kv.num_hit_tokens
        happened["hits in the store"] += world.scheduler.kv.num_store_hit_tokens
    wanted = ("embeddings", "preemptions", "swaps", "hits", "hits in the store")
    assert all(happened[what] for what in wanted), happened
