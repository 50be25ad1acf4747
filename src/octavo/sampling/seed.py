"""seed: where a request's random numbers come from.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): number
`position` of sample `sample_index` is a function of the seed and of these two. So it depends on no other request, and
n = 2 draws what the first two samples of n = 4 draw. The Python generator here defines the native one.
"""

from __future__ import annotations

from octavo.request import EngineRequest, Request, SamplingParams
from octavo.sampling.feature import Feature, SamplerRow
from octavo.sampling.temperature import is_greedy

_WORD = 0xFFFFFFFF

Counter = tuple[int, int, int, int]  # 32 bits each


def philox4x32(counter: Counter, key: tuple[int, int]) -> Counter:
    a, b, c, d = counter
    key_0, key_1 = key
    for _ in range(10):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (y >> 32) ^ b ^ key_0, y & _WORD, (x >> 32) ^ d ^ key_1, x & _WORD
        key_0, key_1 = (key_0 + 0x9E3779B9) & _WORD, (key_1 + 0xBB67AE85) & _WORD
    return a, b, c, d


def uniform(seed: int, sample_index: int, position: int) -> float:
    """The number in [0, 1) that draws output token `position`: 53 random bits. `seed` counts modulo 2**64."""
    low, high, *_ = philox4x32((position, sample_index, 0, 0), (seed & _WORD, seed >> 32 & _WORD))
    return ((high << 32 | low) >> 11) * 2.0**-53


class Seed(Feature):
    each_step = True

    def active(self, params: SamplingParams) -> bool:
        return not is_greedy(params)

    def prepare(self, row: SamplerRow, source: EngineRequest) -> None:
        row.seed = source.seed & 0xFFFFFFFFFFFFFFFF
        row.sample_index = source.sample_index

    def collect(self, row: SamplerRow, request: Request) -> None:
        row.position = request.num_output_tokens
