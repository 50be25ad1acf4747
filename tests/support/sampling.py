"""Requests and logits for the tests of sampling."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.request import EngineRequest, Request, SamplingParams

Logits = npt.NDArray[np.float32]


def request(
    params: SamplingParams | None = None,
    *,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    seed: int = 0,
    sample_index: int = 0,
    eos: Sequence[int] = (),
    num_vocab_tokens: int | None = None,
    **fields: Any,
) -> Request:
    """A request whose next token is output token len(output); `fields` are those of SamplingParams."""
    source = EngineRequest(
        request_id="r",
        prompt_token_ids=list(prompt),
        params=params or SamplingParams(**{"max_tokens": None, **fields}),
        seed=seed,
        sample_index=sample_index,
        eos_token_ids=list(eos),
        num_vocab_tokens=num_vocab_tokens,
    )
    made = Request.from_source(source)
    made.token_ids.extend(output)
    return made


def random_logits(seed: int, num_rows: int, num_columns: int) -> Logits:
    """Flat to peaked rows, some of them full of ties."""
    rng = np.random.default_rng(seed)
    spread = rng.choice([0.0, 0.5, 3.0, 20.0], size=(num_rows, 1))
    logits = rng.standard_normal((num_rows, num_columns)) * spread
    return np.where(rng.random((num_rows, 1)) < 0.3, np.round(logits), logits).astype(np.float32)


def random_request(seed: int, vocab_size: int) -> Request:
    """Any mix of the features, each at values that matter."""
    rng = random.Random(seed)
    num_vocab_tokens = rng.choice([None, vocab_size, vocab_size - 1])
    size = num_vocab_tokens or vocab_size
    choices: dict[str, tuple[float, Sequence[Any]]] = {
        "temperature": (1, [0, 0, 0.01, 0.3, 0.7, 1, 1, 1.5, 5, 100]),
        "top_k": (0.4, [1, 2, 5, 50, 300, vocab_size, vocab_size + 1]),
        "top_p": (0.4, [0, 1e-4, 0.1, 0.5, 0.9, 0.95, 0.99, 0.9999]),
        "min_p": (0.3, [1e-6, 0.01, 0.1, 0.5, 1]),
        "repetition_penalty": (0.3, [0.7, 1.1, 2.5]),
        "frequency_penalty": (0.3, [-2, -0.3, 0.7, 2]),
        "presence_penalty": (0.3, [-2, -0.3, 0.7, 2]),
        "logit_bias": (0.2, [{rng.randrange(size): rng.uniform(-100, 100) for _ in range(5)}]),
        "allowed_token_ids": (0.15, [rng.sample(range(size), min(size, count)) for count in (3, 200)]),
        "min_tokens": (0.2, [1, 50]),
        "bad_words_token_ids": (0.2, [[[0], [1, 2], [2, 1]]]),
        "logprobs": (0.4, [0, 1, 5, 20, -1]),
    }
    fields = {name: rng.choice(values) for name, (share, values) in choices.items() if rng.random() < share}
    return request(
        prompt=[rng.randrange(size) for _ in range(rng.randrange(1, 20))],
        output=[rng.randrange(min(size, 3)) for _ in range(rng.randrange(5))],
        seed=rng.randrange(2**64),
        sample_index=rng.randrange(3),
        eos=[1],
        num_vocab_tokens=num_vocab_tokens,
        stop_token_ids=[0],
        **fields,
    )
