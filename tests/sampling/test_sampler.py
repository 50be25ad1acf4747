"""What each sampling feature does, on rows small enough to check by hand."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from octavo.core.plan import RowResult
from octavo.errors import RequestFailedError
from octavo.request import Request, TokenLogprobs
from octavo.sampling.sampler import Sampler
from support.sampling import Logits, random_logits, request

RAMP = np.arange(8, dtype=np.float32)  # token 7 is the likeliest


def sample_one(sampler: Sampler, logits: Logits, one: Request) -> RowResult:
    (result,) = sampler.sample(np.array([logits], np.float32), [one])
    return result


def token(sampler: Sampler, logits: Logits, **fields: Any) -> int | None:
    return sample_one(sampler, logits, request(**fields)).token_id


def processed(native: ModuleType, logits: Logits, **fields: Any) -> dict[int, float]:
    """The logits that a greedy token is taken from, without the masked ones."""
    sampler = Sampler(native, native.ThreadPool(1), logprobs_mode="processed_logits")
    entries = sample_one(sampler, logits, request(temperature=0, logprobs=-1, **fields)).logprobs
    assert entries is not None
    return dict(zip(entries.token_ids, entries.logprobs, strict=True))


def test_a_request_is_prepared_once_however_a_step_is_cut(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Request] = []
    prepare = Sampler._prepare
    monkeypatch.setattr(Sampler, "_prepare", lambda self, one: prepared.append(one) or prepare(self, one))
    requests = [request(temperature=0.5) for _ in range(4)]
    for _ in range(3):  # steps
        for chunk in (requests[:3], requests[3:]):
            sampler.sample(np.tile(RAMP, (len(chunk), 1)), chunk)
    assert prepared == requests


# Greedy


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 9e-6}, {"top_p": 0}, {"top_k": 1}])
def test_greedy_takes_the_lowest_of_equal_ids(sampler: Sampler, fields: dict[str, Any]) -> None:
    logits = np.zeros(300, np.float32)
    assert token(sampler, logits, **fields) == 0
    logits[[131, 200, 299]] = 5
    assert token(sampler, logits, **fields) == 131


@pytest.mark.parametrize("fields", [{"temperature": t} for t in (1e-3, 1e-5, 1e-8, 1e-12, 1e-38)] + [{"top_p": 1e-4}])
def test_almost_greedy_is_greedy(sampler: Sampler, fields: dict[str, Any]) -> None:
    for seed in range(20):
        logits = np.random.default_rng(seed).standard_normal(1000).astype(np.float32) * 8
        top, second = np.sort(logits)[[-1, -2]]
        if top - second > 0.05:
            assert token(sampler, logits, seed=seed, **fields) == int(logits.argmax())


def test_ids_without_a_token_are_never_sampled(sampler: Sampler) -> None:
    assert token(sampler, RAMP, temperature=0, num_vocab_tokens=5) == 4
    drawn = {token(sampler, RAMP, temperature=100, num_vocab_tokens=5, seed=seed) for seed in range(100)}
    assert drawn == {0, 1, 2, 3, 4}


# Edits of single logits


def test_allowed_token_ids(sampler: Sampler, native: ModuleType) -> None:
    assert token(sampler, RAMP, temperature=0, allowed_token_ids=[2, 5, 3]) == 5
    assert processed(native, RAMP, allowed_token_ids=[2, 5, 2]) == {2: 2, 5: 5}


def test_logit_bias(sampler: Sampler, native: ModuleType) -> None:
    assert token(sampler, RAMP, temperature=0, logit_bias={"7": -100}) == 6
    assert token(sampler, RAMP, temperature=1, logit_bias={2: 100}) == 2
    assert processed(native, RAMP[:3], logit_bias={0: 1.5, 2: -0.5}) == {0: 1.5, 1: 1, 2: 1.5}
    assert processed(native, RAMP, allowed_token_ids=[1], logit_bias={7: 100}) == {1: 1}, "a bias lifts no mask"


def test_bad_words_of_one_token_are_never_sampled(sampler: Sampler) -> None:
    assert token(sampler, RAMP, temperature=0, bad_words_token_ids=[[7], [6]]) == 5


@pytest.mark.parametrize(
    ("output", "expected"),
    [([], 7), ([5], 7), ([5, 6], 6), ([5, 6, 3], 7), ([4, 5, 6], 6), ([6], 7)],
)
def test_bad_words_ban_the_last_token_after_the_others(sampler: Sampler, output: list[int], expected: int) -> None:
    words = [[5, 6, 7]]
    assert token(sampler, RAMP, temperature=0, bad_words_token_ids=words, prompt=[5, 6], output=output) == expected


def test_min_tokens_masks_every_end(sampler: Sampler) -> None:
    def next_token(num_output: int, **fields: Any) -> int | None:
        return token(sampler, RAMP, temperature=0, min_tokens=2, output=[0] * num_output, eos=[7, 6], **fields)

    assert next_token(0) == next_token(1) == 5
    assert next_token(1, stop_token_ids=[5]) == 4
    assert next_token(2, stop_token_ids=[5]) == 7
    assert next_token(1, stop_token_ids=[7], ignore_eos=True) == 6, "ignored end tokens end nothing"


def test_the_masks_of_a_step_do_not_outlive_it(sampler: Sampler) -> None:
    one = request(temperature=0, min_tokens=1, eos=[7], bad_words_token_ids=[[6, 7]])
    tokens = []
    for _ in range(4):
        result = sample_one(sampler, RAMP, one)
        tokens.append(result.token_id)
        one.token_ids.append(6)  # the sampler keeps no hold of the array
    assert tokens == [6, 6, 6, 6]
    one.token_ids[-1] = 0
    assert sample_one(sampler, RAMP, one).token_id == 7


# Penalties


def test_repetition_penalty_counts_prompt_and_output(native: ModuleType) -> None:
    logits = np.array([2, -2, 2, -2, 2, 0], np.float32)
    got = processed(native, logits, repetition_penalty=2, prompt=[0, 1, 0], output=[2, 3, 5])
    assert got == {0: 1, 1: -4, 2: 1, 3: -4, 4: 2, 5: 0}


def test_presence_and_frequency_penalties_count_the_output(native: ModuleType) -> None:
    logits = np.array([2, 2, 2, 2], np.float32)
    fields = {"prompt": [0, 0, 1], "output": [1, 2, 2, 2]}
    assert processed(native, logits, presence_penalty=0.5, **fields) == {0: 2, 1: 1.5, 2: 1.5, 3: 2}
    assert processed(native, logits, frequency_penalty=0.5, **fields) == {0: 2, 1: 1.5, 2: 0.5, 3: 2}
    assert processed(native, logits, frequency_penalty=-0.5, **fields) == {0: 2, 1: 2.5, 2: 3.5, 3: 2}
    assert processed(native, logits, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2, **fields) == {
        0: 1,
        1: 1 - 0.5 - 0.25,
        2: 1 - 1.5 - 0.25,
        3: 2,
    }


def test_penalties_follow_the_output(sampler: Sampler) -> None:
    one = request(temperature=0, presence_penalty=1.5, frequency_penalty=0.25)
    tokens = []
    for _ in range(6):
        result = sample_one(sampler, RAMP[:4], one)
        assert result.token_id is not None
        tokens.append(result.token_id)
        one.token_ids.append(result.token_id)
    # After the first 3 it stands at 1.25, so 2 follows and falls to 0.25; after the next 3, it ties with 1 at 1.
    assert tokens == [3, 2, 3, 1, 3, 3]


# Truncation


def drawn(sampler: Sampler, logits: Logits, **fields: Any) -> set[int | None]:
    rows = [request(seed=seed, **fields) for seed in range(300)]
    return {result.token_id for result in sampler.sample(np.tile(logits, (300, 1)), rows)}


def test_top_k_keeps_the_first_k(sampler: Sampler) -> None:
    assert drawn(sampler, RAMP, top_k=3, temperature=10) == {5, 6, 7}
    assert drawn(sampler, np.ones(8, np.float32), top_k=3, temperature=10) == {0, 1, 2}, "of equals, the lowest ids"


def test_top_k_at_or_above_the_vocabulary_is_off(sampler: Sampler) -> None:
    logits = random_logits(3, 1, 500)[0]
    for seed in range(20):
        tokens = {token(sampler, logits, seed=seed, top_k=k) for k in (-1, 0, 500, 501, 2**31 - 1)}
        assert len(tokens) == 1


def test_top_p_keeps_the_shortest_prefix_with_the_mass(sampler: Sampler) -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    assert drawn(sampler, logits, top_p=0.39) == {1}
    assert drawn(sampler, logits, top_p=0.41) == {1, 3}
    assert drawn(sampler, logits, top_p=0.69) == {1, 3}
    assert drawn(sampler, logits, top_p=0.71) == {1, 2, 3}
    assert drawn(sampler, logits, top_p=0.95) == {0, 1, 2, 3}
    assert drawn(sampler, np.zeros(8, np.float32), top_p=0.5) == {0, 1, 2, 3}


def test_top_p_is_of_what_top_k_leaves(sampler: Sampler) -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    assert drawn(sampler, logits, top_k=2, top_p=0.56) == {1}, "0.4 / 0.7 is 0.571"
    assert drawn(sampler, logits, top_k=2, top_p=0.58) == {1, 3}


def test_min_p_is_a_share_of_the_likeliest(sampler: Sampler) -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    assert drawn(sampler, logits, min_p=0.49) == {1, 2, 3}
    assert drawn(sampler, logits, min_p=0.51) == {1, 3}
    assert drawn(sampler, logits, min_p=1) == {1}


# Seeds


def test_a_token_depends_on_seed_sample_and_position(sampler: Sampler) -> None:
    logits = np.zeros(10_000, np.float32)

    def tokens(sample_index: int, seed: int = 5) -> list[int | None]:
        return [token(sampler, logits, seed=seed, sample_index=sample_index, output=[0] * i) for i in range(8)]

    assert tokens(0) == tokens(0)
    assert len({tuple(tokens(i)) for i in range(4)} | {tuple(tokens(0, seed=6))}) == 5
    assert len(set(tokens(0))) > 1


# Logprobs


def test_logprobs_are_of_the_raw_distribution(sampler: Sampler) -> None:
    logits = random_logits(1, 1, 1000)[0] + RAMP[3]
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    fields = {"temperature": 0.3, "top_k": 5, "logit_bias": {17: 50}, "presence_penalty": 2, "output": [1, 2]}
    result = sample_one(sampler, logits, request(logprobs=5, **fields))
    assert result.token_id == 17
    assert result.logprobs is not None
    np.testing.assert_allclose(result.logprobs.logprobs, expected[result.logprobs.token_ids], rtol=0, atol=2e-6)
    assert result.logprobs.rank == 1 + int((logits > logits[17]).sum() + (logits[:17] == logits[17]).sum())


@pytest.mark.parametrize("count", [0, 1, 5, 20, 400, -1])
def test_as_many_logprobs_as_asked(sampler: Sampler, count: int) -> None:
    logits = random_logits(11, 1, 500)[0]
    result = sample_one(sampler, logits, request(logprobs=count, temperature=5))
    assert result.logprobs is not None
    first, *top = result.logprobs.token_ids
    assert first == result.token_id
    assert top == np.argsort(-logits, kind="stable")[: 500 if count == -1 else count].tolist()
    first_logprob, *top_logprobs = result.logprobs.logprobs
    if first in top:
        assert top_logprobs[top.index(first)] == first_logprob
        assert result.logprobs.rank == top.index(first) + 1
    assert np.isfinite(result.logprobs.logprobs).all()


def test_no_logprobs_unless_asked(sampler: Sampler) -> None:
    assert sample_one(sampler, RAMP, request()).logprobs is None


@pytest.mark.parametrize(
    ("mode", "entries"),
    [
        ("raw_logits", {1: 2, 2: 3, 0: 1, 3: 0}),
        ("raw_logprobs", {1: -1.4402, 2: -0.4402, 0: -2.4402, 3: -3.4402}),
        ("processed_logits", {1: 4, 0: 2}),
        ("processed_logprobs", {1: -0.1269, 0: -2.1269}),
    ],
)
def test_logprobs_modes(native: ModuleType, mode: str, entries: dict[int, float]) -> None:
    sampler = Sampler(native, native.ThreadPool(1), logprobs_mode=mode)
    logits = np.array([1, 2, 3, 0], np.float32)
    one = request(temperature=0.5, top_k=2, bad_words_token_ids=[[2]], logprobs=-1, seed=1)
    result = sample_one(sampler, logits, one)
    assert result.token_id == 1
    assert result.logprobs is not None
    got = dict(zip(result.logprobs.token_ids, result.logprobs.logprobs, strict=True))
    assert got == pytest.approx(entries, abs=1e-4)


def test_ids_without_a_token_weigh_but_are_not_listed(sampler: Sampler) -> None:
    one = request(temperature=0, logprobs=-1, num_vocab_tokens=3)
    result = sample_one(sampler, np.zeros(4, np.float32), one)
    assert result.logprobs is not None
    assert result.logprobs.token_ids == [0, 0, 1, 2]
    assert result.logprobs.logprobs == pytest.approx([-np.log(4)] * 4)


def test_a_distribution_spoilt_beyond_the_vocabulary_has_no_logprobs(sampler: Sampler) -> None:
    logits = np.array([0, 1, np.nan], np.float32)
    assert token(sampler, logits, temperature=0, num_vocab_tokens=2) == 1
    assert sample_one(sampler, logits, request(temperature=0, num_vocab_tokens=2, logprobs=1)).error is not None


def test_prompt_logprobs(sampler: Sampler) -> None:
    logits = random_logits(2, 6, 700)
    targets = [0, 699, 3, 500, 128, 127]
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    for i, entry in enumerate(sampler.prompt_logprobs(logits, targets, 3)):
        top = np.argsort(-logits[i], kind="stable")[:3].tolist()
        assert entry.token_ids == [targets[i], *top]
        np.testing.assert_allclose(entry.logprobs, expected[i, entry.token_ids], rtol=0, atol=4e-6)
    assert sampler.prompt_logprobs(RAMP[None], [2], 0) == [
        TokenLogprobs(token_ids=[2], logprobs=pytest.approx([-5.458339]), rank=6)
    ]
    assert sampler.prompt_logprobs(RAMP[None], [2], -1, num_vocab_tokens=4)[0].token_ids == [2, 3, 2, 1, 0]
    with pytest.raises(RequestFailedError, match="not finite"):
        sampler.prompt_logprobs(np.full((1, 8), np.nan, np.float32), [2], 0)


# Rows that fail


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 100, 199])
def test_a_row_that_is_not_finite_fails_alone(sampler: Sampler, value: float, place: int) -> None:
    logits = random_logits(4, 3, 200)
    logits[1, place] = value
    for fields in ({"temperature": 0}, {"temperature": 0.7}, {"temperature": 0, "logit_bias": {place: -100}}):
        good = [sample_one(sampler, logits[i], request(**fields)) for i in (0, 2)]
        results = sampler.sample(logits.copy(), [request(**fields) for _ in range(3)])
        assert results == [good[0], RowResult(error="the model's logits are not finite"), good[1]]


def test_masks_that_leave_nothing_fail_the_row(sampler: Sampler) -> None:
    for fields in ({"temperature": 0}, {"temperature": 1}):
        one = request(allowed_token_ids=[7], bad_words_token_ids=[[3, 7]], output=[3], **fields)
        result = sample_one(sampler, RAMP, one)
        assert result.token_id is None
        assert result.error is not None
        assert result.error.startswith("no token is left to sample")


def test_logits_must_fit_the_rows(sampler: Sampler) -> None:
    with pytest.raises(ValueError, match="one row for each request"):
        sampler.sample(np.zeros((2, 8), np.float32), [request()])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sampler.prompt_logprobs(RAMP[None], [8], 0)
