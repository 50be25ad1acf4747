"""`use_beam_search` on completions and chat: from a body to BeamSearchParams, and the refusal of what beams cannot do.

A search gives `n` choices, the best of `beam_width` beams (default: n).
"""

from __future__ import annotations

from octavo.errors import InvalidRequestError, refuse
from octavo.request import BeamSearchParams, SamplingParams
from octavo.server.protocol import GenerationFields

# Fields of SamplingParams that mean something to a search, or nothing to anybody when the search is exact.
_ALLOWED = {
    "n",
    "max_tokens",
    "temperature",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "seed",
}


def beam_search_params(asked: GenerationFields, params: SamplingParams, room: int) -> BeamSearchParams | None:
    """None: the body asks for no search. `params` are those of its sampling fields, `room` is how many tokens the
    context leaves after the longest prompt. Raises InvalidRequestError."""
    if not asked.use_beam_search:
        for name in ("beam_width", "early_stopping"):
            if getattr(asked, name) is not None:
                refuse(name, getattr(asked, name), "absent unless use_beam_search is true")
        return None
    if asked.return_progress:
        refuse("return_progress", True, "absent or false when use_beam_search is true")
    for name in sorted(set(asked.sampling) - _ALLOWED):
        refuse(name, asked.sampling[name], "absent when use_beam_search is true")
    if params.logprobs is not None:
        raise InvalidRequestError("logprobs is set; it must be absent when use_beam_search is true", param="logprobs")
    beams = BeamSearchParams(
        beam_width=params.n if asked.beam_width is None else asked.beam_width,
        max_tokens=max(1, room) if params.max_tokens is None else params.max_tokens,
        ignore_eos=params.ignore_eos,
        temperature=asked.sampling.get("temperature", 0.0),
        length_penalty=1.0 if asked.length_penalty is None else asked.length_penalty,
        early_stopping=False if asked.early_stopping is None else asked.early_stopping,
        skip_special_tokens=params.skip_special_tokens,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )
    if beams.beam_width < params.n:
        refuse("beam_width", beams.beam_width, f"at least n, {params.n}")
    return beams
