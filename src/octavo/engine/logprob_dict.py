"""From the logprobs that cross from the engine to the shape that callers see, which is vLLM's."""

from __future__ import annotations

from collections.abc import Callable

from octavo.request import Logprob, TokenLogprobs

TokenText = Callable[[int], str | None]


def as_logprob_dict(entry: TokenLogprobs, token_text: TokenText) -> dict[int, Logprob]:
    """vLLM's shape: the token itself first, then the most likely ones in order; a token that is both stands once."""
    token_id = entry.token_ids[0]
    position = {token_id: Logprob(entry.logprobs[0], entry.rank, token_text(token_id))}
    for rank, (other, logprob) in enumerate(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True), start=1):
        if other != token_id:
            position[other] = Logprob(logprob, rank, token_text(other))
    return position
