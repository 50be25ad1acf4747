"""The KV cache's memory: the blocks of all layers, the swap space's slots, and what a plan moves between them.

Owns the bytes. Which block holds what is the control plane's (core/kv_manager.py); how a block lies in memory is the
backend's.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from octavo.core.plan import CopyBlock, EvictBlock, LoadBlock, RestoreBlock, SaveBlock, Transfer
from octavo.errors import ConfigError
from octavo.ops.api import KVBlocks

# For what is still in memory when the engine ends. A client waits somewhat longer (engine/client.py).
CLOSE_SECONDS = 10.0
CLOSE_PORTION = 64  # blocks that are handed over at once: a store drops what would take much memory to wait

Bytes = npt.NDArray[np.uint8]


class BlockSink(Protocol):
    """Where evicted blocks go (runtime/offload.py)."""

    def put(self, content_hash: bytes, payload: Any) -> None:
        """Keep a block's bytes, if that can be done at once."""

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all are kept. False: it took longer than `timeout` seconds."""

    def close(self, timeout: float = ...) -> None: ...


class KVStorage:
    def __init__(
        self,
        blocks: KVBlocks,
        *,
        num_slots: int = 0,
        swap_dir: str | None = None,
        sink: BlockSink | None = None,
    ) -> None:
        """`swap_dir`: the slots are a file there that has no name; None: they are memory, taken when it is first used.
        Raises ConfigError where the file cannot be made."""
        self.blocks = blocks
        self._sink = sink
        self._slots = _map(num_slots * blocks.block_bytes, swap_dir).reshape(num_slots, blocks.block_bytes)

    def carry_out(self, transfers: Sequence[Transfer]) -> None:
        """In their order: each relies on what those before it leave behind."""
        for transfer in transfers:
            match transfer:
                case CopyBlock(from_block, to_block, num_tokens):
                    self.blocks.copy_block(from_block, to_block, num_tokens)
                case SaveBlock(block_id, slot):
                    self.blocks.save_block(block_id, self._slots[slot])
                case RestoreBlock(slot, block_id):
                    self.blocks.load_block(block_id, self._slots[slot])
                case EvictBlock(block_id, content_hash):
                    self._evict(block_id, content_hash)
                case LoadBlock(payload, block_id):
                    self.blocks.load_block(block_id, np.frombuffer(payload, np.uint8))

    def close(self, evictions: Sequence[EvictBlock]) -> None:
        """An orderly end: as many of these blocks are kept as CLOSE_SECONDS allow."""
        sink, deadline = self._sink, time.monotonic() + CLOSE_SECONDS
        if sink is None:
            return
        for start in range(0, len(evictions), CLOSE_PORTION):
            self.carry_out(evictions[start : start + CLOSE_PORTION])
            if not sink.flush(max(0.0, deadline - time.monotonic())):
                break
        sink.close(timeout=0.0)

    def _evict(self, block_id: int, content_hash: bytes) -> None:
        if self._sink is not None:
            payload = np.empty(self.blocks.block_bytes, np.uint8)
            self.blocks.save_block(block_id, payload)
            self._sink.put(content_hash, payload.data)


def _map(num_bytes: int, directory: str | None) -> Bytes:
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    if directory is None:
        return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # a disk that is too small is known now
            return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)
    except OSError as error:
        raise ConfigError(
            f"swap_dir is {directory!r}: no file of {num_bytes} bytes can be made there ({error.strerror})",
            param="swap_dir",
        ) from None
