"""bfloat16 weights in twelve bits: every value comes back, and no product differs from that of the plain matrix."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from octavo.ops import isa
from octavo.ops.api import TensorSource
from octavo.ops.cpu import CpuBackend, CpuOps
from octavo.quant.formats import MatrixFormat

VARIANTS = [variant for variant in isa.available() if variant in isa.COMPACTS]
LEAST_VALUES = 256  # of a matrix, for one exception
SPECIAL = [0.0, -0.0, np.inf, -np.inf, 1e-40, -1e-40, 3e38, -3e38, 1e-30, -1e30]


@pytest.fixture(scope="module", params=VARIANTS)
def backend(request):
    return CpuBackend(variant=request.param, num_threads=2)


@pytest.fixture(
    scope="module", params=[(v, dtype) for v in VARIANTS for dtype in isa.COMPACTS[v]], ids=lambda case: "-".join(case)
)
def case(request):
    """A backend, and a compute type whose matrices it keeps compact."""
    variant, dtype = request.param
    return CpuBackend(variant=variant, num_threads=2), dtype


def source(values) -> TensorSource:
    stored = values.astype(ml_dtypes.bfloat16)
    return TensorSource("w", np.frombuffer(stored.tobytes(), np.uint8), "BF16", values.shape)


def weights(rows: int, columns: int, seed: int = 1):
    """Normal ones, and in some places others of all sizes."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns)).astype(ml_dtypes.bfloat16).astype(np.float32)
    for i, place in enumerate(rng.choice(values.size, max(1, values.size // 1000), replace=False)):
        values.flat[place] = np.float32(SPECIAL[i % len(SPECIAL)]).astype(ml_dtypes.bfloat16)
    return values


def any_bits(rows: int, columns: int):
    """Finite values of all sizes: more kinds than a table has room for."""
    bits = np.random.default_rng(5).integers(0, 2**16, (rows, columns), np.uint32)
    return (np.where((bits & 0x7F80) == 0x7F80, 0, bits) << 16).astype(np.uint32).view(np.float32)


def bits_of(values):
    return np.ascontiguousarray(values).view(np.uint32)


def plain_bytes(rows: int, columns: int) -> int:
    return 64 + -(-rows // 32) * 32 * -(-columns // 32) * 32 * 2


def rows_of(backend, matrix):
    return CpuOps(backend).embedding(matrix, np.arange(matrix.shape[0], dtype=np.int32))


SHAPES = [(1, 1), (33, 101), (96, 576), (70, 1500), (32, 5000)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_value_comes_back(case, n, k):
    backend, dtype = case
    values = weights(n, k)
    matrix = backend.matrix([source(values)], dtype)
    assert matrix.nbytes < 0.9 * plain_bytes(n, k)
    assert np.array_equal(bits_of(rows_of(backend, matrix)), bits_of(values))
    assert (matrix.format, matrix.dtype) == ("bfloat16", dtype)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_those_of_the_plain_matrix(case, n, k):
    backend, dtype = case
    values = weights(n, k)
    compact = backend.matrix([source(values)], dtype)
    padded = np.concatenate([values, np.zeros((-n % 32, k), np.float32), any_bits(64, k)])
    plain = backend.matrix([source(padded)], dtype)
    assert plain.nbytes == plain_bytes(*padded.shape)
    x = np.random.default_rng(2).standard_normal((700, k)).astype(np.float32)
    for rows in (1, 4, 5, 16, 17, 32, 33, 64, 100, 257, 700):
        y, expected = (CpuOps(backend).linear(x[:rows], matrix) for matrix in (compact, plain))
        assert np.array_equal(y, expected[:, :n], equal_nan=True)


def test_a_matrix_of_all_kinds_of_values_is_plain(case):
    backend, dtype = case
    values = any_bits(64, 256)
    matrix = backend.matrix([source(values)], dtype)
    assert matrix.nbytes == plain_bytes(64, 256)
    assert np.array_equal(bits_of(rows_of(backend, matrix)), bits_of(values))


@pytest.mark.parametrize("too_many", [0, 1])
def test_as_many_exceptions_as_are_worth_it(backend, too_many):
    """All in one panel, as where a few rows of a table were never trained."""
    usual = 4.0 ** np.arange(8)  # with both signs sixteen upper bytes
    values = np.resize(np.concatenate([usual, -usual]), (320, 256)).astype(np.float32)
    exceptions = 320 * 256 // LEAST_VALUES + too_many
    values[32:34].flat[:exceptions] = 2.0**-40
    matrix = backend.matrix([source(values)], "bfloat16")
    assert (matrix.nbytes == plain_bytes(320, 256)) == bool(too_many)
    assert np.array_equal(bits_of(rows_of(backend, matrix)), bits_of(values))


@pytest.mark.parametrize("make", [weights, any_bits])
def test_a_matrix_is_taken_from_its_bytes(case, tmp_path, make):
    backend, dtype = case
    sources = [source(make(70, 300))]
    matrix = backend.matrix(sources, dtype)
    file = tmp_path / "packed"
    file.write_bytes(bytes(64) + matrix.data.tobytes())
    with file.open("rb") as stream:
        packed = backend.read_packed(stream.fileno(), 64 + matrix.nbytes)
    again = backend.packed_matrix(packed, 64, sources, dtype)
    assert again.nbytes == matrix.nbytes
    assert np.array_equal(bits_of(rows_of(backend, again)), bits_of(rows_of(backend, matrix)))
    end = -(-len(packed.data) // 4096) * 4096  # of its memory, in whole pages
    for offset in (end - 64, end, end + 64):
        with pytest.raises(ValueError, match="end before this matrix does"):
            backend.packed_matrix(packed, offset, sources, dtype)


def test_the_planned_size_is_enough_for_trained_weights(backend):
    for rows, columns in ((960, 576), (576, 1536), (2048, 2048)):
        values = np.random.default_rng(3).standard_normal((rows, columns)).astype(np.float32) * 0.02
        planned = MatrixFormat("bfloat16", "plain", compact=True).bits("BF16") * values.size / 8
        nbytes = backend.matrix([source(values)], "bfloat16").nbytes
        assert nbytes <= planned


def test_a_copy_that_ends_within_the_exceptions(backend, tmp_path):
    """Memory is whole pages, so there are enough exceptions here to fill some."""
    values = np.full((32, 32768), 1.5, np.float32)
    exceptions = 2.0 ** np.arange(-96.0, 97.0, 2.0)
    values.flat[: values.size // LEAST_VALUES] = np.resize(exceptions, values.size // LEAST_VALUES)
    matrix = backend.matrix([source(values)], "bfloat16")
    assert matrix.nbytes < plain_bytes(*values.shape)
    assert np.array_equal(rows_of(backend, matrix), values)
    file = tmp_path / "packed"
    file.write_bytes(matrix.data[: matrix.nbytes - 8192].tobytes())
    with file.open("rb") as stream:
        packed = backend.read_packed(stream.fileno(), matrix.nbytes - 8192)
    with pytest.raises(ValueError, match="end before this matrix does"):
        backend.packed_matrix(packed, 0, [source(values)], "bfloat16")


def test_rows_too_long_for_the_place_of_an_exception_are_plain(backend):
    values = np.ones((1, (1 << 19) + 1), np.float32)
    matrix = backend.matrix([source(values)], "bfloat16")
    assert matrix.nbytes == plain_bytes(*values.shape)
    assert np.array_equal(rows_of(backend, matrix), values)


def test_what_is_packed_next_finds_its_memory_empty(backend):
    """In what a compact matrix has given back, and behind one that had to become plain."""
    other = source(weights(64, 256, seed=9).clip(-4, 4))
    for first in (weights(96, 576), any_bits(96, 576)):
        fresh = CpuBackend(variant=backend.variant, num_threads=1)
        alone = fresh.matrix([other], "bfloat16", storage="int4")
        fresh.matrix([source(first)], "bfloat16")
        assert np.array_equal(fresh.matrix([other], "bfloat16", storage="int4").data, alone.data)
