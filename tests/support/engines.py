"""Driving a real engine without a front end: requests in, all their tokens and logprobs out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from octavo.config import EngineConfig
from octavo.core.beams import num_candidates
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.engine.messages import TokenDelta
from octavo.ops.api import Batch
from octavo.request import BeamSearchParams, EngineRequest, FinishReason, SamplingParams
from octavo.runtime.program import MAX_LOGITS


def make_engine(model: Path, **options: Any) -> Engine:
    defaults = {"max_model_len": 256, "num_gpu_blocks_override": 400, "num_threads": 2}
    return build_engine(EngineConfig(model=str(model), **(defaults | options)))


@dataclass
class Answer:
    """What must not depend on anything but the request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[tuple[int, ...], tuple[float, ...], int]] = field(default_factory=list)
    prompt_logprobs: list[tuple[tuple[int, ...], tuple[float, ...], int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    hypotheses: list[tuple[tuple[int, ...], float, float, FinishReason]] = field(default_factory=list)
    num_cached_tokens: int = field(default=0, compare=False)  # this may depend on what went before

    def take(self, delta: TokenDelta) -> None:
        self.token_ids += delta.token_ids
        self.logprobs += [(tuple(p.token_ids), tuple(p.logprobs), p.rank) for p in delta.logprobs or ()]
        self.prompt_logprobs += [(tuple(p.token_ids), tuple(p.logprobs), p.rank) for p in delta.prompt_logprobs or ()]
        self.hypotheses += [
            (tuple(beam.token_ids), beam.cumulative_logprob, beam.score, beam.finish_reason)
            for beam in delta.hypotheses or ()
        ]
        self.finish_reason = delta.finish_reason
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)


END_TOKEN_IDS = [2]


def make_request(
    request_id: str, prompt: list[int], seed: int = 0, sample_index: int = 0, user: str | None = None, **params: Any
):
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        seed=seed,
        sample_index=sample_index,
        eos_token_ids=END_TOKEN_IDS,
        user=user,
    )


def make_samples(request_id: str, prompt: list[int], n: int, seed: int = 0, **params: Any) -> list[EngineRequest]:
    """The n samples of one prompt, as the front end makes them."""
    samples = [make_request(f"{request_id}.{i}", prompt, seed, i, **params) for i in range(n)]
    for sample in samples[1:]:
        sample.fork_of = samples[0].request_id
    return samples


def make_beams(request_id: str, prompt: list[int], beam_width: int, max_tokens: int, **fields: Any) -> EngineRequest:
    beams = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens, **fields)
    num_logprobs = num_candidates(beam_width, 0 if beams.ignore_eos else len(END_TOKEN_IDS))
    request = make_request(request_id, prompt, temperature=0, max_tokens=max_tokens, logprobs=num_logprobs)
    request.beams = beams
    return request


def run_requests(
    engine: Engine,
    requests: list[EngineRequest],
    arrive_at: list[int] | None = None,
    before_step: Callable[[int], None] | None = None,
) -> list[Answer]:
    """All requests together; request i is added before step arrive_at[i] (default: all before the first)."""
    answers = {request.request_id: Answer() for request in requests}
    arrivals = sorted(zip(arrive_at or [0] * len(requests), range(len(requests)), strict=True))
    step = 0
    while arrivals or engine.has_unfinished:
        while arrivals and (arrivals[0][0] <= step or not engine.has_unfinished):
            engine.add_request(requests[arrivals.pop(0)[1]])
        if before_step is not None:
            before_step(step)
        for delta in engine.step():
            assert delta.error is None, delta.error
            answers[delta.request_id].take(delta)
        step += 1
    engine.check_integrity()
    assert engine.scheduler.kv.pool.num_used == 0
    return [answers[request.request_id] for request in requests]


def all_logits(engine: Engine, token_ids: list[int]) -> np.ndarray:
    """float32 [len(token_ids), vocab]: the logits after each token of one prompt, computed in one step."""
    block_size = engine.info.block_size
    num_blocks = -(-len(token_ids) // block_size)
    positions = np.arange(len(token_ids), dtype=np.int32)
    batch = Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        slot_mapping=positions,
        query_start=np.array([0, len(token_ids)], np.int32),
        seq_lens=np.array([len(token_ids)], np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        logit_rows=positions,
    )
    executor = engine.runner.executor
    executor.run(batch)
    chunks = range(0, len(token_ids), MAX_LOGITS)
    return np.concatenate([np.array(executor.logits(i, min(MAX_LOGITS, len(token_ids) - i))) for i in chunks])
