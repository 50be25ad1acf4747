"""`octavo collect-env`: what a bug report needs to say of the machine. Reads /proc and /sys, changes nothing."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import octavo
from octavo.cli.parser import Parser
from octavo.config import EngineConfig, packed_cache_folder

# The instruction sets that choose between octavo's variants, and those that later ones may use.
_CPU_FLAGS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx_vnni",
    "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
)  # fmt: skip
_MORE_PACKAGES = ("torch", "transformers")  # not octavo's own, but often of interest


def run(argv: list[str]) -> int:
    parser = Parser("octavo collect-env", "Describe this machine, for a bug report.", "[--json]")
    parser.add_argument("--json", action="store_true", help="as JSON")
    args = parser.parse_args(argv)
    facts = collect()
    print(json.dumps(facts, indent=2) if args.json else _as_text(facts))
    return 0


def collect() -> dict[str, Any]:
    """All facts, by name. None where the machine does not say."""
    cpu = _cpuinfo()
    flags = set(cpu.get("flags", "").split())
    from octavo.ops import cgroup, threads

    return {
        "octavo": octavo.__version__,
        "kernel_variants": _variants(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{_system_name()}, {platform.platform()}",
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "cpu_flags": [flag for flag in _CPU_FLAGS if flag in flags],
        "cpus_online": os.cpu_count(),
        "cpus_allowed": len(threads.usable_cpus()),
        "cpu_quota": cgroup.cpu_quota(),
        "kernel_threads": len(threads.choose_cpus()),
        "memory_total_gib": _meminfo("MemTotal"),
        "memory_available_gib": _meminfo("MemAvailable"),
        "memory_limit_gib": _memory_limit(),
        "packed_cache": _packed_cache(),
        "packages": _packages(),
    }


def _variants() -> list[str]:
    """The builds of the kernels that this CPU can run and that are installed; the first is taken."""
    from importlib.util import find_spec

    from octavo.ops import isa

    return [name for name in isa.available() if find_spec(f"octavo.ops._native_{name}")]


def _system_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "?")
    except OSError:
        return platform.system()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo."""
    lines = _read("/proc/cpuinfo").split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _meminfo(name: str) -> float | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return round(int(line.split()[1]) / 2**20, 2)
    return None


def _memory_limit() -> float | None:
    from octavo.ops import cgroup

    limit = min((group.limit for group in cgroup.memory_limits()), default=None)
    return None if limit is None else round(limit / 2**30, 2)


def _packed_cache() -> str | None:
    """The folder of packed weights, where none is named, and what is in it. None: it is turned off."""
    folder = packed_cache_folder(EngineConfig())
    if folder is None:
        return None
    try:
        sizes = [file.stat().st_size for file in folder.glob("*.packed")]
    except OSError as error:
        return f"{folder} ({error.strerror})"
    return f"{folder} ({len(sizes)} copies, {sum(sizes) / 2**30:.2f} GiB)"


def _packages() -> dict[str, str]:
    """The versions of what octavo depends on, as far as it is installed."""
    from importlib import metadata

    try:
        needed = metadata.requires("octavo") or []
    except metadata.PackageNotFoundError:  # run from its sources
        needed = []
    own = [re.split(r"[^\w.-]", line)[0] for line in needed if "extra ==" not in line]
    found = {}
    for name in (*own, *_MORE_PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _as_text(facts: dict[str, Any]) -> str:
    rows = []
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {version}" for key, version in value.items())
        elif isinstance(value, list):
            value = " ".join(value)
        rows.append(f"{name.replace('_', ' '):22}{'–' if value is None else value}")
    return "\n".join(rows)
