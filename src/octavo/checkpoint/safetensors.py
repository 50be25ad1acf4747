"""Reads safetensors files: eight bytes of length, a JSON header, then the tensors.

One file, or many named by model.safetensors.index.json. The index decides which files and tensors count.
Source: the safetensors format, github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from octavo.checkpoint.mapping import map_file
from octavo.errors import CheckpointError
from octavo.ops.api import TensorSource
from octavo.ops.decode import BLOCKS

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

logger = logging.getLogger(__name__)


def read_folder(folder: Path) -> dict[str, TensorSource]:
    """All tensors of a Hugging Face folder. Raises CheckpointError naming the file, and the tensor if there is one."""
    if (folder / INDEX).is_file():
        return _read_indexed(folder)
    single = folder / "model.safetensors"
    if single.is_file():
        return read_file(single)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no .safetensors file")
    if len(files) > 1:
        raise CheckpointError(f"{folder} has {len(files)} .safetensors files but no {INDEX} that says what is in which")
    return read_file(files[0])


def _read_indexed(folder: Path) -> dict[str, TensorSource]:
    try:
        weight_map: dict[str, str] = dict(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder / INDEX}: holds no readable weight_map: {error!r}") from error
    names_of_file: dict[str, list[str]] = defaultdict(list)
    for name, file in weight_map.items():
        names_of_file[file].append(name)
    for file in names_of_file:
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file} is missing, which {INDEX} names")

    tensors: dict[str, TensorSource] = {}
    strays = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in names_of_file)
    for file, names in names_of_file.items():
        found = read_file(folder / file)
        for name in names:
            if name not in found:
                raise CheckpointError(f"{folder / file} lacks the tensor {name}, which {INDEX} puts there")
            tensors[name] = found.pop(name)
        strays += sorted(f"{file}:{name}" for name in found)
    if strays:
        logger.warning("%s does not name, and octavo ignores: %s", INDEX, ", ".join(strays))
    return tensors


def read_file(path: Path) -> dict[str, TensorSource]:
    """The tensors of one file, in the order of their bytes. Checks that they lie inside it and do not overlap."""
    data = map_file(path)
    length = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise CheckpointError(
            f"{path}: the header is said to have {length} bytes and the file has {len(data)}: not a safetensors file"
        )
    begin_of_data = 8 + length
    try:
        header = json.loads(data[8:begin_of_data].tobytes())
        entries = sorted(
            ((name, _Entry(**entry)) for name, entry in header.items() if name != "__metadata__"),
            key=lambda item: item[1].data_offsets,
        )
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not a safetensors header: {error}") from error

    tensors: dict[str, TensorSource] = {}
    previous_end, available = 0, len(data) - begin_of_data
    for name, entry in entries:
        begin, end = entry.data_offsets
        if end > available:
            raise CheckpointError(
                f"{path}: the file is cut short: {name} ends at byte {end} of {available} bytes of data"
            )
        if begin < previous_end or end < begin:
            raise CheckpointError(f"{path}: {name} lies at bytes {begin} to {end}, which overlaps another tensor")
        if entry.dtype in BLOCKS and end - begin != math.prod(entry.shape) * BLOCKS[entry.dtype][1]:
            raise CheckpointError(
                f"{path}: {name} has {end - begin} bytes, which does not fit {entry.dtype} {entry.shape}"
            )
        previous_end = end
        tensors[name] = TensorSource(
            name, data[begin_of_data + begin : begin_of_data + end], entry.dtype, tuple(entry.shape)
        )
    return tensors


class _Entry:
    """One line of the header, its types checked. Raises TypeError."""

    def __init__(self, dtype: Any, shape: Any, data_offsets: Any) -> None:
        numbers = [*shape, *data_offsets]
        if not isinstance(dtype, str) or len(data_offsets) != 2:
            raise TypeError(f"dtype {dtype!r}, data_offsets {data_offsets!r}")
        if any(type(number) is not int or number < 0 for number in numbers):
            raise TypeError(f"shape {shape!r}, data_offsets {data_offsets!r}")
        self.dtype: str = dtype
        self.shape: list[int] = shape
        self.data_offsets: tuple[int, int] = tuple(data_offsets)
