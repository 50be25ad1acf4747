"""The native sampler against its definition, and against itself: alone or in a batch, on one thread or two."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops import isa
from octavo.sampling.reference import exp32, sample_reference
from octavo.sampling.sampler import Sampler
from support.sampling import random_logits, random_request

MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
# Around the sizes of a register (16) and of a block (128), and one with more than a head of candidates.
SIZES = (5, 16, 17, 127, 128, 129, 1000, 5000)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_every_row_is_what_the_reference_says(native: ModuleType, vocab_size: int) -> None:
    for mode in MODES:
        sampler = Sampler(native, native.ThreadPool(2), logprobs_mode=mode)
        logits = random_logits(vocab_size, 60, vocab_size)
        requests = [random_request(1000 * vocab_size + i, vocab_size) for i in range(60)]
        for row, one, got in zip(logits, requests, sampler.sample(logits.copy(), requests), strict=True):
            try:
                token_id, logprobs = sample_reference(row, one, mode)
            except ValueError:
                assert got.error is not None
                continue
            assert got.error is None
            assert got.token_id == token_id, one.params
            assert (got.logprobs is None) == (logprobs is None)
            if got.logprobs is not None and logprobs is not None:
                assert got.logprobs.token_ids == logprobs.token_ids
                assert got.logprobs.rank == logprobs.rank
                # Float32 of sums that agree to 1e-7 or so, on logits up to some hundreds.
                np.testing.assert_allclose(got.logprobs.logprobs, logprobs.logprobs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 2.0, 8.0])
def test_top_p_of_a_large_vocabulary(native: ModuleType, spread: float) -> None:
    """Flat rows, whose nucleus is far beyond the first candidates, and peaked ones."""
    vocab_size = 30_000
    sampler = Sampler(native, native.ThreadPool(1))
    logits = (np.random.default_rng(9).standard_normal((6, vocab_size)) * spread).astype(np.float32)
    requests = [random_request(i, vocab_size) for i in range(6)]
    for one, top_p in zip(requests, (0.1, 0.5, 0.9, 0.95, 0.99, 0.9999), strict=True):
        one.params.top_p, one.params.top_k, one.params.temperature = top_p, 0, 1.0
    for row, one, got in zip(logits, requests, sampler.sample(logits.copy(), requests), strict=True):
        assert got.token_id == sample_reference(row, one)[0]


def test_the_exponential_is_accurate() -> None:
    x = np.linspace(-87, 88, 100_001, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(exp32(x) / exact - 1).max() < 2e-7
    assert exp32(np.array([-np.inf, 0], np.float32)).tolist() == [pytest.approx(1.65e-38, rel=0.01), 1.0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seeds=st.lists(st.integers(0, 2**32), min_size=1, max_size=9),
    vocab_size=st.sampled_from(SIZES),
    mode=st.sampled_from(MODES),
    variant=st.sampled_from(isa.available()),
)
def test_a_row_alone_is_the_row_in_a_batch(seeds: list[int], vocab_size: int, mode: str, variant: str) -> None:
    native = isa.load(variant)
    sampler = Sampler(native, native.ThreadPool(1), logprobs_mode=mode)
    two_threads = Sampler(native, native.ThreadPool(2), logprobs_mode=mode)
    logits = random_logits(seeds[0], len(seeds), vocab_size)
    rows = [random_request(seed, vocab_size) for seed in seeds]
    alone = [sampler.sample(logits[i : i + 1].copy(), [row])[0] for i, row in enumerate(rows)]
    assert sampler.sample(logits.copy(), rows) == alone
    assert two_threads.sample(logits.copy(), rows) == alone
    assert two_threads.sample(logits.copy(), rows) == alone, "a second step starts from the first one's rows"
    padded = np.full((len(rows), vocab_size + 3), np.nan, np.float32)  # rows that do not touch each other
    padded[:, :vocab_size] = logits
    assert sampler.sample(padded[:, :vocab_size], rows) == alone


@pytest.mark.parametrize("mode", ["raw_logprobs"])
def test_the_variants_agree(mode: str) -> None:
    logits = random_logits(1, 200, 1000)
    results = []
    for variant in isa.available():
        native = isa.load(variant)
        rows = [random_request(i, 1000) for i in range(200)]  # a request belongs to one engine
        results.append(Sampler(native, native.ThreadPool(1), logprobs_mode=mode).sample(logits.copy(), rows))
    assert all(result == results[0] for result in results)
