"""The definition of sampling, in NumPy: one row at a time, slow and obvious. The native sampler is tested against it.

So that both pick the same token, the arithmetic is fixed: logits and weights are float32, each operation rounded once;
sums of weights are float64 (their order is free: it moves a sum by 1e-16). "In order" means: larger logit first, then
lower id; every truncation keeps a prefix of that order.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from octavo.request import Request, SamplingParams, TokenLogprobs
from octavo.sampling.bad_words import banned_by_words
from octavo.sampling.min_tokens import banned_ends
from octavo.sampling.seed import uniform
from octavo.sampling.temperature import is_greedy

Row = npt.NDArray[np.float32]  # [V]
Float = npt.NDArray[np.float32]

SMALLEST_WEIGHT = np.float32(1e-37)  # the exponential ends at e^-87: what is below has probability 0


def sample_reference(
    logits: Row, request: Request, logprobs_mode: str = "raw_logprobs"
) -> tuple[int, TokenLogprobs | None]:
    """float32 [V] -> the request's next token, and its logprobs where asked. Raises ValueError where there is none."""
    params, source = request.params, request.source
    num_vocab_tokens = len(logits) if source.num_vocab_tokens is None else source.num_vocab_tokens
    raw = logits[:num_vocab_tokens].astype(np.float32)
    _check_finite(raw)
    processed = edit(raw, request)
    _check_finite(processed)
    if is_greedy(params):
        token_id = int(np.argmax(processed))
    else:
        weights = truncated_weights(processed, params)
        position = request.num_output_tokens
        token_id = draw(weights, uniform(source.seed, source.sample_index, position))
        processed = np.where(weights > 0, processed * inverse(params.temperature), np.float32(-np.inf))
    if params.logprobs is None:
        return token_id, None
    reported, all_logits = (raw, logits) if logprobs_mode.startswith("raw") else (processed, processed)
    normalised = logprobs_mode.endswith("_logprobs")
    return token_id, token_logprobs(reported, token_id, params.logprobs, log_sum_exp(all_logits) if normalised else 0.0)


def edit(raw: Row, request: Request) -> Row:
    """Masks, bias and penalties: what is done to single logits before temperature."""
    params = request.params
    x = raw.copy()
    if params.allowed_token_ids is not None:
        x[:] = -np.inf
        x[params.allowed_token_ids] = raw[params.allowed_token_ids]
    x[banned_by_words(request)] = -np.inf
    x[banned_ends(request)] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        x[token_id] += np.float32(bias)
    output = Counter(request.token_ids[request.num_prompt_tokens :])
    repetition = np.float32(params.repetition_penalty)
    for token_id in set(request.token_ids):
        x[token_id] = x[token_id] / repetition if x[token_id] > 0 else x[token_id] * repetition
        if output[token_id]:
            x[token_id] -= np.float32(params.frequency_penalty) * np.float32(output[token_id])
            x[token_id] -= np.float32(params.presence_penalty)
    return x


def truncated_weights(x: Row, params: SamplingParams) -> Row:
    """[V] -> exp((x - max) / temperature), and 0 for what min_p, then top_k, then top_p take away."""
    with np.errstate(over="ignore"):  # a tiny temperature: the weight is 0
        weights = exp32((x - x.max()) * inverse(params.temperature))
    weights[weights < max(np.float32(params.min_p), SMALLEST_WEIGHT)] = 0
    order = in_order(x)
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0
    if params.top_p < 1:
        # The shortest prefix that has the mass: a token stays while those before it have less.
        running = np.cumsum(weights[order], dtype=np.float64)
        before = np.concatenate([[0.0], running[:-1]])
        weights[order[before >= params.top_p * running[-1]]] = 0
    return weights


def draw(weights: Row, u: float) -> int:
    """The first id at which the running sum of weights exceeds u times their total."""
    running = np.cumsum(weights, dtype=np.float64)
    past = np.flatnonzero((running > u * running[-1]) & (weights > 0))
    return int(past[0]) if len(past) else int(np.flatnonzero(weights)[-1])


def token_logprobs(x: Row, token_id: int, num_logprobs: int, normaliser: float) -> TokenLogprobs:
    """The entries of one position: the token, then the `num_logprobs` (-1: all) first in order that are finite."""
    order = in_order(x)
    rank = int(np.flatnonzero(order == token_id)[0]) + 1
    top = order[np.isfinite(x[order])][: None if num_logprobs == -1 else num_logprobs]
    token_ids = [token_id, *top.tolist()]
    logprobs = (x[token_ids].astype(np.float64) - normaliser).astype(np.float32)
    return TokenLogprobs(token_ids=token_ids, logprobs=logprobs.tolist(), rank=rank)


def log_sum_exp(x: Row) -> float:
    largest = x.max()
    return float(largest) + float(np.log(np.exp((x - largest).astype(np.float64)).sum()))


def in_order(x: Row) -> npt.NDArray[np.intp]:
    return np.argsort(-x, kind="stable")


def inverse(temperature: float) -> np.float32:
    return np.float32(1) / np.float32(temperature)


def exp32(x: Float) -> Float:
    """The kernels' exponential: x = n ln 2 + r, a polynomial in r, times 2^n; x clamped to [-87, 88]."""
    x = np.clip(x, np.float32(-87), np.float32(88))
    n = np.rint(x * np.float32(1.44269504))
    r = _fma(n, 2.12194440e-4, _fma(n, -0.693359375, x))
    p = np.full_like(r, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(p, r, c)
    p = _fma(p, r * r, r + np.float32(1))
    return np.asarray(np.ldexp(p, n.astype(np.int32)), np.float32)


def _fma(a: Float, b: Float | float, c: Float | float) -> Float:
    """a * b + c, rounded once: the product is exact in float64 (the sum's double rounding shows once in 2^29)."""
    wide = [np.asarray(np.float32(v), np.float64) for v in (a, b, c)]
    return np.asarray(wide[0] * wide[1] + wide[2], np.float32)


def _check_finite(x: Row) -> None:
    """-inf is a masked token; a row of nothing else, NaN and +inf are no distribution."""
    if np.isnan(x).any() or not np.isfinite(x.max()):
        raise ValueError("the logits are not finite, or masks leave no token to sample")
