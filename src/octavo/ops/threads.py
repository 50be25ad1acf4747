"""How many threads the kernels should use, and on which CPUs: from affinity and cgroup quota, never from the machine's
core count alone (a container sees all cores of its host); and checked by some milliseconds of work, since the CPUs of a
virtual machine may be two to a core without saying so."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

from octavo.ops import cgroup

logger = logging.getLogger(__name__)

# All CPUs together get at least so many times the work done of half of them, or the other half is no use. Two cores
# reach 1.6 to 2, two threads of one core 1 to 1.1.
WORTHWHILE = 1.25


def usable_cpus() -> list[int]:
    """The CPUs that this process may run on, ascending."""
    return sorted(os.sched_getaffinity(0))


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


def choose_cpus(num_threads: int | None = None, measure_work: Callable[[list[int]], float] | None = None) -> list[int]:
    """The CPUs for the kernel threads, one each. `num_threads` given: that many, taken from the usable ones in turn.

    `measure_work`: how much threads on these CPUs get done at once; None: nothing is measured."""
    cpus = usable_cpus()
    if num_threads is not None:
        return [cpus[i % len(cpus)] for i in range(num_threads)]
    cores = physical_cpus(cpus)
    if measure_work is not None:
        cores = without_idle_halves(cores, measure_work)
    quota = cgroup.cpu_quota()
    return cores if quota is None else cores[: max(1, math.floor(quota))]


def without_idle_halves(cpus: list[int], measure_work: Callable[[list[int]], float]) -> list[int]:
    """One half of the CPUs where the other adds next to nothing: every second one, or the first ones, as virtual
    machines number the threads of their cores."""
    if len(cpus) < 2:
        return cpus
    work = measure_work(cpus)
    halves = [cpus[::2]] if len(cpus) < 4 else [cpus[::2], cpus[: len(cpus) // 2]]
    for half in halves:
        if work < WORTHWHILE * measure_work(half):
            logger.info("%d CPUs do no more than %d of them: %d threads", len(cpus), len(half), len(half))
            return half
    return cpus
