"""Callers that do not read what their requests say: these leave the engine, and come back when the callers read again.

Owns how much may lie unread, and how a request pauses and goes on. What has been said stays; the rest is a request
like any other that goes on behind its output (`EngineRequest.output_token_ids`), so its bytes are the same. Meanwhile
neither blocks nor a seat are held, and what lies here does not grow.
"""

from __future__ import annotations

import dataclasses
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.output_processor import RequestState, SampleState
    from octavo.request import EngineRequest

# A token counts for one, and each logprob with it too. They take some 50 and 200 bytes: a reader costs 100 KB at most.
# A caller that reads is behind by the tokens of the few steps that pass while it is on its way.
MAX_UNREAD = 512


def is_far_behind(request: RequestState) -> bool:
    """Whether it should pause until its caller reads. Only where the caller reads as it goes."""
    if request.params.output_kind != "delta":
        return False
    logprobs = request.params.logprobs
    each = 1 if logprobs is None else 2 + logprobs
    return each * sum(sample.num_unread for sample in request.samples) > MAX_UNREAD


def continuation(sample: SampleState) -> EngineRequest:
    """The rest of it. Under a new id: what the engine still says under the old one is nobody's."""
    new_id = f"{sample.request.request_id}#{uuid.uuid4().hex}"  # of which `callers_id` finds the caller's
    return dataclasses.replace(sample.source, request_id=new_id, output_token_ids=list(sample.token_ids))
