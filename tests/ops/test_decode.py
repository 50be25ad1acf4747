"""The number formats: against the gguf package bit by bit, and every native variant against NumPy bit by bit."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from octavo.ops import isa
from octavo.ops.api import TensorSource
from octavo.ops.decode import BLOCKS, decode, num_bytes
from support.blocks import BLOCK_TYPES, PLAIN_TYPES, random_blocks

ROWS, COLUMNS = 7, 1024


def bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    assert values.dtype == np.float32
    return np.ascontiguousarray(values).view(np.uint32)


def source(type: str, raw: npt.NDArray[np.uint8], row_order: Any = None) -> TensorSource:
    return TensorSource("w", raw.reshape(-1), type, (ROWS, COLUMNS), row_order)


def raw_of(type: str) -> npt.NDArray[np.uint8]:
    return random_blocks(type, ROWS, COLUMNS, np.random.default_rng(len(type)))


def test_all_types_are_covered() -> None:
    assert set(BLOCKS) == {*BLOCK_TYPES, *PLAIN_TYPES}


@pytest.mark.parametrize("type", [type for type in BLOCKS if type != "F64"])
def test_equals_the_gguf_package(type: str) -> None:
    raw = raw_of(type)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type])
    np.testing.assert_array_equal(bits(decode(source(type, raw))), bits(expected))


def test_float64_is_rounded_once() -> None:
    values = np.array([[1 + 2.0**-24, -(1 + 3 * 2.0**-24)]])
    raw = values.view(np.uint8).reshape(-1)
    decoded = decode(TensorSource("w", raw, "F64", (1, 2)))
    np.testing.assert_array_equal(decoded, np.array([[1, -(1 + 2.0**-22)]], np.float32))


@pytest.mark.parametrize("type", ["F32", "BF16", "Q4_1", "Q6_K"])
def test_row_order(type: str) -> None:
    raw, order = raw_of(type), np.array([3, 0, 6, 1, 2, 5, 4], np.int32)
    np.testing.assert_array_equal(decode(source(type, raw, order)), decode(source(type, raw))[order])


def test_row_order_of_a_vector() -> None:
    raw = np.arange(4, dtype=np.float32).view(np.uint8)
    decoded = decode(TensorSource("b", raw, "F32", (4,), np.array([2, 0, 3, 1], np.int32)))
    assert decoded.tolist() == [2, 0, 3, 1]


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_a_vector_of_a_block_type(type: str) -> None:
    raw = raw_of(type)[:1].reshape(-1)
    row = decode(TensorSource("w", raw, type, (1, COLUMNS)))[0]
    np.testing.assert_array_equal(decode(TensorSource("b", raw, type, (COLUMNS,))), row)
    backwards = np.arange(COLUMNS, dtype=np.int32)[::-1]
    np.testing.assert_array_equal(decode(TensorSource("b", raw, type, (COLUMNS,), backwards)), row[::-1])


def test_num_bytes() -> None:
    assert num_bytes("Q4_K", (3, 512)) == 3 * 2 * 144
    assert num_bytes("BF16", (5,)) == 10
    assert num_bytes("F32", ()) == 4
    with pytest.raises(ValueError, match="Q8_0 has blocks of 32 values, and a row of 48"):
        num_bytes("Q8_0", (2, 48))


@pytest.mark.parametrize("variant", isa.available())
@pytest.mark.parametrize("type", list(BLOCKS))
def test_native_equals_numpy(variant: str, type: str) -> None:
    raw = raw_of(type)
    native = isa.load(variant).decode(type, raw.reshape(-1), ROWS, COLUMNS)
    np.testing.assert_array_equal(bits(native), bits(decode(source(type, raw))))


@pytest.mark.parametrize("variant", isa.available())
def test_native_reads_every_half(variant: str) -> None:
    """All 65536 float16 values: normal, subnormal, zero, infinite, not a number."""
    halves = np.arange(65536, dtype=np.uint16)
    native = isa.load(variant).decode("F16", halves.view(np.uint8), 1, len(halves))
    np.testing.assert_array_equal(bits(native)[0], bits(halves.view(np.float16).astype(np.float32)))


@pytest.mark.parametrize("variant", isa.available())
def test_native_refuses_what_it_does_not_know(variant: str) -> None:
    native = isa.load(variant)
    with pytest.raises(ValueError, match="Q2_K"):
        native.decode("Q2_K", np.zeros(84, np.uint8), 1, 256)
    with pytest.raises(ValueError, match="48"):
        native.decode("Q8_0", np.zeros(68, np.uint8), 1, 48)
