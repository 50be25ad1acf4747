"""How many threads the kernels should use, and on which CPUs: from affinity and cgroup quota, never from the machine's
core count alone (a container sees all cores of its host)."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus() -> list[int]:
    """The CPUs that this process may run on, ascending."""
    return sorted(os.sched_getaffinity(0))


def cgroup_quota() -> float | None:
    """The CPU quota of this process's cgroup (v2, then v1), in CPUs; None: no limit."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((_CGROUP / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((_CGROUP / "cpu/cpu.cfs_period_us").read_text())
        return None if quota_us <= 0 else quota_us / period_us
    except (OSError, ValueError):
        return None


def physical_cpus(cpus: list[int]) -> list[int]:
    """One CPU of each core among `cpus`: two hyperthreads share the vector units and gain nothing."""
    seen: set[str] = set()
    chosen = []
    for cpu in cpus:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        if siblings not in seen:
            seen.add(siblings)
            chosen.append(cpu)
    return chosen


def choose_cpus(num_threads: int | None = None) -> list[int]:
    """The CPUs for the kernel threads, one each. `num_threads` given: that many, taken from the usable ones in turn."""
    cpus = usable_cpus()
    if num_threads is not None:
        return [cpus[i % len(cpus)] for i in range(num_threads)]
    cores = physical_cpus(cpus)
    quota = cgroup_quota()
    return cores if quota is None else cores[: max(1, math.floor(quota))]
