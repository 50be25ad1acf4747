"""What a request needs at the very least, against what there is at the very most: who fails here could never run."""

from __future__ import annotations

from octavo.core.kv_manager import KVManager
from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.request import Request


def check_size(request: Request, kv: KVManager, *, max_model_len: int, max_num_seqs: int) -> None:
    """Raises InvalidRequestError, with the numbers."""
    num_prompt_tokens = request.num_prompt_tokens
    if num_prompt_tokens == 0:
        raise InvalidRequestError("prompt has no tokens; at least 1 is needed", param="prompt")
    num_needed = num_prompt_tokens + (0 if request.params.max_tokens == 0 else 1)
    if num_needed > max_model_len:
        raise ContextLengthError(
            f"prompt has {num_prompt_tokens} tokens and needs {num_needed} with its output; "
            f"max_model_len is {max_model_len}",
            param="prompt",
        )
    num_output_tokens, max_tokens = request.num_output_tokens, request.params.max_tokens
    longest = min(max_model_len, kv.max_tokens + 1)  # with the last token, which is never computed
    if max_tokens is not None:
        longest = min(longest, num_prompt_tokens + max_tokens)
    if num_output_tokens and request.num_tokens >= longest:
        raise InvalidRequestError(
            f"output_token_ids has {num_output_tokens} tokens; behind them there is no room for another",
            param="output_token_ids",
        )
    if num_prompt_tokens > kv.max_tokens:
        raise InvalidRequestError(
            f"prompt has {num_prompt_tokens} tokens, but the whole KV cache holds {kv.max_tokens} "
            f"({kv.pool.num_blocks} blocks of {kv.block_size})",
            param="prompt",
        )
    if request.num_seats > max_num_seqs:
        raise InvalidRequestError(
            f"beam_width is {request.num_seats}; at most {max_num_seqs} (max_num_seqs) run at once",
            param="beam_width",
        )
