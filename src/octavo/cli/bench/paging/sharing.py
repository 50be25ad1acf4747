"""Blocks that samples of one prompt, or the beams of one search, share in the engine's own block manager.

Both are counted over all steps of a request that has the memory for itself: blocks used, and the blocks that its rows
would use if each had its own. The first step computes the prompt, for all. Sharing between requests is not in it.

A search needs scores, but no model: which beam is whose successor only depends on the logprobs of the likeliest next
tokens. Here these are those of a stick broken at random (`Scores`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.cli.bench.paging.lengths import Length
from octavo.cli.bench.paging.memory import make_kv, make_request
from octavo.core.beam_group import BeamGroup
from octavo.core.kv_manager import KVManager, Prefix
from octavo.request import BeamSearchParams, Request, TokenLogprobs

# Of the sticks. The likeliest next token then has a mean logprob of -0.67. In beam searches of SmolLM2-135M for 16
# instructions it is -0.65 (of answers in the chat format) to -0.70.
CONCENTRATION = 1.5


@dataclass(slots=True)
class Blocks:
    """Summed over steps."""

    used: int = 0
    unshared: int = 0

    @property
    def saved(self) -> float:
        """0 … 1"""
        return 1 - self.used / self.unshared

    def add(self, kv: KVManager, rows: Sequence[Request], num_rows: int) -> None:
        """A step of `rows`, which will be `num_rows` when all have begun."""
        self.used += kv.pool.num_used
        self.unshared += sum(len(kv.block_table(row)) for row in rows) * (num_rows // len(rows))


class Scores:
    """Next tokens of beams. A stick is broken, what is left of it again, and so on, each time at a Beta(1, c) part of
    it; the pieces are the tokens' probabilities (the weights of a Dirichlet process, Sethuraman 1994). Every beam gets
    new ones in every step."""

    def __init__(self, seed: int, concentration: float = CONCENTRATION) -> None:
        self._random = random.Random(seed).random
        self._power = 1 / concentration  # a power of an even number in 0 … 1 is Beta(c, 1): the part that stays

    def next_tokens(self, num_tokens: int) -> TokenLogprobs:
        logprobs = self.likeliest(num_tokens)
        return TokenLogprobs([0, *range(num_tokens)], [logprobs[0], *logprobs], rank=1)

    def likeliest(self, num_tokens: int) -> list[float]:
        """The logprobs of the likeliest tokens, in order."""
        pieces: list[float] = []
        left = 1.0  # of the stick
        while not pieces or left > pieces[num_tokens - 1]:  # a further piece may be among the largest
            for _ in range(num_tokens):
                stays = left * (1 - self._random()) ** self._power
                pieces.append(left - stays)
                left = stays
            pieces.sort(reverse=True)
        return [math.log(piece) for piece in pieces[:num_tokens]]


def parallel(lengths: Sequence[Length], num_samples: int, block_size: int) -> Blocks:
    """`num_samples` samples of each prompt, all as long as the output of its length."""
    blocks = Blocks()
    for length in lengths:
        kv = _room_for(length, num_samples, block_size)
        first = make_request(length.input)
        _begin(kv, first)
        blocks.add(kv, [first], num_samples)
        rows = [first]
        for _ in range(num_samples - 1):
            row = make_request(length.input)
            kv.fork(first, row, length.input)
            row.num_computed_tokens = length.input
            rows.append(row)
        for _ in range(length.output - 1):
            for row in rows:
                row.token_ids.append(0)
                _compute(kv, row)
            kv.take_transfers()
            blocks.add(kv, rows, num_samples)
    return blocks


def beams(lengths: Sequence[Length], beam_width: int, block_size: int, seed: int) -> Blocks:
    """A search for each length, all of whose beams are as long as the output; none ends before."""
    blocks = Blocks()
    scores = Scores(seed)
    for length in lengths:
        kv = _room_for(length, beam_width, block_size)
        params = BeamSearchParams(beam_width=beam_width, max_tokens=length.output, ignore_eos=True)
        group = BeamGroup(make_request(length.input, beams=params), length.output)
        _begin(kv, group.rows[0])
        while True:
            blocks.add(kv, group.rows, beam_width)
            for row in group.rows:
                group.take(row, scores.next_tokens(2 * beam_width))
            if not group.advance(kv):
                break
            for row in group.pending(kv):
                _compute(kv, row)
            kv.take_transfers()
    return blocks


def _room_for(length: Length, num_rows: int, block_size: int) -> KVManager:
    return make_kv(num_rows * -(-sum(length) // block_size), block_size)


def _begin(kv: KVManager, row: Request) -> None:
    kv.admit(row, Prefix(), num_spare_blocks=0)
    row.num_computed_tokens = row.num_tokens


def _compute(kv: KVManager, row: Request) -> None:
    kv.allocate(row, row.num_tokens)
    row.num_computed_tokens = row.num_tokens
