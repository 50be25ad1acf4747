"""The random numbers: the generator against its authors' vectors, and what they depend on."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.sampling.seed import Counter, philox4x32, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter: Counter, key: tuple[int, int], expected: Counter) -> None:
    """Known answers of philox4x32-10 from Random123."""
    assert philox4x32(counter, key) == expected


def test_uniform_fills_the_unit_interval() -> None:
    draws = np.array([uniform(7, 0, position) for position in range(20_000)])
    assert 0 <= draws.min() < 1e-3
    assert 1 - 1e-3 < draws.max() < 1
    counts, _ = np.histogram(draws, bins=100, range=(0, 1))
    chi_square = ((counts - 200.0) ** 2 / 200).sum()
    assert chi_square < 99 + 4 * np.sqrt(2 * 99)
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 4 / np.sqrt(len(draws))


def test_each_part_of_the_counter_matters() -> None:
    numbers = {
        uniform(seed, sample_index, position)
        for seed in (0, 1, 2**32, 2**63)
        for sample_index in range(4)
        for position in range(4)
    }
    assert len(numbers) == 4 * 4 * 4
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
