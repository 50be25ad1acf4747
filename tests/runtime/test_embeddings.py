"""Embeddings by a real engine: those of transformers in float32, and the same bytes in any company."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from octavo.engine.engine import Engine
from octavo.pooling import PoolingParams
from octavo.request import EngineRequest, FinishReason, SamplingParams
from support.checkpoints import tiny_llama, write_gguf
from support.engines import make_engine, make_request, run_requests

VOCAB = 512
LONG = [3 + (i * 29) % 370 for i in range(300)]  # more tokens than are summed at a time, and than a split has
PROMPTS = [[7], [5, 9, 100, 21, 3], LONG[:40], LONG]
POOLINGS: tuple[dict[str, Any], ...] = (
    {"pooling_type": "last", "normalize": True},
    {"pooling_type": "mean", "normalize": True},
    {"pooling_type": "last", "normalize": False},
    {"pooling_type": "mean", "normalize": False},
)
serial = itertools.count()


def embedding(prompt: list[int], **pooling: Any) -> EngineRequest:
    return EngineRequest(
        request_id=f"e{next(serial)}",
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=0, seed=0, detokenize=False),
        seed=0,
        pooling=PoolingParams(**pooling),
    )


def embed(
    engine: Engine, requests: list[EngineRequest], others: list[EngineRequest] | None = None, arrive: int = 0
) -> list[bytes]:
    """The embeddings of these, which come after `arrive` steps of the others."""
    found: dict[str, bytes] = {}
    for other in others or []:
        engine.add_request(other)
    for _ in range(arrive):
        engine.step()
    for request in requests:
        engine.add_request(request)
    wanted = {request.request_id for request in requests}
    while engine.has_unfinished:
        for delta in engine.step():
            assert delta.error is None, delta.error
            if delta.request_id in wanted:
                assert not delta.token_ids and delta.finish_reason is FinishReason.STOP
                assert delta.embedding is not None and delta.request_id not in found
                found[delta.request_id] = delta.embedding
    engine.check_integrity()
    assert engine.scheduler.kv.pool.num_used == 0
    return [found[request.request_id] for request in requests]


def last_hidden_state(path: Path, prompt: list[int]) -> npt.NDArray[np.float32]:
    """float32 [T, hidden] by transformers, after the last norm."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        states: npt.NDArray[np.float32] = model(torch.tensor([prompt])).last_hidden_state[0].numpy()
    return states


def pooled(states: npt.NDArray[np.float32], pooling_type: str, normalize: bool) -> npt.NDArray[np.float32]:
    import torch

    vector = torch.from_numpy(states[-1] if pooling_type == "last" else states.mean(axis=0))
    return (torch.nn.functional.normalize(vector, dim=0) if normalize else vector).numpy()


@pytest.mark.parametrize(
    "variety",
    [
        {},
        {"tie": True},
        {"attention_bias": True, "kv_heads": 1},
        {"architecture": "mistral", "sliding_window": None, "head_dim": 32},
    ],
    ids=["plain", "tied", "bias", "mistral"],
)
def test_they_are_those_of_transformers(tmp_path: Path, variety: dict[str, Any]) -> None:
    folder = tiny_llama(tmp_path / "model", **variety)
    engine = make_engine(folder, max_model_len=512)
    states = [last_hidden_state(folder, prompt) for prompt in PROMPTS]
    work = list(itertools.product(range(len(PROMPTS)), POOLINGS))
    found = embed(engine, [embedding(PROMPTS[index], **pooling) for index, pooling in work])
    for (index, pooling), bytes_found in zip(work, found, strict=True):
        expected = pooled(states[index], **pooling)
        np.testing.assert_allclose(np.frombuffer(bytes_found, "<f4"), expected, rtol=0, atol=2e-5)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return tiny_llama(folder, dtype=request.param, vocab=VOCAB, heads=6, kv_heads=2, hidden=96)


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, list[bytes]]:
    """Each prompt by itself in one step, without a prefix cache; by the pooling."""
    engine = make_engine(model, max_model_len=512, enable_prefix_caching=False)
    return {
        str(pooling): [embed(engine, [embedding(prompt, **pooling)])[0] for prompt in PROMPTS] for pooling in POOLINGS
    }


def talkers(num: int, seed: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    return [
        make_request(f"t{next(serial)}", LONG[: rng.randint(1, 80)], seed=i, max_tokens=rng.randint(5, 60), logprobs=0)
        for i in range(num)
    ]


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"num_threads": 1},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 17},
        {"max_num_batched_tokens": 5, "max_num_seqs": 1},
        {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 40},
        {"block_size": 32, "scheduling_policy": "fair"},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_the_same_bytes_in_any_company_and_any_chunks(model: Path, alone: Any, way: dict[str, Any]) -> None:
    engine = make_engine(model, **({"max_model_len": 512} | way))
    for round_number in range(2):  # in the second one the cache knows all prompts
        work = list(itertools.product(range(len(PROMPTS)), POOLINGS))
        random.Random(round_number).shuffle(work)
        requests = [embedding(PROMPTS[index], **pooling) for index, pooling in work]
        found = embed(engine, requests, talkers(6, round_number), arrive=3)
        assert found == [alone[str(pooling)][index] for index, pooling in work]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_who_has_to_give_way_in_the_middle_of_its_prompt(model: Path, alone: Any, mode: str) -> None:
    """The older ones outgrow their blocks while a mean is half summed."""
    swap_space = 0.01 if mode == "swap" else 0
    options: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 11, "preemption_mode": mode}
    for pooling in POOLINGS:
        engine = make_engine(model, max_model_len=512, swap_space=swap_space, **options)
        others = [make_request(f"t{i}", LONG[i : i + 10], max_tokens=50, ignore_eos=True) for i in range(3)]
        request = embedding(LONG, **pooling)
        assert embed(engine, [request], others, arrive=2) == [alone[str(pooling)][3]]
        stats = engine.stats()
        assert stats.num_preemptions > 0 and (stats.num_swaps > 0) == (mode == "swap")


def test_company_does_not_see_them(model: Path) -> None:
    """Those who generate say what they say without embeddings beside them."""
    engine = make_engine(model, max_model_len=512)
    expected = run_requests(engine, talkers(5, 1))
    crowd = [embedding(LONG[i:], pooling_type="mean") for i in range(4)]
    mixed = talkers(5, 1)
    answers: dict[str, Any] = {request.request_id: [] for request in mixed}
    for request in [*crowd, *mixed]:
        engine.add_request(request)
    while engine.has_unfinished:
        for delta in engine.step():
            answers.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert [answers[request.request_id] for request in mixed] == [answer.token_ids for answer in expected]


def test_the_last_token_uses_the_cache_and_fills_it_and_a_mean_only_fills_it(model: Path) -> None:
    engine = make_engine(model, max_model_len=512)

    def num_cached(request: EngineRequest) -> int:
        engine.add_request(request)
        while engine.has_unfinished:
            (*_, delta) = engine.step() or (None,)
        assert delta is not None
        return delta.num_cached_tokens

    assert num_cached(embedding(LONG, pooling_type="mean")) == 0
    assert num_cached(embedding(LONG, pooling_type="mean")) == 0
    assert num_cached(embedding(LONG, pooling_type="last")) == len(LONG) - 1
    (answer,) = run_requests(engine, [make_request("g", LONG, max_tokens=3)])
    assert answer.num_cached_tokens == len(LONG) - 1


@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_one_that_is_not_finite_fails_alone(model: Path, monkeypatch: pytest.MonkeyPatch, pooling_type: str) -> None:
    engine = make_engine(model, max_model_len=512, max_num_batched_tokens=16)
    executor: Any = engine.runner.executor  # type: ignore[attr-defined]
    real = executor.final_states

    def broken(rows: Any) -> Any:
        states = real(rows)
        states[rows == 0] = np.nan  # of the first request of a step
        return states

    bad, good = embedding([5], pooling_type=pooling_type), embedding([6, 7], pooling_type=pooling_type)
    (expected,) = embed(engine, [embedding([6, 7], pooling_type=pooling_type)])
    monkeypatch.setattr(executor, "final_states", broken)
    engine.add_request(bad)
    engine.add_request(good)
    failed, fine = engine.step()
    assert (failed.finish_reason, failed.error) == (
        FinishReason.ERROR,
        "the embedding has values that are not finite",
    )
    assert failed.embedding is None and fine.embedding == expected


def test_an_abort_in_the_middle_of_a_prompt_leaves_nothing(model: Path, alone: Any) -> None:
    engine = make_engine(model, max_model_len=512, max_num_batched_tokens=32)
    request = embedding(LONG, pooling_type="mean")
    engine.add_request(request)
    engine.step()
    (delta,) = engine.abort([request.request_id])
    assert (delta.finish_reason, delta.embedding) == (FinishReason.ABORT, None)
    assert not engine.has_unfinished and engine.scheduler.kv.pool.num_used == 0
    assert embed(engine, [embedding(LONG, pooling_type="mean")]) == [alone[str(POOLINGS[1])][3]]


def test_a_prompt_as_long_as_the_context(model: Path) -> None:
    engine = make_engine(model, max_model_len=len(LONG))
    assert len(embed(engine, [embedding(LONG, pooling_type="last")])[0]) == 4 * 96


def test_a_gguf_gives_what_its_folder_gives(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    file = write_gguf(tmp_path / "model.gguf", folder)
    of_folder, of_file = (
        embed(make_engine(path, max_model_len=512), [embedding(PROMPTS[2], pooling_type="mean")])
        for path in (folder, file)
    )
    assert of_folder == of_file


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "least_cosine"), [("float32", 1 - 1e-6), ("bfloat16", 1 - 5e-5)])
def test_smollm2_against_transformers_in_float32(smollm2_hf: Path, dtype: str, least_cosine: float) -> None:
    engine = make_engine(smollm2_hf, dtype=dtype, max_model_len=512)
    prompts = [LONG[:7], LONG[50:120], LONG]
    states = [last_hidden_state(smollm2_hf, prompt) for prompt in prompts]
    for pooling in POOLINGS[:2]:
        found = embed(engine, [embedding(prompt, **pooling) for prompt in prompts])
        for prompt_states, each in zip(states, found, strict=True):
            cosine = float(np.frombuffer(each, "<f4").astype(float) @ pooled(prompt_states, **pooling).astype(float))
            print(dtype, pooling["pooling_type"], 1 - cosine)
            assert cosine > least_cosine
