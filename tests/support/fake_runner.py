"""A runner without a model, and an engine around it, for the tests of the control plane.

The fake's "KV" of a position is a checksum of the KV of all positions before it, *read through the block table*, and
of its token. The token sampled next is a function of the newest checksum. So a wrong block table, a stale slot, a lost
or a premature write changes the tokens, as with a real model; reading or copying a slot that was never written is a
Fault, and so are two rows that write to one. Hidden states are made of the same checksums, and really pooled.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from octavo.core.beams import BeamSearch, num_candidates
from octavo.core.block_pool import BlockPool
from octavo.core.kv_manager import KVManager
from octavo.core.plan import (
    CopyBlock,
    EvictBlock,
    LoadBlock,
    RestoreBlock,
    RowResult,
    SaveBlock,
    ScheduledRequest,
    StepPlan,
    StepResult,
    Transfer,
)
from octavo.core.policy import make_policy
from octavo.core.preemption import make_preemption
from octavo.core.scheduler import Scheduler
from octavo.core.store import StoreCounts
from octavo.core.swap import SwapSpace
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineInfo, TokenDelta
from octavo.pooling import PoolingParams
from octavo.request import (
    BeamHypothesis,
    BeamSearchParams,
    EngineRequest,
    FinishReason,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from octavo.runtime.pooling import pool

VOCAB_SIZE = 13
HIDDEN_SIZE = 3


def kv_of(history: list[int], token_id: int) -> int:
    return zlib.crc32(array("q", [*history, token_id]).tobytes())


def sample(source: EngineRequest, newest_kv: int, num_output_tokens: int) -> int:
    """End tokens are masked until min_tokens, as the real sampler does."""
    masked: set[int] = set()
    if num_output_tokens < source.params.min_tokens:
        masked |= set(source.params.stop_token_ids or ())
        masked |= set() if source.params.ignore_eos else set(source.eos_token_ids)
    allowed = [token_id for token_id in range(VOCAB_SIZE) if token_id not in masked]
    draw = zlib.crc32(array("q", [newest_kv, source.seed, source.sample_index]).tobytes())
    return allowed[draw % len(allowed)]


def logprobs_of(token_id: int, newest_kv: int) -> TokenLogprobs:
    return TokenLogprobs([token_id], [-(newest_kv % 1000) / 100], 1 + newest_kv % VOCAB_SIZE)


def likeliest(newest_kv: int, count: int) -> TokenLogprobs:
    """The token that a greedy request would get, then the likeliest `count`, with logprobs that never tie."""
    logprobs = [
        -(zlib.crc32(array("q", [newest_kv, token_id]).tobytes()) % 100003) / 10007 for token_id in range(VOCAB_SIZE)
    ]
    ranked = sorted(range(VOCAB_SIZE), key=lambda token_id: -logprobs[token_id])[:count]
    return TokenLogprobs([ranked[0], *ranked], [logprobs[ranked[0]], *(logprobs[i] for i in ranked)], 1)


def states_of(history: Sequence[int]) -> np.ndarray:
    """float32 [n, HIDDEN_SIZE], whose sums depend on their order."""
    return np.array([[kv % 1009 / 7, kv % 31 + 1, kv / 3] for kv in history], np.float32)


class FakeStore:
    """A tier behind the pool: the KV of evicted blocks, in a dict. A block in `damaged` is found to be so when it is
    fetched, and then gone."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, list[int | None]] = {}
        self.damaged: set[bytes] = set()
        self.counts = StoreCounts()

    def contains(self, content_hash: bytes) -> bool:
        return content_hash in self.blocks

    def fetch(self, content_hash: bytes) -> object | None:
        if content_hash in self.damaged:
            self.damaged.discard(content_hash)
            del self.blocks[content_hash]
        return self.blocks.get(content_hash)


class Fault(BaseException):
    """A plan is wrong. The engine, which catches every Exception of a step, does not catch this."""


class FakeRunner:
    def __init__(self, block_size: int, store: FakeStore | None = None) -> None:
        self.block_size = block_size
        self.store = store or FakeStore()
        self.cache: dict[int, int] = {}  # slot -> KV
        self.swap_space: dict[int, list[int | None]] = {}
        self.failing: set[str] = set()  # requests whose next row fails alone
        self.explodes = False  # the next step raises, halfway through its transfers
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(replace(plan, scheduled=[replace(row) for row in plan.scheduled]))  # it may be changed later
        if self.explodes:
            self.explodes = False
            for transfer in plan.transfers[: len(plan.transfers) // 2]:
                self._move(transfer)
            raise RuntimeError("boom")
        try:
            return self._carry_out(plan)
        except (AssertionError, LookupError) as error:
            raise Fault(repr(error)) from error

    def _carry_out(self, plan: StepPlan) -> StepResult:
        for transfer in plan.transfers:
            self._move(transfer)
        written = [self._slot(row, row.start + i) for row in plan.scheduled for i in range(row.num_tokens)]
        assert len(set(written)) == len(written), "two rows write to one slot"
        # All rows read before any writes: whoever relies on what this very step computes finds it missing.
        histories = [[self.cache[self._slot(row, p)] for p in range(row.start)] for row in plan.scheduled]
        rows = [self._compute(*work) for work in zip(plan.scheduled, histories, strict=True)]
        newest = [kv for row, history in zip(plan.scheduled, histories, strict=True) for kv in history[row.start :]]
        pool(lambda token_rows: states_of([newest[i] for i in token_rows]), plan.scheduled, rows)
        return StepResult(rows)

    def close(self, evictions: Sequence[EvictBlock]) -> None:
        for eviction in evictions:
            self._move(eviction)

    def _move(self, transfer: Transfer) -> None:
        match transfer:
            case CopyBlock(source, target, num_tokens):
                kv = self._read(source)[:num_tokens]
                assert None not in kv, "a copy of what was never written"
                self._write(target, kv)
            case SaveBlock(block_id, slot):
                self.swap_space[slot] = self._read(block_id)
            case RestoreBlock(slot, block_id):
                self._write(block_id, self.swap_space[slot])
            case EvictBlock(block_id, content_hash):
                kv = self._read(block_id)
                assert None not in kv, "only full blocks are kept"
                self.store.blocks[content_hash] = kv
                self.store.damaged.discard(content_hash)
            case LoadBlock(payload, block_id):
                self._write(block_id, payload)  # type: ignore[arg-type]

    def _read(self, block_id: int) -> list[int | None]:
        return [self.cache.get(block_id * self.block_size + i) for i in range(self.block_size)]

    def _write(self, block_id: int, kv: list[int | None]) -> None:
        """What is not written is lost: nobody may rely on it."""
        for i in range(self.block_size):
            self.cache.pop(block_id * self.block_size + i, None)
        for i, value in enumerate(kv):
            if value is not None:
                self.cache[block_id * self.block_size + i] = value

    def _slot(self, row: ScheduledRequest, position: int) -> int:
        return row.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _compute(self, row: ScheduledRequest, history: list[int]) -> RowResult:
        request, end = row.request, row.start + row.num_tokens
        for position in range(row.start, end):
            kv = kv_of(history, request.token_ids[position])
            history.append(kv)
            self.cache[self._slot(row, position)] = kv
        result = self._sample(request, history[-1], row.samples)
        result.prompt_logprobs = [
            logprobs_of(request.token_ids[p + 1], history[p]) for p in range(row.start, row.start + row.num_scored)
        ]
        result.forks = [self._sample(fork, history[-1]) for fork in row.forks]
        return result

    def _sample(self, request: Request, newest_kv: int, samples: bool = True) -> RowResult:
        if request.request_id in self.failing:
            self.failing.discard(request.request_id)
            return RowResult(error="no token is allowed")
        if not samples:
            return RowResult()
        if request.source.beams is not None:
            assert request.params.logprobs is not None
            next_tokens = likeliest(newest_kv, request.params.logprobs)
            return RowResult(next_tokens.token_ids[0], next_tokens)
        token_id = sample(request.source, newest_kv, request.num_output_tokens)
        return RowResult(token_id, None if request.params.logprobs is None else logprobs_of(token_id, newest_kv))


@dataclass
class Answer:
    """All that a caller gets to see of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    hypotheses: list[BeamHypothesis] | None = None
    embedding: bytes | None = None

    def take(self, delta: TokenDelta) -> None:
        assert self.finish_reason is None, "news after the end"
        assert delta.token_ids or delta.finish_reason, "news without news"
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None and not self.token_ids, "prompt logprobs come once, and first"
            self.prompt_logprobs = delta.prompt_logprobs
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.hypotheses, self.embedding = delta.hypotheses, delta.embedding


def history_of(token_ids: list[int]) -> list[int]:
    history: list[int] = []
    for token_id in token_ids:
        history.append(kv_of(history, token_id))
    return history


def expected_answer(source: EngineRequest, max_request_tokens: int) -> Answer:
    """What the request gets from an engine that has no scheduler, no blocks and no cache: a plain loop."""
    params, prompt = source.params, source.prompt_token_ids
    history = history_of(prompt)
    answer = Answer()
    if params.prompt_logprobs is not None:
        answer.prompt_logprobs = [logprobs_of(prompt[p], history[p - 1]) for p in range(1, len(prompt))]
    if source.pooling is not None:
        answer.finish_reason, answer.embedding = FinishReason.STOP, expected_embedding(source, history)
        return answer
    if params.max_tokens == 0:
        answer.finish_reason = FinishReason.LENGTH
        return answer
    while answer.finish_reason is None:
        token_id = sample(source, history[-1], len(answer.token_ids))
        answer.token_ids.append(token_id)
        if params.logprobs is not None:
            answer.logprobs.append(logprobs_of(token_id, history[-1]))
        history.append(kv_of(history, token_id))
        num_output_tokens = len(answer.token_ids)
        if num_output_tokens >= params.min_tokens and token_id in source.eos_token_ids and not params.ignore_eos:
            answer.finish_reason = FinishReason.STOP
        elif num_output_tokens >= params.min_tokens and token_id in (params.stop_token_ids or ()):
            answer.finish_reason, answer.stop_reason = FinishReason.STOP, token_id
        elif num_output_tokens == params.max_tokens or len(prompt) + num_output_tokens == max_request_tokens:
            answer.finish_reason = FinishReason.LENGTH
    return answer


def expected_embedding(source: EngineRequest, history: list[int]) -> bytes:
    """Number by number, in Python's floats."""
    assert source.pooling is not None and source.pooling.normalize is False
    states = states_of(history).tolist()
    if source.pooling.pooling_type == "last":
        return array("f", states[-1]).tobytes()
    total = [0.0] * HIDDEN_SIZE
    for state in states:
        total = [a + b for a, b in zip(total, state, strict=True)]
    return array("f", [a / len(states) for a in total]).tobytes()


def expected_beams(source: EngineRequest, num_blocks: int, block_size: int, max_model_len: int) -> Answer:
    """What a beam search gets: `BeamSearch` in a plain loop, cut short where its beams alone need more blocks than
    there are. Beams share the full blocks of what they have in common; the one that is written to is a beam's own."""
    prompt, beams = source.prompt_token_ids, source.beams
    assert beams is not None and source.params.logprobs is not None
    max_tokens = min(beams.max_tokens, max_model_len - len(prompt), num_blocks * block_size + 1 - len(prompt))
    search = BeamSearch(beams, [] if beams.ignore_eos else source.eos_token_ids, max_tokens)
    rows = [prompt]
    while rows:
        full = {tuple(row[:end]) for row in rows for end in range(block_size, len(row), block_size)}
        if len(full) + len(rows) > num_blocks:
            search.cut_short()
            return Answer(finish_reason=FinishReason.LENGTH, hypotheses=search.finished)
        successors = search.advance([likeliest(history_of(row)[-1], source.params.logprobs) for row in rows])
        rows = [[*rows[successor.parent], successor.token_id] for successor in successors]
    return Answer(finish_reason=FinishReason.STOP, hypotheses=search.finished)


def make_beams(request_id: str, prompt: list[int], beams: BeamSearchParams, **fields: object) -> EngineRequest:
    end_token_ids = fields.get("eos_token_ids", [])
    assert isinstance(end_token_ids, list)
    num_logprobs = num_candidates(beams.beam_width, 0 if beams.ignore_eos else len(end_token_ids))
    return make_request(request_id, prompt, beams=beams, logprobs=min(num_logprobs, VOCAB_SIZE), **fields)


def make_embedding(request_id: str, prompt: list[int], pooling: PoolingParams, **fields: object) -> EngineRequest:
    return make_request(request_id, prompt, pooling=pooling, max_tokens=0, seed=0, detokenize=False, **fields)


def make_request(request_id: str, prompt: list[int], **fields: object) -> EngineRequest:
    """EngineRequest fields by their names; all others are those of SamplingParams."""
    own = {
        name: fields.pop(name)
        for name in (
            "sample_index",
            "eos_token_ids",
            "cache_salt",
            "priority",
            "user",
            "arrival_time",
            "fork_of",
            "beams",
            "reports_progress",
            "pooling",
        )
        if name in fields
    }
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params, seed=params.seed or 0, **own)  # type: ignore[arg-type]


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    policy: str = "fcfs",
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 256,
    long_prefill_token_threshold: int = 0,
    num_slots: int = 0,
    preemption_mode: str = "recompute",
    store: FakeStore | None = None,
) -> Engine:
    pool = BlockPool(num_blocks, enable_prefix_caching)
    scheduler = Scheduler(
        KVManager(pool, block_size, swap=SwapSpace(num_slots), store=store),
        make_policy(policy),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        long_prefill_token_threshold=long_prefill_token_threshold,
        preemption=make_preemption(preemption_mode),
    )
    info = EngineInfo(
        max_model_len, VOCAB_SIZE, block_size, num_blocks, "float32", "none", 1, "", max_num_seqs, HIDDEN_SIZE
    )
    return Engine(scheduler, FakeRunner(block_size, store), info)


def run_to_end(engine: Engine, max_steps: int = 1000) -> dict[str, Answer]:
    """Step until idle; answers by request_id."""
    answers: dict[str, Answer] = {}
    for _ in range(max_steps):
        for delta in engine.step():
            answers.setdefault(delta.request_id, Answer()).take(delta)
        if not engine.has_unfinished:
            engine.check_integrity()
            return answers
    raise AssertionError(f"still busy after {max_steps} steps")
