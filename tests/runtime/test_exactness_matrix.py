"""Same request, same bytes, through all of paging at once: whatever company, chunks, cache, preemption and threads a
request meets, its tokens, logprobs and beams are those it gets alone. Not every combination, but each pair of values,
and as many more at random."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.engine import Engine
from octavo.request import EngineRequest
from support.checkpoints import tiny_llama
from support.engines import Answer, make_beams, make_engine, make_request, make_samples, run_requests
from support.pairwise import pairs_of, pairwise

FACTORS: dict[str, tuple[Any, ...]] = {
    "kv": ("float32", "bfloat16", "int8"),
    "company": (1, 2, 7, 33),
    "chunk": (16, 61, 2048),
    "cache": ("cold", "warm", "part of a block", "disk"),
    "preemption": ("none", "recompute", "swap"),
    "num_threads": (1, 2),
    "kind": ("greedy", "seeded", "n = 3", "beam 4"),
    "block_size": (16, 48),
    "is_eager": (False, True),
}
PAIRWISE = pairwise(FACTORS)
ALL = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
MATRIX = [*PAIRWISE, *random.Random(4).sample(ALL, 76)]
PROMPT = [3 + (i * 37) % 500 for i in range(75)]  # full blocks of both sizes, and part of one
SEEDED = {"temperature": 1.1, "top_p": 0.95, "repetition_penalty": 1.2, "presence_penalty": 0.4, "logprobs": 3}
STEPS_WITH_PREEMPTION = (2, 5, 13)


@pytest.fixture(scope="module")
def engine_with(tmp_path_factory) -> Callable[..., Engine]:
    def build(kv: str, **options: Any) -> Engine:
        model = models["float32" if kv == "float32" else "bfloat16"]
        if kv == "int8":
            options["kv_cache_dtype"] = "int8"
        return make_engine(model, **{"max_num_seqs": 64, "num_gpu_blocks_override": 700, **options})

    models: dict[str, Path] = {
        dtype: tiny_llama(tmp_path_factory.mktemp(dtype), dtype=dtype, heads=6, hidden=96, max_position_embeddings=2048)
        for dtype in ("float32", "bfloat16")
    }
    return build


@pytest.fixture(scope="module")
def alone(engine_with) -> Callable[[str, EngineRequest], Answer]:
    """The oracle: a request by itself, in whole chunks, without a cache; what it gets, by all that decides it."""
    engines = {kv: engine_with(kv, enable_prefix_caching=False) for kv in FACTORS["kv"]}
    known: dict[str, Answer] = {}

    def answer(kv: str, request: EngineRequest) -> Answer:
        key = repr((kv, request.prompt_token_ids, request.params, request.seed, request.sample_index, request.beams))
        if key not in known:
            request.fork_of = None
            (known[key],) = run_requests(engines[kv], [request])
        return known[key]

    return answer


def test_every_pair_of_values_is_in_the_matrix():
    pairs = {pair for row in PAIRWISE for pair in pairs_of(row)}
    values = [(name, value) for name in FACTORS for value in FACTORS[name]]
    assert pairs == {frozenset(pair) for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0]}
    assert len(PAIRWISE) < 30 and len(ALL) == 13_824


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: ", ".join(map(str, row.values())))
def test_a_request_gets_the_same_bytes(engine_with, alone, tmp_path, row):
    options = {
        "max_num_batched_tokens": row["chunk"],
        "num_threads": row["num_threads"],
        "block_size": row["block_size"],
        "enforce_eager": row["is_eager"],
        "preemption_mode": "auto" if row["preemption"] == "none" else row["preemption"],
        "swap_space": 0.01 if row["preemption"] == "swap" else 0.0,
        "kv_offload_dir": str(tmp_path) if row["cache"] == "disk" else None,
    }
    engine = engine_with(row["kv"], **options)
    match row["cache"]:
        case "warm":
            run_requests(engine, requests_of(row["kind"], "before", PROMPT))
        case "part of a block":
            run_requests(engine, requests_of("greedy", "before", [*PROMPT[:70], 4, 4, 4]))
        case "disk":
            run_requests(engine, requests_of(row["kind"], "before", PROMPT))
            engine.close()
            engine = engine_with(row["kv"], **options)
    requests = requests_of(row["kind"], "this", PROMPT)
    for number in range(1, row["company"]):
        requests += companion(number)

    def give_way(step: int) -> None:
        if row["preemption"] != "none" and step in STEPS_WITH_PREEMPTION:
            for request in [r for r in engine.scheduler.running if r.request_id.startswith("this")]:
                engine.scheduler._preempt(request)

    answers = run_requests(engine, requests, before_step=give_way)
    # Of the prompt's 75 tokens, the last is always computed. Only full blocks go to disk.
    on_disk = 74 // row["block_size"] * row["block_size"]
    num_cached_tokens = {"cold": 0, "warm": 74, "part of a block": 70, "disk": on_disk}[row["cache"]]
    assert answers[0].num_cached_tokens == num_cached_tokens
    stats = engine.stats()
    assert (stats.num_preemptions > 0, stats.num_swaps > 0) == (
        row["preemption"] != "none",
        row["preemption"] == "swap",
    )
    engine.close()
    for request, answer in zip(requests, answers, strict=True):
        assert answer == alone(row["kv"], request), request.request_id


def requests_of(kind: str, request_id: str, prompt: list[int], max_tokens: int = 24) -> list[EngineRequest]:
    match kind:
        case "greedy":
            return [make_request(request_id, prompt, max_tokens=max_tokens, temperature=0, logprobs=2)]
        case "seeded":
            return [make_request(request_id, prompt, seed=5, max_tokens=max_tokens, **SEEDED)]
        case "n = 3":
            return make_samples(request_id, prompt, 3, seed=6, max_tokens=max_tokens, **SEEDED)
    return [make_beams(request_id, prompt, 4, max_tokens)]


def companion(number: int) -> list[EngineRequest]:
    """One of twelve different requests; some begin like PROMPT, some are equal."""
    number %= 12
    kind = FACTORS["kind"][number % 4]
    prompt = [*PROMPT[: 20 * (number % 3)], *(3 + (number * 11 + i * 13) % 500 for i in range(5 + 7 * number))]
    return requests_of(kind, f"other {next(serial)}", prompt, max_tokens=10)


serial = itertools.count()
