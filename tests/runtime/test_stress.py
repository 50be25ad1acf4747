"""Two thousand requests over a pool that holds a tenth of what they want at once: samples, beams, priorities, aborts.
All end, each with the bytes that it gets alone, and nothing is left behind."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.engine import Engine
from octavo.engine.messages import TokenDelta
from octavo.request import EngineRequest, FinishReason
from support.checkpoints import tiny_llama
from support.engines import Answer, make_beams, make_engine, make_samples, run_requests

NUM_CALLS = 2000
NUM_DISTINCT = 60
NUM_AT_ONCE = 64  # calls in the engine
NUM_BLOCKS = 40
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 2},
    {"temperature": 0.8, "top_k": 20, "min_tokens": 3, "prompt_logprobs": 1},
)


def call(number: int, serial: int) -> list[EngineRequest]:
    """What call `number` asks, always the same; the ids are new."""
    rng = random.Random(number)
    request_id = f"{serial}"
    stem = [3 + (rng.randrange(3) * 31 + i * 7) % 300 for i in range(rng.choice([0, 24, 50]))]
    prompt = [*stem, *(rng.randrange(3, 300) for _ in range(rng.choice([1, 10, 20, 30])))]
    max_tokens = rng.choice([3, 12, 40, 70])
    if rng.random() < 0.25:
        requests = [make_beams(request_id, prompt, rng.choice([2, 3, 4]), min(max_tokens, 20))]
    else:
        params, n = rng.choice(PARAMS), rng.choice([1, 1, 1, 2, 4])
        requests = make_samples(request_id, prompt, n, seed=rng.randrange(99), max_tokens=max_tokens, **params)
        for sample in requests[1:]:
            sample.params.prompt_logprobs = None
    return requests


class Life:
    """All that the engine was asked, and what came of it."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine, self.rng = engine, rng
        self.answers: dict[str, Answer] = {}
        self.expected: dict[str, Answer] = {}
        self.unfinished: dict[str, None] = {}
        self.ends: Counter[FinishReason] = Counter()

    def add(self, request: EngineRequest, expected: Answer) -> None:
        request.priority, request.user = self.rng.randrange(3), self.rng.choice("abc")
        self.engine.add_request(request)
        self.expected[request.request_id] = expected
        self.answers[request.request_id] = Answer()
        self.unfinished[request.request_id] = None

    def step(self) -> None:
        if self.rng.random() < 0.03:
            self.take(self.engine.abort([self.rng.choice(list(self.unfinished))]))
        self.take(self.engine.step())

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            assert delta.error is None, delta.error
            answer = self.answers[delta.request_id]
            answer.take(delta)
            if delta.finish_reason is not None:
                self.ends[delta.finish_reason] += 1
                del self.unfinished[delta.request_id]
                self.check(answer, self.expected[delta.request_id])

    def check(self, answer: Answer, expected: Answer) -> None:
        if answer.finish_reason is FinishReason.ABORT:  # it got no further, and nothing else
            assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
            assert answer.logprobs == expected.logprobs[: len(answer.logprobs)]
        else:
            assert answer == expected


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=2, hidden=64)


@pytest.fixture(scope="module")
def alone(model) -> list[list[Answer]]:
    """What each distinct call gets, sample by sample, each by itself."""
    oracle = make_engine(model, enable_prefix_caching=False, num_threads=1)
    answers: list[list[Answer]] = []
    num_wanted = 0  # blocks, by all distinct calls
    for number in range(NUM_DISTINCT):
        answers.append([])
        for request in call(number, number):
            request.fork_of = None
            answers[-1] += run_requests(oracle, [request])
            num_tokens = len(request.prompt_token_ids) + (request.params.max_tokens or 0)
            num_wanted += -(-num_tokens // oracle.info.block_size)
    assert num_wanted / NUM_DISTINCT * NUM_AT_ONCE > 10 * NUM_BLOCKS
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "mode"), [("priority", "swap"), ("fcfs", "recompute"), ("fair", "auto")])
def test_a_pool_of_a_tenth(model, alone, policy, mode):
    engine = make_engine(
        model,
        num_threads=1,  # so small a model gains nothing by a second
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_batched_tokens=192,
        scheduling_policy=policy,
        preemption_mode=mode,
        swap_space=0.0001 if mode == "swap" else 0.01,  # GiB; little enough that some are computed again all the same
    )
    life = Life(engine, random.Random(4))
    for serial in range(NUM_CALLS):
        number = life.rng.randrange(NUM_DISTINCT)
        for request, expected in zip(call(number, serial), alone[number], strict=True):
            life.add(request, expected)
        while len(life.unfinished) > NUM_AT_ONCE:
            life.step()
    while life.unfinished:
        life.step()
    engine.check_integrity()
    kv, stats = engine.scheduler.kv, engine.stats()
    assert (kv.pool.num_used, kv.swap.num_free) == (0, kv.swap.num_slots)
    assert stats.num_preemptions > 100 and stats.prefix_cache_hits > 0, stats
    assert 0 < stats.num_swaps < stats.num_preemptions if mode == "swap" else mode == "auto" or stats.num_swaps == 0
    assert all(life.ends[reason] for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT))
