"""Blocks of the paged cache as wholes: moved with all their layers, and no memory where nothing was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.ops import isa
from octavo.ops.cpu import CpuBackend, CpuOps
from octavo.ops.reference import ReferenceBackend, ReferenceOps
from support.logits import one_request

LAYERS, BLOCK, KV_HEADS, DIM = 3, 32, 2, 32


def owner_of(name):
    """The ops and the backend of an instruction set, or of the reference."""
    if name == "reference":
        return ReferenceOps(), ReferenceBackend()
    backend = CpuBackend(variant=name, num_threads=2)
    return CpuOps(backend), backend


def rows(num_tokens, seed, heads=KV_HEADS):
    return np.random.default_rng(seed).standard_normal((num_tokens, heads * DIM)).astype(np.float32)


def in_block(batch, block):
    """The batch of one block, in another block."""
    batch.slot_mapping = (batch.slot_mapping % BLOCK + block * BLOCK).astype(np.int32)
    batch.block_tables = np.full((1, 1), block, np.int32)
    return batch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("owner", [*isa.available(), "reference"])
def test_a_block_moves_with_all_its_layers(owner, dtype):
    ops, backend = owner_of(owner)
    blocks = backend.kv_blocks(LAYERS, 4, BLOCK, KV_HEADS, DIM, dtype)
    written = in_block(one_request(BLOCK, BLOCK, range(BLOCK)), 2)
    for i in range(LAYERS):
        ops.write_kv(rows(BLOCK, i), rows(BLOCK, 10 + i), blocks.layer(i), written)

    def attend(source, block, num_tokens):
        batch = in_block(one_request(num_tokens, BLOCK, range(num_tokens)), block)
        query = rows(num_tokens, 99, heads=4)
        return np.stack([ops.attention(query, source.layer(i), batch, DIM**-0.5) for i in range(LAYERS)])

    expected = attend(blocks, 2, BLOCK)
    assert len({layer.tobytes() for layer in expected}) == LAYERS
    payload = np.empty(blocks.block_bytes, np.uint8)
    blocks.save_block(2, payload)
    elsewhere = backend.kv_blocks(LAYERS, 2, BLOCK, KV_HEADS, DIM, dtype)
    elsewhere.load_block(1, payload)
    assert np.array_equal(attend(elsewhere, 1, BLOCK), expected)

    blocks.copy_block(2, 0, 20)
    assert np.array_equal(attend(blocks, 0, 20), expected[:, :20])
    assert np.array_equal(attend(blocks, 2, BLOCK), expected), "the copied block changed"


def test_a_block_in_use_takes_no_other_blocks_memory():
    """Thirty layers of a large cache, one token written: a few pages, and not a large one for each layer."""
    ops, backend = owner_of(isa.available()[0])
    blocks, token = backend.kv_blocks(30, 4000, BLOCK, KV_HEADS, DIM, "bfloat16"), one_request(1, BLOCK, [1])
    ops.write_kv(rows(1, 0), rows(1, 0), backend.kv_blocks(1, 1, BLOCK, KV_HEADS, DIM, "bfloat16").layer(0), token)
    before = resident_bytes()
    for i in range(30):
        ops.write_kv(rows(1, 1), rows(1, 2), blocks.layer(i), token)
    assert resident_bytes() - before < 2**23  # one page of 2 MB, and what the test itself takes


def resident_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024
