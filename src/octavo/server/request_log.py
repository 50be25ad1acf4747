"""A line for each call when it comes and when it ends, for who asks for that (`--enable-log-requests`).

Owns what is in them: ids, counts and parameters, and at `--log-level debug` prompts, as far as `--max-log-len` goes.
Refusals and failures have lines of their own anyway (errors.py).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo.pooling import PoolingParams
from octavo.request import SamplingParams

if TYPE_CHECKING:
    from octavo.server.engine_call import EngineCall

logger = logging.getLogger(__name__)


@contextmanager
def logged(call: EngineCall[Any]) -> Iterator[None]:
    """While the call is open, which has its id."""
    front, request_id = call.front, call.scope.get("octavo.request_id")
    if not front.config.enable_log_requests:
        yield
        return
    about: dict[str, Any] = {"extra": {"request_id": request_id}}
    num_tokens = sum(map(len, call.prompts))
    asked = ", ".join(f"{name}={value!r}" for name, value in changed(call.params).items())
    logger.info(
        "request %s: %s at %s, %d prompt tokens; %s",
        request_id,
        call.call_id,
        call.scope["path"],
        num_tokens,
        asked or "all by default",
        **about,
    )
    if logger.isEnabledFor(logging.DEBUG):
        for prompt in call.prompts:
            text = front.llm.tokenizer.decode(prompt, skip_special_tokens=False)
            logger.debug("request %s: prompt %r", request_id, text[: front.config.max_log_len], **about)
    start = time.monotonic()
    how = "broke off"
    try:
        yield
        how = "ended"
    finally:
        seconds = time.monotonic() - start
        logger.info(
            "request %s: %s after %.3f s, %d tokens", request_id, how, seconds, call.usage.completion_tokens, **about
        )


def changed(params: SamplingParams | PoolingParams) -> dict[str, Any]:
    """The fields that have another value than the class's own."""
    return {
        field.name: value
        for field in dataclasses.fields(params)
        if (value := getattr(params, field.name)) != field.default and value not in (None, [], {})
    }
