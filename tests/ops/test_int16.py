"""int8 weights with int16 activations: every variant has the bits of the NumPy reference, in any company."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.ops import isa
from octavo.ops.api import TensorSource
from octavo.ops.cpu import CpuBackend, CpuOps
from octavo.ops.quantised import Int8Rows, to_int16_rows
from octavo.ops.reference import ReferenceBackend, ReferenceOps


@pytest.fixture(scope="module", params=isa.available())
def backends(request):
    """With one thread and with two."""
    return [CpuBackend(variant=request.param, num_threads=threads) for threads in (1, 2)]


def source(values) -> TensorSource:
    return TensorSource("w", np.frombuffer(values.tobytes(), np.uint8), "F32", values.shape)


def weights(rows: int, columns: int, seed: int = 1):
    """Normal, with one channel far out."""
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) / 8
    values[:, columns // 3] *= 9
    return values


def activations(rows: int, columns: int, seed: int = 0):
    x = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    x[:, columns // 2] *= 40
    return x


def matrix(backend, values, bias=()):
    return backend.matrix([source(values)], "int16", bias, "int8_row")


def linear(backend, x, values, bias=()):
    return CpuOps(backend).linear(x, matrix(backend, values, bias))


def expected(x, values, bias=()):
    return ReferenceOps().linear(x, matrix(ReferenceBackend(), values, bias))


# Whole panels and not; steps that fill a block of 64 k and not; more k than 16-bit pairs sum, or AMX takes, at a time.
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (33, 100), (96, 576), (70, 1500), (40, 5000)])
def test_products_have_the_bits_of_the_reference(backends, n, k):
    values, x = weights(n, k), activations(330, k)  # more than are packed together; each thread its own
    wanted = expected(x, values)
    for backend in backends:
        packed = matrix(backend, values)
        assert (packed.format, packed.dtype) == ("int8", "int16")
        for first, rows in ((0, 1), (1, 2), (2, 3), (5, 8), (20, 9), (30, 16), (50, 17), (100, 33), (7, 64), (0, 330)):
            part = slice(first, first + rows)
            assert np.array_equal(CpuOps(backend).linear(x[part], packed), wanted[part])


def test_the_largest_sums_are_exact(backends):
    """All codes at their ends, so that neither plane's sum nor that of both fits a float."""
    values, x = np.full((33, 9000), -0.5, np.float32), np.full((3, 9000), 3.0, np.float32)
    x[1], x[2, ::2] = -3.0, 2.999
    for backend in backends:
        assert np.array_equal(linear(backend, x, values), expected(x, values))


def test_bias_and_odd_rows(backends):
    values, bias = weights(64, 96), np.random.default_rng(3).standard_normal(64).astype(np.float32)
    values[7] = 0
    values[:, 11] = 0
    x = activations(7, 96)
    x[1], x[2], x[3], x[4] = 0, 1e-38, 3e35, 0.3
    for backend in backends:
        assert np.array_equal(linear(backend, x, values, [source(bias)]), expected(x, values, [source(bias)]))
        assert matrix(backend, values).can_fuse_silu_mul
        assert np.array_equal(linear(backend, x, 0 * values), np.zeros((7, 64)))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_its_row_nan(backends, wrong):
    values, x = weights(40, 100), activations(20, 100)
    x[3, 99] = wrong
    for backend in backends:
        result = linear(backend, x, values)
        assert np.isnan(result[3]).all()
        assert np.array_equal(result, expected(x, values), equal_nan=True)


def test_embedding(backends):
    values = weights(77, 35)
    ids = np.array([0, 76, 5, 5, 31, 32], np.int32)
    for backend in backends:
        rows = CpuOps(backend).embedding(matrix(backend, values), ids)
        assert np.array_equal(rows, Int8Rows.quantise(values).values[ids])


def test_codes():
    values = weights(400, 50)
    rows = Int8Rows.quantise(values)
    assert np.abs(rows.codes).max(axis=1).tolist() == [127] * 400
    error = np.abs(rows.values - values)
    assert (error <= 0.501 * rows.scales[:, None] * rows.channel_scales).all()
    plain = np.abs(values).max(axis=1) / 127  # the scale of a row that minds the channel far out
    assert np.median(error[:, :16].max(axis=1) / plain) < 0.35

    codes, scales = to_int16_rows(activations(9, 50))
    assert np.abs(codes).max(axis=1).tolist() == [32639] * 9
    high = codes + 128 >> 8
    assert high.min() >= -128 and high.max() <= 127
    np.testing.assert_allclose(codes * scales[:, None], activations(9, 50), atol=scales.max() / 2 * 1.01)


def test_int16_goes_with_int8_rows(backends):
    for dtype, storage in (("int16", "plain"), ("int16", "int8"), ("bfloat16", "int8_row")):
        with pytest.raises(ValueError, match="dtype int16 and storage int8_row go together"):
            backends[0].matrix([source(weights(4, 32))], dtype, storage=storage)
    with pytest.raises(ValueError, match="131073 columns; int16 activations allow 131072"):
        matrix(backends[0], np.zeros((1, 131073), np.float32))
    with pytest.raises(ValueError, match="a cache keeps float32, bfloat16 or int8"):
        backends[0].kv_blocks(1, 1, 16, 1, 16, "int16")
