"""Files of packed weights: what is read is what was written, and whatever is not exactly that is refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from octavo.checkpoint import packed_file
from octavo.checkpoint.packed_file import ALIGNMENT, CHUNK_BYTES, Interrupted, file_bytes, place_after
from octavo.ops import isa
from octavo.ops.cpu import CpuBackend

KEY = bytes(range(32))
END_BYTES = 88  # behind the payload
# Nothing, less than a line, a line; parts of a chunk; a chunk exactly, and what goes beyond several.
SIZES = (0, 1, 64, 4 * 10**6, CHUNK_BYTES, 65, 2 * CHUNK_BYTES + 3)


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend(num_threads=2)


def random_matrices(sizes: Sequence[int] = SIZES) -> list[np.ndarray]:
    generator = np.random.default_rng(5)
    return [generator.integers(0, 256, size, np.uint8) for size in sizes]


def write(path: Path, backend: CpuBackend, matrices: Sequence[np.ndarray] = ()) -> int:
    return packed_file.write(path, KEY, matrices or random_matrices(), backend, lambda seconds: None)


def test_matrices_come_back_where_they_were_placed(tmp_path: Path, backend: CpuBackend) -> None:
    path, matrices = tmp_path / "a.packed", random_matrices()
    length = write(path, backend)
    assert length == path.stat().st_size == file_bytes(SIZES)
    data = packed_file.read(path, KEY, backend).data
    path.unlink()  # who has read it does not notice
    assert data.shape == (length - END_BYTES,) and not data.flags.writeable
    offset = 0
    for matrix in matrices:
        assert offset % ALIGNMENT == 0
        assert np.array_equal(data[offset : offset + len(matrix)], matrix)
        offset = place_after(offset, len(matrix))
    assert offset == length - END_BYTES and list(tmp_path.iterdir()) == []


def test_a_file_that_is_shorter_than_it_was_is_an_error(tmp_path: Path, backend: CpuBackend) -> None:
    path = tmp_path / "a.packed"
    path.write_bytes(bytes(5 * 2**20))
    with path.open("rb") as file:
        assert len(backend.read_packed(file.fileno(), 5 * 2**20).data) == 5 * 2**20
        with pytest.raises(OSError, match="Input/output error"):
            backend.read_packed(file.fileno(), 5 * 2**20 + 1)


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, backend: CpuBackend) -> None:
    path = tmp_path / "a.packed"
    length = write(path, backend)
    whole = path.read_bytes()
    payload = length - END_BYTES
    fields = [payload + place for place in (0, 8, 15, 16, 47, 48, 55, 56, 87)]
    places = [0, 2**20, length // 2 + 1, payload - 1, *fields]
    for place in places:
        for bit in (0, 7):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"checksum|version|holds no|belongs to|bytes, not"):
                packed_file.read(path, KEY, backend)
    path.write_bytes(whole)
    packed_file.read(path, KEY, backend)


def test_parts_that_changed_places_or_are_zero_are_found(tmp_path: Path, backend: CpuBackend) -> None:
    path = tmp_path / "a.packed"
    write(path, backend)
    whole = path.read_bytes()
    first, second = slice(0, 2**20), slice(2**20, 2**21)
    swapped, zeroed, moved = bytearray(whole), bytearray(whole), bytearray(whole)
    swapped[first], swapped[second] = whole[second], whole[first]
    zeroed[2**20 : 2**20 + 4096] = bytes(4096)
    moved[2**20 : 2**20 + 512] = whole[2**20 + 256 : 2**20 + 512] + whole[2**20 : 2**20 + 256]
    for damaged in (swapped, zeroed, moved):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="its checksum is wrong"):
            packed_file.read(path, KEY, backend)


def test_lengths_and_owners_are_checked_first(tmp_path: Path, backend: CpuBackend) -> None:
    path = tmp_path / "a.packed"
    write(path, backend)
    whole = path.read_bytes()
    cases = [
        (b"", KEY, "cut short"),
        (whole[:50], KEY, "cut short"),
        (whole[:-1], KEY, "cut short"),
        (whole + b"\0", KEY, "holds no packed weights"),
        (whole[64:], KEY, f"{len(whole) - 64} bytes, not {len(whole)}"),
        (bytes(64) + whole, KEY, f"{len(whole) + 64} bytes, not {len(whole)}"),
        (whole[: 8 - END_BYTES] + b"\7" + whole[9 - END_BYTES :], KEY, "version 7, not 1"),
        (whole, bytes(32), "belongs to another"),
    ]
    for content, key, message in cases:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            packed_file.read(path, key, backend)
    with pytest.raises(FileNotFoundError):
        packed_file.read(tmp_path / "none", KEY, backend)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"):
        packed_file.read(tmp_path / "pipe", KEY, backend)


def test_a_writer_that_stops_leaves_nothing(tmp_path: Path, backend: CpuBackend) -> None:
    path = tmp_path / "a.packed"
    seconds = []

    def pace(taken: float) -> None:
        seconds.append(taken)
        if len(seconds) == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        packed_file.write(path, KEY, random_matrices(), backend, pace)
    assert min(seconds) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path, backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.packed"
    path.write_bytes(b"what was there before")
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="No space left"):
        write(path, backend)
    assert [file.name for file in tmp_path.iterdir()] == ["a.packed"]
    assert path.read_bytes() == b"what was there before"


def test_checksums_are_the_same_for_all_instruction_sets_and_threads() -> None:
    """And those of the definition."""
    (data,) = random_matrices([3 * 2**20 + 260])
    found = [CpuBackend(variant=variant, num_threads=2) for variant in isa.available()]
    sums = [backend.checksums(data, threads=threads).tolist() for backend in found for threads in (True, False)]
    assert all(each == sums[0] for each in sums)
    assert len(set(sums[0])) == len(sums[0]) == 4
    assert sums[0] == expected_checksums(data)
    with pytest.raises(ValueError, match="words of four bytes"):
        found[0].checksums(data[:-1])


def expected_checksums(data: np.ndarray) -> list[int]:
    """The definition (native/kernels/checksum.cpp), in NumPy and Python's integers."""
    sums = []
    for start in range(0, len(data), 2**20):
        part = data[start : start + 2**20]
        words = np.zeros(-(-len(part) // 256) * 64, np.uint32)
        words[: len(part) // 4] = part.view("<u4")
        lanes = (np.arange(64, dtype=np.uint64) * 0x9E3779B9).astype(np.uint32)
        for row in words.reshape(-1, 64):
            lanes = (lanes ^ row) * np.uint32(0x85EBCA6B)
            lanes ^= lanes >> np.uint32(15)
        total = len(part)
        for lane in lanes.tolist():
            total = (total ^ lane) * 0x9E3779B97F4A7C15 % 2**64
            total ^= total >> 32
        sums.append(total)
    return sums
