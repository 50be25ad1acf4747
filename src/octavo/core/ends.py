"""When a request ends by itself: by its newest token, or by its length. Decides, changes nothing."""

from __future__ import annotations

from typing import NamedTuple

from octavo.request import FinishReason, Request


class End(NamedTuple):
    reason: FinishReason
    stop_token_id: int | None = None  # of `stop_token_ids`; the model's own end tokens are not named


def due_end(request: Request, token_id: int, max_tokens: int) -> End | None:
    """How the request ends with its newest token, if it does; `max_tokens`: prompt and output that there is room for.
    Stop beats length on the same token."""
    params, num_tokens = request.params, len(request.token_ids)
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if num_output_tokens >= params.min_tokens:
        if not params.ignore_eos and token_id in request.source.eos_token_ids:
            return End(FinishReason.STOP)
        if params.stop_token_ids and token_id in params.stop_token_ids:
            return End(FinishReason.STOP, token_id)
    if num_output_tokens == params.max_tokens or num_tokens == max_tokens:
        return End(FinishReason.LENGTH)
    return None
