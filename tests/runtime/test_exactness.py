"""Same request, same bytes: tokens and logprobs of a request alone equal those in any company, in any chunks, after a
prefix hit, after a preemption, on one thread or two, by the program or eagerly."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.ops import isa
from support.checkpoints import tiny_llama
from support.engines import make_engine, make_request, run_requests

VOCAB = 512
# Each way of running that must leave no trace. A pool of 12 blocks holds fewer than two of the longest requests.
WAYS = {
    "plain": {},
    "one_thread": {"num_threads": 1},
    "eager": {"enforce_eager": True},
    "small_chunks": {"max_num_batched_tokens": 17},
    "tiny_chunks_one_at_a_time": {"max_num_batched_tokens": 5, "max_num_seqs": 1},
    "preempting": {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 40},
    "fair_shares": {"scheduling_policy": "fair", "num_gpu_blocks_override": 12, "max_num_seqs": 3},
    "large_blocks": {"block_size": 32},
    "no_prefix_cache": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module", params=["float32", "bfloat16", "bfloat16 in float32"])
def make(request, tmp_path_factory):
    """An engine of a checkpoint of this type, in it or in another one."""
    checkpoint, _, dtype = request.param.partition(" in ")
    model = tiny_llama(tmp_path_factory.mktemp("model"), dtype=checkpoint, vocab=VOCAB, heads=6, kv_heads=2,
                       hidden=96, max_position_embeddings=2048)  # fmt: skip
    return functools.partial(make_engine, model, dtype=dtype or "auto")


@pytest.fixture(scope="module")
def engines(make):
    return {name: make(**options) for name, options in WAYS.items()}


@pytest.fixture(scope="module")
def alone(engines):
    """The oracle: one request by itself, without a prefix cache, remembered by what decides its bytes."""
    known = {}

    def answer(key):
        if key not in known:
            known[key] = run_requests(engines["no_prefix_cache"], [build("alone", key)])[0]
        return known[key]

    return answer


PARAMS = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.2, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.7, "logit_bias": {5: 3.0, 7: -100.0}, "min_tokens": 4, "bad_words_token_ids": [[3], [4, 9]]},
    {"temperature": 1.0, "prompt_logprobs": 2, "allowed_token_ids": list(range(3, 200))},
)


def build(request_id, key):
    """`key`: (prefix, prompt length, output length, index into PARAMS, seed, sample index)."""
    prefix, length, output, params, seed, sample = key
    # Requests of one prefix number share their first 40 tokens: prefix hits, if they are long enough.
    tokens = [3 + (prefix * 31 + i * 7) % 500 if i < 40 else 3 + (seed * 17 + i * 13) % 500 for i in range(length)]
    return make_request(
        request_id, tokens, seed, sample, f"user {seed % 3}", max_tokens=output, logprobs=3, ignore_eos=True,
        **PARAMS[params],
    )  # fmt: skip


keys = st.tuples(
    st.integers(0, 2), st.integers(1, 90), st.integers(4, 50), st.integers(0, len(PARAMS) - 1), st.integers(0, 9),
    st.integers(0, 1),
)  # fmt: skip
serial = itertools.count()


@settings(max_examples=60, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip
@given(st.sampled_from(sorted(WAYS)), st.lists(st.tuples(keys, st.integers(0, 12)), min_size=1, max_size=9))
def test_a_request_does_not_see_its_company(engines, alone, way, crowd):
    requests = [build(f"r{next(serial)}", key) for key, _ in crowd]
    answers = run_requests(engines[way], requests, [arrival for _, arrival in crowd])
    for (key, _), answer in zip(crowd, answers, strict=True):
        expected = alone(key)
        assert answer == expected


def test_preemption_and_prefix_hits_do_happen(engines):
    """The test above would be idle if they did not."""
    crowd = [build(f"p{i}", (0, 16, 50, 1, i, 0)) for i in range(6)]
    run_requests(engines["preempting"], crowd)
    stats = engines["preempting"].stats()
    assert stats.num_preemptions > 0
    run_requests(engines["plain"], [build("h0", (1, 80, 5, 0, 1, 0))])
    before = engines["plain"].stats().prefix_cache_hits
    run_requests(engines["plain"], [build("h1", (1, 80, 5, 0, 2, 0))])
    assert engines["plain"].stats().prefix_cache_hits >= before + 32


def test_long_context_crosses_splits(make):
    """Past 256 tokens attention merges several splits, cut over threads or not: still the same bytes."""
    options = {"max_model_len": 1100, "num_gpu_blocks_override": 300}
    prompt = [3 + (i * 29) % 500 for i in range(1000)]
    ways = [{}, {"num_threads": 1}, {"max_num_batched_tokens": 300}, {"enforce_eager": True, "block_size": 64}]
    answers = []
    for way in ways:
        engine = make(**(options | way))
        answers.append(
            run_requests(engine, [make_request("long", prompt, max_tokens=40, temperature=1, logprobs=2)])[0]
        )
        again = [make_request(str(i), prompt, max_tokens=40, temperature=1, logprobs=2) for i in range(5)]
        answers += run_requests(engine, again)
    assert all(answer == answers[0] for answer in answers)


def test_an_int8_cache_leaves_no_trace(make):
    """Codes and scales are a token's own: no company, chunk, prefix hit or thread changes them."""
    key = (0, 85, 20, 1, 4, 1)
    answers = []
    for way in ("no_prefix_cache", "one_thread", "eager", "small_chunks", "preempting", "large_blocks"):
        engine = make(kv_cache_dtype="int8", **WAYS[way])
        crowd = [build("this", key), *(build(f"o{i}", (i % 2, 20 + 9 * i, 20, i % 5, i, 0)) for i in range(5))]
        answers.append(run_requests(engine, crowd)[0])
        answers.append(run_requests(engine, [build("again", key)])[0])
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("variant", isa.available())
def test_every_variant_is_exact(make, variant):
    key = (0, 70, 20, 2, 4, 1)
    single = run_requests(make(isa=variant, num_threads=1), [build("single", key)])[0]
    engine = make(isa=variant, max_num_batched_tokens=33)
    crowd = [build("this", key), *(build(f"o{i}", (i % 2, 20 + 9 * i, 20, i % 5, i, 0)) for i in range(8))]
    assert run_requests(engine, crowd)[0] == single
