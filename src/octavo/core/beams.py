"""Beam search: which beams go on, which have ended, and when the search is over.

Owns the choice, and nothing else: it sees each beam's likeliest next tokens and says which beams follow from which.
Knows neither blocks nor steps; that a beam's successors share its blocks is the scheduler's doing.

The rules are those of transformers' beam search (its `GenerationMixin._beam_search`), so that the same model gives the
same beams. Of all successors of all beams the best `num_candidates` are looked at; those that end are kept only if they
are among the best `beam_width` of these, the others are there so that as many beams can go on:

    beams       ──►  successors, best first       ──►  beams
    ▪ -0.1           ▪ -0.3                            -0.3
    ▪ -0.7           ▪ -0.8 ends ──► finished          -0.9
                     ─────── beam_width ─────
                     ▪ -0.9
                     ▪ -1.2 ends: too late
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from octavo.request import BeamHypothesis, BeamSearchParams, FinishReason, TokenLogprobs


def num_candidates(beam_width: int, num_end_tokens: int) -> int:
    """Successors to look at, so that `beam_width` of them can go on even if every beam's likeliest tokens end it."""
    return max(2, 1 + num_end_tokens) * beam_width


@dataclass(slots=True)
class Successor:
    """A beam of the next step: beam `parent` of this one and one more token."""

    parent: int
    token_id: int
    cumulative_logprob: float


class BeamSearch:
    """`end_token_ids`: those that end a beam. `max_tokens`: the longest output, in tokens."""

    def __init__(self, params: BeamSearchParams, end_token_ids: Collection[int], max_tokens: int) -> None:
        self.params = params
        self.finished: list[BeamHypothesis] = []  # best first
        self.num_steps = 0  # each with a token for every beam
        self._end_token_ids = frozenset(end_token_ids)
        self._max_tokens = max_tokens
        self._num_candidates = num_candidates(params.beam_width, len(self._end_token_ids))
        self._cumulative_logprobs = [0.0]  # of the beams: there is one at first, the prompt
        self._outputs: list[list[int]] = [[]]  # their output tokens

    def advance(self, next_tokens: list[TokenLogprobs]) -> list[Successor]:
        """Takes in the likeliest next tokens of each beam; returns the beams that follow, best first. None follow:
        the search is over, `finished` is its result."""
        self.num_steps += 1
        candidates = self._best_successors(next_tokens)
        num_tokens = len(self._outputs[0]) + 1
        going_on, ended = [], []
        for rank, successor in enumerate(candidates):
            ends = successor.token_id in self._end_token_ids
            if not ends and num_tokens < self._max_tokens:
                going_on.append(successor)
            elif rank < self.params.beam_width:
                reason = FinishReason.STOP if ends else FinishReason.LENGTH
                token_ids = [*self._outputs[successor.parent], successor.token_id]
                ended.append(self._hypothesis(token_ids, successor.cumulative_logprob, reason))
        self._keep_best(ended)
        del going_on[self.params.beam_width :]
        if not going_on or self._is_over(going_on[0].cumulative_logprob, num_tokens):
            return []
        self._outputs = [[*self._outputs[successor.parent], successor.token_id] for successor in going_on]
        self._cumulative_logprobs = [successor.cumulative_logprob for successor in going_on]
        return going_on

    def cut_short(self) -> None:
        """End all beams where they stand."""
        self._keep_best(
            [
                self._hypothesis(token_ids, logprob, FinishReason.LENGTH)
                for token_ids, logprob in zip(self._outputs, self._cumulative_logprobs, strict=True)
            ]
        )

    def _best_successors(self, next_tokens: list[TokenLogprobs]) -> list[Successor]:
        """Of equals, the earlier beam's come first, then the likelier token's."""
        successors = [
            Successor(parent, token_id, cumulative + logprob)
            for parent, (cumulative, entry) in enumerate(zip(self._cumulative_logprobs, next_tokens, strict=True))
            # Entry 0 is the token that was sampled; it stands again among the likeliest.
            for token_id, logprob in zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
        ]
        successors.sort(key=lambda successor: -successor.cumulative_logprob)
        return successors[: self._num_candidates]

    def _hypothesis(self, token_ids: list[int], cumulative_logprob: float, reason: FinishReason) -> BeamHypothesis:
        score = cumulative_logprob / max(1, len(token_ids)) ** self.params.length_penalty
        return BeamHypothesis(token_ids, cumulative_logprob, score, reason)

    def _keep_best(self, ended: list[BeamHypothesis]) -> None:
        self.finished = sorted([*self.finished, *ended], key=lambda beam: -beam.score)[: self.params.beam_width]

    def _is_over(self, best_logprob: float, num_tokens: int) -> bool:
        """Whether the best beam that goes on, with `num_tokens` tokens of output, cannot improve what has ended."""
        if len(self.finished) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        penalty = self.params.length_penalty
        # More tokens cost logprob; with a penalty for length they may pay all the same.
        longest = self.params.early_stopping == "never" and penalty > 0
        best_score: float = best_logprob / (self._max_tokens if longest else num_tokens) ** penalty
        return best_score <= self.finished[-1].score
