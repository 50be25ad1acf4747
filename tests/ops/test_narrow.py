"""float32 products with weights that a checkpoint has in bfloat16: kept as they are, and nothing is lost by it."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from octavo.ops import isa
from octavo.ops.api import TensorSource
from octavo.ops.cpu import CpuBackend, CpuOps
from octavo.ops.reference import ReferenceBackend, ReferenceOps


@pytest.fixture(scope="module", params=isa.available())
def backends(request):
    """With one thread and with two."""
    return [CpuBackend(variant=request.param, num_threads=threads) for threads in (1, 2)]


def source(values, type="BF16") -> TensorSource:
    """`values` are exact in bfloat16."""
    stored = values.astype(ml_dtypes.bfloat16) if type == "BF16" else values
    assert np.array_equal(stored.astype(np.float32), values, equal_nan=True)
    return TensorSource("w", np.frombuffer(stored.tobytes(), np.uint8), type, values.shape)


def weights(rows: int, columns: int, seed: int = 1):
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(ml_dtypes.bfloat16)
    return values.astype(np.float32)


def activations(rows: int, columns: int, seed: int = 0):
    x = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    x[:, columns // 2] *= 1000
    return x


def linear(backend, x, *sources, bias=()):
    return CpuOps(backend).linear(x, backend.matrix(sources, "float32", bias))


# Whole panels and not, whole blocks of 32 k and not, several chunks of K.
SHAPES = [(1, 1), (5, 3), (33, 100), (96, 576), (70, 1500), (40, 5000)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_as_exact_as_float32_sums(backends, n, k):
    values, x = weights(n, k), activations(40, k)
    bias = weights(1, n, seed=5)[0]
    exact = x.astype(np.float64) @ values.T.astype(np.float64) + bias
    magnitude = np.abs(x) @ np.abs(values).T + np.abs(bias)
    expected = ReferenceOps().linear(x, ReferenceBackend().matrix([source(values)], "float32", [source(bias)]))
    for backend in backends:
        y = linear(backend, x, source(values), bias=[source(bias)])
        # One chain of additions rounds once for each k, the tile unit three times for 32.
        assert np.abs((y - exact) / magnitude).max() < (16 if backend.variant == "amx" else 64) * 2**-24
        assert np.abs((y - expected) / magnitude).max() < 64 * 2**-24
        if backend.variant != "amx":  # the same multiplications and additions
            assert np.array_equal(y, linear(backend, x, source(values, "F32"), bias=[source(bias)]))


@pytest.mark.parametrize(("n", "k"), [(33, 100), (96, 576), (64, 1500)])
def test_rows_and_threads_leave_no_trace(backends, n, k):
    values, x = weights(n, k), activations(600, k)  # more rows than are packed together
    wanted = linear(backends[0], x, source(values))
    for backend in backends:
        packed = backend.matrix([source(values)], "float32")
        for first, rows in ((0, 1), (1, 2), (2, 3), (20, 9), (30, 16), (50, 17), (9, 32), (100, 33), (7, 64), (0, 599)):
            part = slice(first, first + rows)
            assert np.array_equal(CpuOps(backend).linear(x[part], packed), wanted[part])


def test_no_bit_of_an_activation_is_lost(backends):
    """Times one, float32 numbers of all kinds come out as they went in."""
    bits = np.random.default_rng(3).integers(0, 2**32, (64, 48), np.uint32)
    special = [0, 1 << 31, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800001, 0x3FFFFFFF, 0x3F80FFFF, 0x3F808000]
    bits[0, : len(special)] = special
    x = bits.view(np.float32)
    x = np.where(np.isfinite(x), x, np.float32(1.5))
    # Of less than 2^-102 the last bits are below the least normal number, which the tile unit takes for zero.
    x = np.where((np.abs(x) >= 2.0**-102) | (x == 0), x, np.float32(2.5))
    for backend in backends:
        y = linear(backend, x, source(np.eye(48, dtype=np.float32)))
        assert np.array_equal(y, x)


def test_the_smallest_numbers(backends):
    """What is below the least normal number may count as zero, and nothing above it."""
    bits = np.random.default_rng(4).integers(1, 30 << 23, (33, 64), np.uint32)
    x = bits.view(np.float32)
    values = weights(40, 64)
    exact = x.astype(np.float64) @ values.T.astype(np.float64)
    allowed = np.abs(x) @ np.abs(values).T * 16 * 2**-24 + 4 * np.abs(values).sum(axis=1) * 2.0**-126
    for backend in backends:
        assert (np.abs(linear(backend, x, source(values)) - exact) <= allowed).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(backends, wrong):
    values, x = weights(40, 100), activations(20, 100)
    right = x.copy()
    x[3, 99] = wrong
    expected = np.sign(values[:, 99]) * wrong
    values[5, 99], expected[5] = 0, np.nan  # zero times infinity
    for backend in backends:
        y = linear(backend, x, source(values))
        assert np.array_equal(y[3], expected, equal_nan=True)
        others = np.arange(20) != 3
        assert np.array_equal(y[others], linear(backend, right, source(values))[others])


def test_a_nan_stays_one_whatever_its_payload(backends):
    x = np.array([[0x7F800001], [0xFF800001], [0x7FC00000], [0x7F80FFFF]], np.uint32).view(np.float32)
    for backend in backends:
        assert np.isnan(linear(backend, x, source(np.ones((3, 1), np.float32)))).all()


def test_a_matrix_is_kept_in_bfloat16_where_all_of_it_is(backends):
    a, b = weights(64, 96), weights(32, 96, seed=2)
    order = np.random.default_rng(0).permutation(64).astype(np.int32)
    x = activations(7, 96)
    for backend in backends:
        both = backend.matrix([replace(source(a), row_order=order), source(b)], "float32")
        assert (both.format, both.dtype) == ("bfloat16", "float32")
        assert (
            both.nbytes < 96 * 96 * 2
            if "float32" in isa.COMPACTS.get(backend.variant, ())
            else both.nbytes == 96 * 96 * 2
        )
        mixed = backend.matrix([replace(source(a), row_order=order), source(b, "F32")], "float32")
        assert (mixed.format, mixed.dtype, mixed.nbytes) == ("float32", "float32", 96 * 96 * 4)
        y, z = CpuOps(backend).linear(x, both), CpuOps(backend).linear(x, mixed)
        np.testing.assert_allclose(y, z, rtol=0, atol=1e-2)
        ids = np.array([0, 95, 5, 5, 31, 64], np.int32)
        rows = CpuOps(backend).embedding(both, ids)
        assert np.array_equal(rows, np.concatenate([a[order], b])[ids])
        assert np.array_equal(rows, CpuOps(backend).embedding(mixed, ids))
