"""Matrices that keep the integers of a block type, and int8 activations: every type and every variant against the NumPy
reference, against the same matrix unpacked, and bit for bit against other numbers of rows, threads and variants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.ops import isa
from octavo.ops.api import TensorSource
from octavo.ops.cpu import CpuBackend, CpuOps
from octavo.ops.decode import BLOCK_TYPES, decode
from octavo.ops.quantised import quantise_activations, quantise_weights
from octavo.ops.reference import ReferenceBackend, ReferenceOps
from octavo.quant.formats import MatrixFormat
from support.blocks import random_blocks

ROWS = (1, 2, 5, 6, 7, 13, 33, 70)


@pytest.fixture(scope="module", params=isa.available())
def backend(request):
    return CpuBackend(variant=request.param, num_threads=2)


def activations(rows: int, columns: int, seed: int = 0):
    """Normal, with two channels far out, as in a language model."""
    x = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    x[:, 5 % columns] *= 40
    x[:, columns - 2] *= 25
    return x


def block_source(type: str, rows: int, columns: int, seed: int = 1) -> TensorSource:
    blocks = random_blocks(type, rows, columns, np.random.default_rng(seed))
    return TensorSource("w", blocks.reshape(-1), type, (rows, columns))


def float_source(rows: int, columns: int, seed: int = 1) -> TensorSource:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) / 8
    return TensorSource("w", values.view(np.uint8).reshape(-1), "F32", (rows, columns))


def assert_close(actual, x, reference):
    """Within 64 float32 roundings of what was summed."""
    expected = ReferenceOps().linear(x, reference)
    magnitude = np.abs(quantise_activations(x)) @ np.abs(reference.values).T + 1e-30
    np.testing.assert_array_less(np.abs(actual - expected), np.float32(64 * 2**-24) * magnitude)


def plain_source(values) -> TensorSource:
    values = np.ascontiguousarray(values, np.float32)
    return TensorSource("w", values.view(np.uint8).reshape(-1), "F32", values.shape)


def reference_matrix(backend, sources, storage="blocks"):
    """Of products with bfloat16 activations in this backend's variant."""
    owner = ReferenceBackend(unpacks_in_halves=backend.variant in isa.UNPACKS_IN_HALVES)
    return owner.matrix(sources, "bfloat16", storage=storage)


def assert_products_are_those_of_the_reference(backend, sources, storage="blocks"):
    """Bit for bit those of a plain matrix of the values that the reference multiplies."""
    ops = CpuOps(backend)
    packed, reference = (
        backend.matrix(sources, "bfloat16", storage=storage),
        reference_matrix(backend, sources, storage),
    )
    values = reference.values if reference.unpacked is None else reference.unpacked
    plain = backend.matrix([plain_source(values)], "bfloat16")
    for rows in ROWS:
        x = activations(rows, values.shape[1], seed=rows)
        assert np.array_equal(ops.linear(x, packed), ops.linear(x, plain), equal_nan=True)


@pytest.mark.parametrize("type", BLOCK_TYPES)
@pytest.mark.parametrize("columns", [256, 768])  # 768 is a whole number of AMX's chunks
def test_bfloat16_products_are_those_of_the_unpacked_matrix(backend, type, columns):
    source = block_source(type, 96, columns)
    packed, plain = backend.matrix([source], "bfloat16", storage="blocks"), backend.matrix([source], "bfloat16")
    assert (packed.format, plain.format) == (type, "bfloat16")
    assert packed.nbytes < plain.nbytes
    assert_products_are_those_of_the_reference(backend, [source])


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_int8_products(backend, type):
    source = block_source(type, 70, 256)
    matrix = backend.matrix([source], "int8", storage="blocks")
    reference = ReferenceBackend().matrix([source], "int8", storage="blocks")
    for rows in ROWS:
        x = activations(rows, 256, seed=rows)
        assert_close(CpuOps(backend).linear(x, matrix), x, reference)


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_int8_products_have_the_same_bits_everywhere(type):
    """Integer sums are exact, and the rest has one order: no variant, thread or neighbouring row shows."""
    source, x = block_source(type, 100, 768), activations(400, 768)
    results = []
    for variant in isa.available():
        for threads in (1, 2):
            backend = CpuBackend(variant=variant, num_threads=threads)
            matrix, ops = backend.matrix([source], "int8", storage="blocks"), CpuOps(backend)
            whole = ops.linear(x, matrix)
            for first, rows in ((0, 1), (3, 2), (10, 7), (20, 33), (235, 10), (9, 250)):
                assert np.array_equal(ops.linear(x[first : first + rows], matrix), whole[first : first + rows])
            results.append(whole)
    assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize("storage", ["int8", "int4"])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (33, 100), (64, 576), (5, 3)])
def test_quantised_at_load(backend, storage, n, k):
    source, ops = float_source(n, k), CpuOps(backend)
    values = quantise_weights(decode(source), storage)
    matrices = {dtype: backend.matrix([source], dtype, storage=storage) for dtype in ("bfloat16", "int8")}
    for matrix in matrices.values():
        assert np.array_equal(ops.embedding(matrix, np.arange(n, dtype=np.int32)), values)
    assert_products_are_those_of_the_reference(backend, [source], storage)
    reference = ReferenceBackend().matrix([source], "int8", storage=storage)
    for rows in (1, 4, 9):
        x = np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)
        assert_close(ops.linear(x, matrices["int8"]), x, reference)


def test_quantised_values_are_near():
    values = decode(float_source(8, 256))
    for storage, steps in (("int8", 127), ("int4", 7.5)):
        error = np.abs(quantise_weights(values, storage) - values)
        assert np.max(error) < np.max(np.abs(values)) / steps


def test_bias_and_silu_on_block_panels(backend):
    source, bias = block_source("Q4_1", 64, 64), float_source(1, 64)
    bias = replace(bias, shape=(64,))
    x = activations(9, 64)
    for dtype in ("bfloat16", "int8"):
        matrix = backend.matrix([source], dtype, storage="blocks")
        with_bias = backend.matrix([source], dtype, [bias], storage="blocks")
        ops = CpuOps(backend)
        np.testing.assert_allclose(ops.linear(x, with_bias), ops.linear(x, matrix) + decode(bias), rtol=1e-6)
        assert matrix.can_fuse_silu_mul


def test_types_may_change_between_panels_only(backend):
    a, b = block_source("Q4_K", 64, 256), block_source("Q6_K", 40, 256, seed=2)
    x = activations(7, 256)
    both = backend.matrix([a, b], "int8", storage="blocks")
    assert (both.format, both.dtype) == ("Q4_K+Q6_K", "int8")
    apart = [CpuOps(backend).linear(x, backend.matrix([s], "int8", storage="blocks")) for s in (a, b)]
    assert np.array_equal(CpuOps(backend).linear(x, both), np.concatenate(apart, axis=1))

    within = backend.matrix([b, a], "int8", storage="blocks")  # Q4_K begins in row 40
    assert (within.format, within.dtype) == ("bfloat16", "bfloat16")
    reference = ReferenceBackend().matrix([b, a], "int8", storage="blocks")
    assert reference.dtype == "bfloat16"
    assert backend.matrix([a, float_source(32, 256)], "int8", storage="blocks").format == "bfloat16"


def test_embedding_is_not_rounded(backend):
    """Where scales are kept in halves, those of the K types are, and minimums far below all scales of their row."""
    for type in BLOCK_TYPES:
        source = block_source(type, 40, 256)
        table = backend.matrix([source], "bfloat16", storage="blocks")
        ids = np.array([0, 39, 31, 32, 5], np.int32)
        rows = CpuOps(backend).embedding(table, ids)
        assert np.array_equal(rows, reference_matrix(backend, [source]).values[ids])
        exact = decode(source)[ids]
        if backend.variant in isa.UNPACKS_IN_HALVES and type in ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q6_K"):
            steps = 2.0**-11 if type.endswith("_K") else 2.0**-18
            assert np.abs(rows - exact).max() < steps * np.abs(exact).max()
        else:
            assert np.array_equal(rows, exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_planned_size_is_what_a_matrix_takes(backend, dtype):
    for type in BLOCK_TYPES:
        matrix = backend.matrix([block_source(type, 64, 1024)], dtype, storage="blocks")
        in_halves = dtype == "bfloat16" and backend.variant in isa.UNPACKS_IN_HALVES
        planned = MatrixFormat(dtype, "blocks", in_halves).bits(type) * 1024 * 64 / 8
        assert matrix.nbytes - planned == (4 * 64 if in_halves else 0)  # a row's power of two


def blocks_with(type: str, scales, minimums=None) -> TensorSource:
    """Q8_0 or Q4_1 of 32 rows of random codes, with these scales (and minimums), [32, groups]."""
    scales = np.broadcast_to(np.asarray(scales, np.float16), (32, np.shape(scales)[-1]))
    blocks = random_blocks(type, 32, 32 * scales.shape[1], np.random.default_rng(3)).reshape(*scales.shape, -1)
    blocks[:, :, :2] = scales[..., None].view(np.uint8)
    if minimums is not None:
        minimums = np.broadcast_to(np.asarray(minimums, np.float16), scales.shape)
        blocks[:, :, 2:4] = minimums[..., None].view(np.uint8)
    return TensorSource("w", blocks.reshape(-1), type, (32, 32 * scales.shape[1]))


@pytest.mark.parametrize("scale", [6e-8, 6.1e-5, 0.01, 1.0, 500.0, -0.5])
def test_scales_of_any_size(backend, scale):
    """In one row, and from row to row: each has a range of its own."""
    spread = np.float32(scale) * np.exp2(-np.arange(8, dtype=np.float32))
    for source in (
        blocks_with("Q8_0", spread),
        blocks_with("Q8_0", spread * np.exp2(-np.arange(32, dtype=np.float32) / 4)[:, None]),
        blocks_with("Q4_1", spread, -7 * spread),
        blocks_with("Q4_1", spread[::-1], 100 * spread),
        blocks_with("Q4_1", 0 * spread, spread),
        blocks_with("Q4_1", spread, 0 * spread),
    ):
        assert_products_are_those_of_the_reference(backend, [source])
        values, reference = decode(source), reference_matrix(backend, [source])
        if reference.unpacked is not None:
            # Half's rounding and bfloat16's; and of small values no more than these take from the largest of the row.
            largest = np.max(np.abs(values), axis=1, keepdims=True)
            np.testing.assert_array_less(
                np.abs(reference.unpacked - values), (2.0**-8 + 2.0**-11) * np.abs(values) + 2.0**-9 * largest + 1e-30
            )


def test_a_row_of_zeros_gives_zeros(backend):
    for source in (blocks_with("Q8_0", np.zeros(8)), blocks_with("Q4_1", np.zeros(8), np.zeros(8))):
        x = activations(3, 256)
        assert not CpuOps(backend).linear(x, backend.matrix([source], "bfloat16", storage="blocks")).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_spoils_its_row_alone(backend, value):
    scales = np.full((32, 8), 0.01, np.float32)
    scales[5, 3] = value
    for source in (blocks_with("Q8_0", scales), blocks_with("Q4_1", np.full(8, 0.01), scales)):
        result = CpuOps(backend).linear(activations(3, 256), backend.matrix([source], "bfloat16", storage="blocks"))
        assert not np.isfinite(result[:, 5]).any()
        assert np.isfinite(np.delete(result, 5, axis=1)).all()


@pytest.mark.parametrize("row", ["zeros", "equal", "one", "tie"])
def test_int8_activations_of_odd_rows(backend, row):
    x = np.zeros((3, 64), np.float32)
    if row == "equal":
        x[:] = 0.3
    elif row == "one":
        x[1, 40] = -7.5
    elif row == "tie":
        x[:, ::3], x[:, 1::3] = 2.0, -2.0
    source = block_source("Q4_1", 32, 64)
    matrix = backend.matrix([source], "int8", storage="blocks")
    reference = ReferenceBackend().matrix([source], "int8", storage="blocks")
    expected = ReferenceOps().linear(x, reference)
    np.testing.assert_allclose(CpuOps(backend).linear(x, matrix), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [[0], [7, 100], [20, 21, 22, 23], list(range(256))])
def test_what_is_not_a_number_is_not_lost(backend, columns):
    x = activations(3, 256)
    x[1, columns] = np.nan
    result = CpuOps(backend).linear(x, backend.matrix([block_source("Q4_1", 32, 256)], "int8", storage="blocks"))
    assert np.isnan(result[1]).all()
    assert np.isfinite(result[[0, 2]]).all()


def test_only_known_storage(backend):
    with pytest.raises(ValueError, match="storage is 'int3'; allowed: plain, blocks, int8, int4, int8_row"):
        backend.matrix([float_source(4, 32)], "int8", storage="int3")
