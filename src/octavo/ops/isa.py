"""Which build of the native kernels this CPU runs. Chosen from the CPU's flags *before* a module is loaded: a module
for another instruction set would die of an illegal instruction."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from octavo.errors import ConfigError

# Variant -> the flags of /proc/cpuinfo it needs, best first.
_V3 = ("avx2", "fma", "f16c", "bmi2")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
_V4_BF16 = (*_V4, "avx512_vnni", "avx512_bf16")
_REQUIRED: dict[str, tuple[str, ...]] = {
    "amx": (*_V4_BF16, "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    "x86_v4_bf16": _V4_BF16,
    "x86_v4": _V4,
    "x86_v3": _V3,
}

# Those whose products of block types with bfloat16 activations multiply what octavo/ops/halves.py says.
UNPACKS_IN_HALVES = ("amx",)
# Of which compute types those keep matrices of bfloat16 compact (native/include/octavo/compact.h).
COMPACTS: dict[str, tuple[str, ...]] = {"amx": ("bfloat16", "float32"), "x86_v4_bf16": ("bfloat16",)}
# Makes the probabilities of attention with a bfloat16 cache in integers of 16 bits (powers.py).
SHORT_POWERS = ("amx",)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The flags of the first CPU in /proc/cpuinfo (the kernel does not list what it has not enabled)."""
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


@functools.cache
def _tiles_permitted() -> bool:
    """Linux gives AMX's tile registers to a process on request; a sandbox may refuse. Lasts for the process."""
    import ctypes

    request_permission, tile_data, arch_prctl = 0x1023, 18, 158
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def available() -> list[str]:
    """The variants that this CPU can run, best first."""
    names = [name for name, needed in _REQUIRED.items() if cpu_flags().issuperset(needed)]
    return [name for name in names if name != "amx" or _tiles_permitted()]


def choose(name: str | None = None) -> str:
    """The variant to use: `name`, or the best. Raises ConfigError where this CPU cannot run it."""
    runnable = available()
    if not runnable:
        raise ConfigError("this CPU has no AVX2 and FMA; octavo's kernels need at least x86-64-v3")
    name = name or runnable[0]
    if name not in runnable:
        raise ConfigError(f"isa is {name!r}; this CPU runs {', '.join(runnable)}", param="isa")
    return name


def load(name: str | None = None) -> ModuleType:
    """The native module of a variant (see `choose`)."""
    return importlib.import_module(f"octavo.ops._native_{choose(name)}")
