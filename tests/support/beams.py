"""A beam search over the fake model's KV by a plain loop: no scheduler, no blocks, no forks."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.beams import BeamSearch, num_candidates
from octavo.request import BeamHypothesis, BeamSearchParams
from support.fake_runner import VOCAB_SIZE, kv_of, likeliest


def search_alone(
    prompt: Sequence[int], params: BeamSearchParams, end_token_ids: Sequence[int] = (), max_tokens: int | None = None
) -> list[BeamHypothesis]:
    """`max_tokens`: what the context leaves room for, where that is less than `params.max_tokens`."""
    end_token_ids = () if params.ignore_eos else end_token_ids
    search = BeamSearch(params, end_token_ids, min(params.max_tokens, max_tokens or params.max_tokens))
    count = min(num_candidates(params.beam_width, len(end_token_ids)), VOCAB_SIZE)
    beams = [list(prompt)]
    while True:
        successors = search.advance([likeliest(_newest_kv(beam), count) for beam in beams])
        if not successors:
            return search.finished
        beams = [[*beams[successor.parent], successor.token_id] for successor in successors]


def _newest_kv(token_ids: Sequence[int]) -> int:
    history: list[int] = []
    for token_id in token_ids:
        history.append(kv_of(history, token_id))
    return history[-1]
