"""Driving a real engine without a front end: requests in, all their tokens and logprobs out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.ops.api import Batch
from octavo.request import EngineRequest, FinishReason, SamplingParams
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


def make_request(
    request_id: str, prompt: list[int], seed: int = 0, sample_index: int = 0, user: str | None = None, **params: Any
):
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        seed=seed,
        sample_index=sample_index,
        eos_token_ids=[2],
        user=user,
    )


def run_requests(engine: Engine, requests: list[EngineRequest], arrive_at: list[int] | None = None) -> list[Answer]:
    """All requests together; request i is added before step arrive_at[i] (default: all before the first)."""
    answers = {request.request_id: Answer() for request in requests}
    arrivals = sorted(zip(arrive_at or [0] * len(requests), range(len(requests)), strict=True))
    step = 0
    while arrivals or engine.has_unfinished:
        while arrivals and (arrivals[0][0] <= step or not engine.has_unfinished):
            engine.add_request(requests[arrivals.pop(0)[1]])
        for delta in engine.step():
            assert delta.error is None, delta.error
            answer = answers[delta.request_id]
            answer.token_ids += delta.token_ids
            answer.logprobs += [(tuple(p.token_ids), tuple(p.logprobs), p.rank) for p in delta.logprobs or ()]
            answer.prompt_logprobs += [
                (tuple(p.token_ids), tuple(p.logprobs), p.rank) for p in delta.prompt_logprobs or ()
            ]
            answer.finish_reason = delta.finish_reason
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
