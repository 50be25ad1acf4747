"""bad_words: the last token of a word is masked where the output ends with the tokens before it."""

from __future__ import annotations

from octavo.request import Request, SamplingParams
from octavo.sampling.feature import Feature, SamplerRow


def banned_by_words(request: Request) -> list[int]:
    """The tokens that would complete a bad word now. The word must lie in the output: the prompt is the caller's."""
    num_output, tokens = request.num_output_tokens, request.token_ids
    banned = []
    for *before, last in request.params.bad_words_token_ids or ():
        if len(before) <= num_output and tokens[len(tokens) - len(before) :].tolist() == before:
            banned.append(last)
    return banned


class BadWords(Feature):
    each_step = True

    def active(self, params: SamplingParams) -> bool:
        return bool(params.bad_words_token_ids)

    def collect(self, row: SamplerRow, request: Request) -> None:
        row.banned_words = banned_by_words(request)
