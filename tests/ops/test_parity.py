"""Every op of every instruction-set variant that this CPU runs, against the NumPy reference; and bit for bit against
itself with other numbers of rows and threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.ops import isa
from octavo.ops.api import Batch, TensorSource
from octavo.ops.cpu import CpuBackend, CpuOps
from octavo.ops.reference import ReferenceBackend, ReferenceOps

DTYPES = ("float32", "bfloat16")
CACHE_DTYPES = ("float32", "bfloat16", "int8")
REFERENCE = ReferenceOps()


@pytest.fixture(scope="module", params=isa.available())
def backend(request):
    return CpuBackend(variant=request.param, num_threads=2)


@pytest.fixture(scope="module")
def single(backend):
    return CpuBackend(variant=backend.variant, num_threads=1)


def normal(*shape, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def source(values, name="w"):
    return TensorSource(name, np.frombuffer(values.tobytes(), np.uint8), "F32", values.shape)


def matrices(backend, dtype, *parts, bias=None):
    """The same matrix, packed and as the reference has it."""
    sources = [source(part) for part in parts]
    biases = [source(bias)] if bias is not None else []
    return backend.matrix(sources, dtype, biases), ReferenceBackend().matrix(sources, dtype, biases)


def assert_close(actual, expected, magnitude=1.0, ulps=64):
    """Within `ulps` float32 roundings of `magnitude`, the size of what was summed."""
    assert actual.dtype == np.float32 and actual.shape == expected.shape
    np.testing.assert_array_less(np.abs(actual - expected), np.float32(ulps * 2**-24) * magnitude + 1e-30)


SHAPES = [(1, 1), (5, 3), (31, 17), (32, 64), (96, 576), (70, 33), (100, 130)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear(backend, dtype, n, k):
    weight = normal(n, k, seed=1)
    packed, reference = matrices(backend, dtype, weight, bias=normal(n, seed=2))
    for rows in (0, 1, 2, 5, 12, 13, 29, 97):
        x = normal(rows, k, seed=rows)
        expected = REFERENCE.linear(x, reference)
        magnitude = np.abs(x) @ np.abs(weight).T + 5
        assert_close(CpuOps(backend).linear(x, packed), expected, magnitude)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_stacks_sources_and_reorders_rows(backend, dtype):
    a, b = normal(20, 24, seed=1), normal(7, 24, seed=2)
    order = np.random.default_rng(0).permutation(20).astype(np.int32)
    sources = [replace(source(a), row_order=order), source(b)]
    x = normal(3, 24, seed=3)
    expected = REFERENCE.linear(x, ReferenceBackend().matrix(sources, dtype))
    actual = CpuOps(backend).linear(x, backend.matrix(sources, dtype))
    assert_close(actual, expected, 30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_rows_and_threads_leave_no_trace(backend, single, dtype):
    k = 130
    packed, _ = matrices(backend, dtype, normal(75, k, seed=1))
    alone, _ = matrices(single, dtype, normal(75, k, seed=1))
    x = normal(400, k, seed=2)  # so many that workers share them, and not the panels
    whole = CpuOps(backend).linear(x, packed)
    for first, rows in ((0, 1), (3, 2), (50, 13), (100, 64), (0, 199), (1, 399)):
        part = x[first : first + rows]
        assert np.array_equal(CpuOps(backend).linear(part, packed), whole[first : first + rows])
        assert np.array_equal(CpuOps(single).linear(part, alone), whole[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_adds_to_its_own_output(backend, dtype):
    packed, _ = matrices(backend, dtype, normal(75, 130, seed=1))
    for rows in (10, 400):
        x, residual = normal(rows, 130, seed=2), normal(rows, 75, seed=3)
        expected = residual + CpuOps(backend).linear(x, packed)
        backend.native.linear(backend.pool, x, packed, residual, residual)
        assert np.array_equal(residual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(backend, dtype):
    packed, reference = matrices(backend, dtype, normal(77, 35))
    ids = np.array([0, 76, 5, 5, 31, 32], np.int32)
    assert np.array_equal(CpuOps(backend).embedding(packed, ids), REFERENCE.embedding(reference, ids))


@pytest.mark.parametrize("columns", [1, 16, 30, 576])
def test_rms_norm(backend, columns):
    x, weight = normal(9, columns), normal(columns, seed=1)
    expected = REFERENCE.rms_norm(x, weight, 1e-5)
    assert_close(CpuOps(backend).rms_norm(x, weight, 1e-5), expected, np.abs(expected))


@pytest.mark.parametrize("rotary", [8, 16, 64])
def test_rope(backend, rotary):
    x = normal(11, 3 * 64)
    positions = np.random.default_rng(0).integers(0, 50, 11).astype(np.int32)
    angle = np.arange(50)[:, None] * 0.3 ** np.arange(rotary // 2)
    table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    expected = REFERENCE.rope(x, positions, table, 64)
    assert np.array_equal(CpuOps(backend).rope(x, positions, table, 64), expected)


@pytest.mark.parametrize("columns", [1, 16, 100])
def test_silu_mul(backend, columns):
    x = normal(7, 2 * columns, scale=5)
    x[0, 0], x[1, 0] = 95.0, -95.0
    expected = REFERENCE.silu_mul(x)
    assert_close(CpuOps(backend).silu_mul(x), expected, np.abs(expected) + 1e-30)


def test_add_split_and_take_rows(backend):
    ops = CpuOps(backend)
    x, y = normal(9, 20), normal(9, 20, seed=1)
    assert np.array_equal(ops.add(x, y), x + y)
    rows = np.array([8, 0, 3], np.int32)
    assert np.array_equal(ops.take_rows(x, rows), x[rows])
    assert all(map(np.array_equal, ops.split(x, (3, 16, 1)), REFERENCE.split(x, (3, 16, 1))))


def make_batch(requests, block_size, num_blocks, seed=0):
    """A Batch of (tokens already in the cache, new tokens), with block tables shuffled over the pool."""
    rng = np.random.default_rng(seed)
    free = list(rng.permutation(num_blocks))
    positions, slots, starts, tables = [], [], [0], []
    for past, new in requests:
        table = [free.pop() for _ in range(-(-(past + new) // block_size))]
        for position in range(past, past + new):
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
        starts.append(len(positions))
        tables.append(table)
    width = max(map(len, tables))
    return Batch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array(slots, np.int32),
        query_start=np.array(starts, np.int32),
        seq_lens=np.array([past + new for past, new in requests], np.int32),
        block_tables=np.array([table + [0] * (width - len(table)) for table in tables], np.int32),
        logit_rows=np.zeros(0, np.int32),
    )


def fill_past(ops, cache, batch, requests, block_size, kv_width, seed=5):
    """Writes the tokens before the batch: request r's token p holds the same values whatever else is there."""
    for r, (past, _) in enumerate(requests):
        if not past:
            continue
        positions = np.arange(past)
        table = batch.block_tables[r]
        slots = (table[positions // block_size] * block_size + positions % block_size).astype(np.int32)
        k, v = normal(past, kv_width, seed=seed + 10 * r), normal(past, kv_width, seed=seed + 10 * r + 1)
        before = Batch(
            np.zeros(past, np.int32), positions.astype(np.int32), slots, np.array([0, past], np.int32),
            np.array([past], np.int32), batch.block_tables[r : r + 1], np.zeros(0, np.int32),
        )  # fmt: skip
        ops.write_kv(k, v, cache, before)


CASES = [
    # heads, kv heads, head_dim, block size, requests (past, new)
    (9, 3, 64, 16, [(0, 1), (300, 1), (5, 40), (255, 2), (0, 33), (511, 1)]),
    (4, 4, 16, 16, [(0, 5), (17, 1)]),
    (8, 1, 80, 32, [(40, 7), (256, 1)]),
    (32, 2, 20, 48, [(70, 3)]),
    (2, 2, 6, 16, [(31, 1), (0, 18)]),
]


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "requests"), CASES)
def test_write_kv_and_attention(backend, dtype, heads, kv_heads, dim, block_size, requests):
    num_blocks = 100
    batch = make_batch(requests, block_size, num_blocks)
    tokens = len(batch.positions)
    q = normal(tokens, heads * dim, seed=1)
    k, v = normal(tokens, kv_heads * dim, seed=2), normal(tokens, kv_heads * dim, seed=3)
    results = []
    for ops, owner in ((CpuOps(backend), backend), (REFERENCE, ReferenceBackend())):
        cache = owner.kv_blocks(1, num_blocks, block_size, kv_heads, dim, dtype).layer(0)
        fill_past(ops, cache, batch, requests, block_size, kv_heads * dim)
        ops.write_kv(k, v, cache, batch)
        results.append(ops.attention(q, cache, batch, dim**-0.5))
    # In bfloat16 a probability that lies on a rounding boundary may go the other way: one part in 256 of its share.
    np.testing.assert_allclose(results[0], results[1], atol=2e-6 if dtype == "float32" else 2e-3)
    assert np.mean(np.abs(results[0] - results[1])) < (3e-7 if dtype == "float32" else 1e-4)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_attention_does_not_see_batch_chunks_blocks_or_threads(backend, single, dtype):
    """One request of 700 tokens computed at once, in chunks, one by one at the end, alone, among others, with another
    number of threads: the same bytes."""
    heads, kv_heads, dim, total = 6, 2, 32, 700
    q = normal(total, heads * dim, seed=1)
    k, v = normal(total, kv_heads * dim, seed=2), normal(total, kv_heads * dim, seed=3)

    def run(owner, chunks, others, block_size, seed):
        cache = owner.kv_blocks(1, 400, block_size, kv_heads, dim, dtype).layer(0)
        ops, out, past = CpuOps(owner), [], 0
        for new in chunks:
            requests = [(past, new), *others]
            # The same seed gives the same shuffle, and the first request the same blocks from chunk to chunk.
            whole = make_batch([(0, total), *others], block_size, 400, seed)
            batch = make_batch(requests, block_size, 400, seed)
            batch.block_tables = whole.block_tables
            first = slice(past, past + new)
            batch.slot_mapping[:new] = whole.slot_mapping[first]
            batch.slot_mapping[new:] = whole.slot_mapping[total:]
            pad = len(batch.positions) - new
            rows = [np.concatenate([x[first], normal(pad, x.shape[1], seed=9)]) for x in (q, k, v)]
            ops.write_kv(rows[1], rows[2], cache, batch)
            out.append(ops.attention(rows[0], cache, batch, dim**-0.5)[:new])
            past += new
        return np.concatenate(out)

    expected = run(backend, [total], [], 16, 0)
    assert np.array_equal(run(backend, [250, 13, 1, 436], [], 16, 1), expected)
    assert np.array_equal(run(backend, [600, *[1] * 100], [], 32, 2), expected)
    assert np.array_equal(run(single, [600, *[1] * 100], [], 16, 3), expected)
    assert np.array_equal(run(backend, [699, 1], [(0, 37), (0, 1)], 16, 4), expected)
    assert np.array_equal(run(backend, [257, 443], [(0, 1)] * 20, 16, 5), expected)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_attention_ignores_what_an_earlier_owner_left(backend, dtype):
    """NaNs in a block's unwritten part must not reach the request that has the block now."""
    cache = backend.kv_blocks(1, 2, 16, 1, 16, dtype).layer(0)
    ops = CpuOps(backend)
    poison = np.full((16, 16), np.nan, np.float32)
    whole = make_batch([(0, 16)], 16, 1)
    ops.write_kv(poison, poison, cache, whole)
    for new in (1, 2, 3, 15):
        batch = make_batch([(0, new)], 16, 1)
        ops.write_kv(normal(new, 16), normal(new, 16), cache, batch)
        assert np.isfinite(ops.attention(normal(new, 16), cache, batch, 0.25)).all()


def test_kernels_refuse_wrong_shapes(backend):
    packed, _ = matrices(backend, "float32", normal(4, 8))
    with pytest.raises(ValueError, match="linear: x must be"):
        CpuOps(backend).linear(normal(2, 7), packed)
    with pytest.raises(ValueError, match="dtype is 'int3'"):
        backend.matrix([source(normal(4, 8))], "int3")
    with pytest.raises(ValueError, match="fewer bytes"):
        backend.matrix([replace(source(normal(4, 8)), shape=(5, 8))], "float32")
