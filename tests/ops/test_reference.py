"""The definition itself: against PyTorch in float64, and that a row never depends on the rows beside it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo.ops.api import Batch, TensorSource
from octavo.ops.reference import ReferenceBackend, ReferenceOps, round_to

OPS, BACKEND = ReferenceOps(), ReferenceBackend()
HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 16
Array = npt.NDArray[np.float32]


def rng_array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def source(values: Array) -> TensorSource:
    return TensorSource("w", np.ascontiguousarray(values).view(np.uint8).reshape(-1), "F32", values.shape)


def make_batch(starts: list[int], lengths: list[int]) -> Batch:
    """Request r computes tokens [starts[r], lengths[r]); blocks are dealt out in a scrambled order."""
    per_request = [-(-length // BLOCK) for length in lengths]
    ids = np.random.default_rng(1).permutation(sum(per_request)).astype(np.int32)
    tables = np.zeros((len(lengths), max(per_request)), np.int32)
    positions, slots, taken = [], [], 0
    for r, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        tables[r, : per_request[r]] = ids[taken : taken + per_request[r]]
        taken += per_request[r]
        for position in range(start, length):
            positions.append(position)
            slots.append(int(tables[r, position // BLOCK]) * BLOCK + position % BLOCK)
    counts = np.array(lengths) - np.array(starts)
    return Batch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array(slots, np.int32),
        query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        seq_lens=np.array(lengths, np.int32),
        block_tables=tables,
        logit_rows=np.array([], np.int32),
    )


def attend_all(lengths: list[int], dtype: Any) -> tuple[list[Array], Array, Array, Array, Batch, Any]:
    batch = make_batch([0] * len(lengths), lengths)
    tokens = sum(lengths)
    q, k, v = (
        rng_array(tokens, HEADS * DIM),
        rng_array(tokens, KV_HEADS * DIM, seed=1),
        rng_array(tokens, KV_HEADS * DIM, seed=2),
    )
    cache = BACKEND.kv_blocks(1, int(batch.block_tables.max()) + 1 + len(lengths), BLOCK, KV_HEADS, DIM, dtype).layer(0)
    OPS.write_kv(k, v, cache, batch)
    out = OPS.attention(q, cache, batch, DIM**-0.5)
    return np.split(out, batch.query_start[1:-1]), q, k, v, batch, cache


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 5e-3)])
def test_attention_equals_pytorch(dtype: Any, tolerance: float) -> None:
    """Lengths on both sides of a split's 256 tokens; each request sees its own tokens only."""
    lengths = [1, 37, 256, 257, 600]
    outputs, q, k, v, batch, _ = attend_all(lengths, dtype)
    for r, out in enumerate(outputs):
        rows = slice(batch.query_start[r], batch.query_start[r + 1])
        heads = [
            torch.from_numpy(round_to(x[rows], dtype)).double().reshape(lengths[r], -1, DIM).transpose(0, 1)
            for x in (q, k, v)
        ]
        expected = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        difference = out - expected.transpose(0, 1).reshape(lengths[r], -1).numpy()
        assert np.abs(difference).max() < tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_do_not_change_a_bit(dtype: Any) -> None:
    """The last rows computed alone, in another batch, equal those of the whole prompt."""
    outputs, q, _, _, batch, cache = attend_all([300, 20], dtype)
    for start in (0, 255, 299):
        chunk = Batch(
            token_ids=batch.token_ids[start:300],
            positions=batch.positions[start:300],
            slot_mapping=batch.slot_mapping[start:300],
            query_start=np.array([0, 300 - start], np.int32),
            seq_lens=batch.seq_lens[:1],
            block_tables=batch.block_tables[:1],
            logit_rows=batch.logit_rows,
        )
        np.testing.assert_array_equal(OPS.attention(q[start:300], cache, chunk, DIM**-0.5), outputs[0][start:])


def test_extreme_scores_stay_finite() -> None:
    batch = make_batch([0], [300])
    q, v = np.full((300, DIM), 1e3, np.float32), rng_array(300, DIM)
    cache = BACKEND.kv_blocks(1, 19, BLOCK, 1, DIM, "float32").layer(0)
    OPS.write_kv(q * np.linspace(-1, 1, 300, dtype=np.float32)[:, None], v, cache, batch)
    out = OPS.attention(q, cache, batch, 1.0)
    np.testing.assert_allclose(out, v, rtol=1e-6)  # the newest key is always the best, by thousands


def test_rms_norm() -> None:
    x, weight = rng_array(5, 64), rng_array(64, seed=1)
    expected = torch.nn.functional.rms_norm(
        torch.from_numpy(x).double(), (64,), torch.from_numpy(weight).double(), 1e-5
    )
    np.testing.assert_allclose(OPS.rms_norm(x, weight, 1e-5), expected.numpy(), rtol=1e-6)


def test_linear_rounds_the_inputs_and_nothing_else() -> None:
    x, weights, bias = rng_array(3, 64), rng_array(10, 64, seed=1), rng_array(10, seed=2)
    for dtype, rounded in (("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16)):
        matrix = BACKEND.matrix([source(weights[:4]), source(weights[4:])], dtype, [source(bias[:4]), source(bias[4:])])
        exact = x.astype(rounded).astype(np.float64) @ weights.astype(rounded).astype(np.float64).T + bias
        np.testing.assert_allclose(OPS.linear(x, matrix), exact, rtol=0, atol=1e-5)
        assert matrix.shape == (10, 64)


@pytest.mark.parametrize("op", ["linear", "rms_norm", "silu_mul", "rope"])
def test_rows_do_not_depend_on_each_other(op: str) -> None:
    x = rng_array(33, 128)
    matrix = BACKEND.matrix([source(rng_array(50, 128))], "bfloat16")
    table, positions = rng_array(33, 16), np.arange(33, dtype=np.int32)
    run = {
        "linear": lambda rows: OPS.linear(x[rows], matrix),
        "rms_norm": lambda rows: OPS.rms_norm(x[rows], x[0], 1e-5),
        "silu_mul": lambda rows: OPS.silu_mul(x[rows]),
        "rope": lambda rows: OPS.rope(x[rows], positions[rows], table, 32),
    }[op]
    together = run(slice(0, 33))
    for t in range(33):
        np.testing.assert_array_equal(run(slice(t, t + 1))[0], together[t])


def test_rope_turns_pairs_and_passes_the_rest() -> None:
    """Two heads of 6 columns of which 4 turn, by a right angle at position 1."""
    table = np.array([[1, 1, 0, 0], [0, 0, 1, 1]], np.float32)
    x = np.arange(1, 13, dtype=np.float32)[None, :].repeat(2, axis=0)
    turned = OPS.rope(x, np.array([0, 1], np.int32), table, 6)
    assert turned[0].tolist() == x[0].tolist()
    assert turned[1].tolist() == [-3, -4, 1, 2, 5, 6, -9, -10, 7, 8, 11, 12]


def test_silu_mul() -> None:
    gate_up = np.array([[0, 1, -200, 200, 3, 4, 5, 6]], np.float32)
    expected = [0, 4 / (1 + np.exp(-1)), 0, 1200]
    np.testing.assert_allclose(OPS.silu_mul(gate_up)[0], expected, rtol=1e-6)


def test_the_small_ones() -> None:
    x = rng_array(4, 6)
    matrix = BACKEND.matrix([source(x)], "bfloat16")
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(OPS.embedding(matrix, np.array([2, 0, 2], np.int32)), rounded[[2, 0, 2]])
    first, second, third = OPS.split(x, (1, 2, 3))
    np.testing.assert_array_equal(np.concatenate([third, first, second], axis=1), x[:, [3, 4, 5, 0, 1, 2]])
    np.testing.assert_array_equal(OPS.add(x, x), 2 * x)
    np.testing.assert_array_equal(OPS.take_rows(x, np.array([1, 3], np.int32)), x[[1, 3]])
