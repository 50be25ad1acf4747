"""Twenty thousand draws follow the distribution that the parameters describe. Fixed seeds: no test of luck."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from octavo.ops import isa
from octavo.request import Request, SamplingParams
from octavo.sampling.sampler import Sampler
from support.sampling import request

NUM_DRAWS = 20_000
LOGITS = (np.random.default_rng(4).standard_normal(40) * 1.5).astype(np.float32)


def probabilities(temperature: float, top_k: int = 0, top_p: float = 1, min_p: float = 0) -> npt.NDArray[np.float64]:
    """By the textbook, in float64, straight from the definitions of the four parameters."""
    p = np.exp(LOGITS.astype(np.float64) / temperature)
    p[p < min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    num_kept = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
    p[order[num_kept:]] = 0
    return p / p.sum()


def chi_square(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells with fewer than five expected draws are pooled."""
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    return float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.4},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_of_many_seeds_follow_the_distribution(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    check([request(params, seed=seed) for seed in range(NUM_DRAWS)], probabilities(**fields))


def test_draws_of_one_request_follow_the_distribution() -> None:
    """Positions 0 … 199 of 100 seeds."""
    params = SamplingParams(temperature=1.5)
    requests = [
        request(params, seed=seed, output=[0] * position) for seed in range(NUM_DRAWS // 200) for position in range(200)
    ]
    check(requests, probabilities(temperature=1.5))


def check(requests: list[Request], expected_shares: npt.NDArray[np.float64]) -> None:
    native = isa.load()
    sampler = Sampler(native, native.ThreadPool(1))
    results = sampler.sample(np.tile(LOGITS, (NUM_DRAWS, 1)), requests)
    counts = np.bincount([result.token_id for result in results], minlength=len(LOGITS))
    expected = expected_shares * NUM_DRAWS
    assert counts[expected == 0].sum() == 0
    statistic, degrees = chi_square(counts, expected)
    assert statistic < degrees + 4 * np.sqrt(2 * degrees) + 1
